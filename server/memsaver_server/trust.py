"""Who may call: the key, the browser's own word on where a request comes from, and the addresses that need no key."""

from __future__ import annotations

import hmac
import ipaddress

from fastapi import Request

from memsaver_core.errors import ConfigurationError
from memsaver_server.problems import ForbiddenError, UnauthorizedError
from memsaver_server.settings import Settings


def bearer_is_right(request: Request, key: str) -> bool:
    """Compare the caller's key in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Header bytes arrive decoded as Latin-1; the key may be any text.
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), key.encode())


def check_key(request: Request, settings: Settings) -> None:
    """Let the request pass if no key is set or the caller has it.

    Raises:
        UnauthorizedError: it has not.
    """
    if settings.api_key is not None and not bearer_is_right(request, settings.api_key.get_secret_value()):
        raise UnauthorizedError("this server asks for a key; send it as 'Authorization: Bearer KEY'")


def check_origin(request: Request) -> None:
    """Refuse what a browser sends for another site: without a key, a page anywhere could release a local engine.

    Raises:
        ForbiddenError: the browser says that another site asks.
    """
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ForbiddenError("a page of another site may not call this server")


def check_address(host: str, settings: Settings) -> None:
    """Refuse to serve beyond this machine without a key.

    Raises:
        ConfigurationError: ``host`` is not loopback, and no key is set.
    """
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback and settings.api_key is None:
        raise ConfigurationError(
            f"refusing to serve on {host!r} without a key: set MEMSAVER_API_KEY, or bind to 127.0.0.1 or a Unix socket"
        )


def caller(request: Request) -> str:
    """Return who calls, for the audit line."""
    address = request.client.host if request.client else "unix"
    return f"{address} {request.headers.get('user-agent', '')[:120]}".strip()
