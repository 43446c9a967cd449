"""Who may call: API key, browser origin, and the addresses that need no key."""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from fastapi import Request

from memsaver_core.errors import ConfigurationError
from memsaver_server.http.errors import ForbiddenError, UnauthorizedError
from memsaver_server.settings import Settings


def has_valid_key(request: Request, key: str) -> bool:
    """Return whether the request carries ``key``. Compares in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Headers are decoded as Latin-1, in which the last byte of a UTF-8 key may be white space: strip only " \t".
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip(" \t").encode("latin-1"), key.encode())


def check_key(request: Request, settings: Settings) -> None:
    """Check the caller's key, if one is set.

    Raises:
        UnauthorizedError: it is missing or wrong.
    """
    if settings.api_key is not None and not has_valid_key(request, settings.api_key.get_secret_value()):
        raise UnauthorizedError("this server requires a key; send it as 'Authorization: Bearer KEY'")


def check_origin(request: Request, settings: Settings) -> None:
    """Refuse requests that a browser sends for another site's page, which could otherwise release a local engine.

    Raises:
        ForbiddenError: the browser names another site as the origin, or the Host header may be another site's.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ForbiddenError("a page of another site may not call this server")
    # DNS rebinding: a site can resolve its own name to this machine, which makes its pages same-origin. It cannot do
    # that with an address or a name without a dot.
    name = _host_of(request)
    local, _ = request.scope.get("server") or ("", None)
    ours = _is_address(name) or "." not in name or name.endswith(".localhost")
    if settings.api_key is None and _is_loopback(local) and not ours:
        raise ForbiddenError(
            f"without a key this server accepts requests to its address or to localhost, not to {name!r}; "
            "to serve under that name, set MEMSAVER_API_KEY"
        )


def check_address(host: str, settings: Settings) -> None:
    """Require a key to serve beyond this machine.

    Raises:
        ConfigurationError: ``host`` is not loopback and no key is set.
    """
    if not (_is_loopback(host) or host == "localhost") and settings.api_key is None:
        raise ConfigurationError(
            f"refusing to serve on {host!r} without a key: set MEMSAVER_API_KEY, or bind to 127.0.0.1 or a Unix socket"
        )


def caller(request: Request) -> str:
    """Return address and user agent of the caller, for the audit log."""
    address = request.client.host if request.client else "unix"
    return f"{address} {request.headers.get('user-agent', '')[:120]}".strip()


def _host_of(request: Request) -> str:
    """Return the Host header without its port, or an empty string."""
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
