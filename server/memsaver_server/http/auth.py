"""Who may call: the key, the browser's own word on where a request comes from, and the addresses that need no key."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from fastapi import Request

from memsaver_core.errors import ConfigurationError
from memsaver_server.http.errors import ForbiddenError, UnauthorizedError
from memsaver_server.settings import Settings


def bearer_is_right(request: Request, key: str) -> bool:
    """Compare the caller's key in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Header bytes arrive decoded as Latin-1; the key may be any text, and its last byte what Latin-1 calls a space.
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip(" \t").encode("latin-1"), key.encode())


def check_key(request: Request, settings: Settings) -> None:
    """Let the request pass if no key is set or the caller has it.

    Raises:
        UnauthorizedError: it has not.
    """
    if settings.api_key is not None and not bearer_is_right(request, settings.api_key.get_secret_value()):
        raise UnauthorizedError("this server asks for a key; send it as 'Authorization: Bearer KEY'")


def check_origin(request: Request, settings: Settings) -> None:
    """Refuse what a browser sends for another site: without a key, a page anywhere could release a local engine.

    Raises:
        ForbiddenError: the browser says that another site asks, or the request names a host that only looks local.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ForbiddenError("a page of another site may not call this server")
    # A site can let its own name point to this machine; its pages then are of the same origin. Neither an address nor
    # a name without a dot can be a site's.
    name = _name_called(request)
    local, _ = request.scope.get("server") or ("", None)
    if settings.api_key is None and _is_loopback(local) and not (_is_address(name) or _is_local(name)):
        raise ForbiddenError(
            f"without a key this server is called by address or as localhost, not as {name!r}; "
            "to serve under that name, set MEMSAVER_API_KEY"
        )


def check_address(host: str, settings: Settings) -> None:
    """Refuse to serve beyond this machine without a key.

    Raises:
        ConfigurationError: ``host`` is not loopback, and no key is set.
    """
    if not (_is_loopback(host) or host == "localhost") and settings.api_key is None:
        raise ConfigurationError(
            f"refusing to serve on {host!r} without a key: set MEMSAVER_API_KEY, or bind to 127.0.0.1 or a Unix socket"
        )


def caller(request: Request) -> str:
    """Return who calls, for the audit line."""
    address = request.client.host if request.client else "unix"
    return f"{address} {request.headers.get('user-agent', '')[:120]}".strip()


def _name_called(request: Request) -> str:
    """The host that the request is addressed to, without its port; an empty string where it names none."""
    host = request.headers.get("host", "")
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets without an address
        return host


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_local(name: str) -> bool:
    return "." not in name or name.endswith(".localhost")
