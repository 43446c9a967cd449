"""Who may call: keys, browsers, and the addresses that need no key."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from fastapi import Request
from pydantic import SecretStr
from starlette.types import Scope

from memsaver_core.contract.errors import ConfigurationError, ForbiddenError, UnauthorizedError
from memsaver_server.address import is_ip_address
from memsaver_server.http.fairness import Kind
from memsaver_server.http.request_signing import is_signed
from memsaver_server.settings import Settings

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def reads_only(endpoint: Endpoint) -> Endpoint:
    """Mark a route that changes nothing: the read-only key suffices for it."""
    endpoint.__dict__["reads_only"] = True
    return endpoint


def has_valid_key(request: Request, key: SecretStr | None) -> bool:
    """Return whether the request carries ``key``. Compares in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    # Headers are decoded as Latin-1, in which the last byte of a UTF-8 key may be white space: strip only " \t".
    sent = given.strip(" \t").encode("latin-1")
    return key is not None and scheme.lower() == "bearer" and hmac.compare_digest(sent, key.get_secret_value().encode())


def caller_kind(settings: Settings, scope: Scope) -> Kind:
    """Return the kind of a request, which decides its turn. A signature is not verified here: that takes the body."""
    request = Request(scope)
    keys = (settings.api_key, settings.read_key)
    if settings.api_key is not None and not any(has_valid_key(request, key) for key in keys):
        return "signed" if is_signed(request.headers) else "unknown"
    return "reads" if request.method in ("GET", "HEAD") else "changes"


def check_key(request: Request, settings: Settings, *, reads: bool = False) -> None:
    """Raise UnauthorizedError if the caller's key is missing or wrong, ForbiddenError if it may only read, or if no key
    is set and the caller is not on this machine. With ``reads`` the read-only key suffices for any route."""
    if settings.api_key is None:
        if not _is_local(request.scope):
            raise ForbiddenError(
                "without a key this server accepts only callers on its own machine, through a loopback address or a "
                "Unix socket; set MEMSAVER_API_KEY",
                "not_local",
            )
    elif has_valid_key(request, settings.read_key):
        if not (reads or _only_reads(request)):
            raise ForbiddenError("this key may only read; this call needs the one in MEMSAVER_API_KEY", "read_only")
    elif not has_valid_key(request, settings.api_key):
        wrong = "authorization" in request.headers
        why = "the key is wrong; send this server's" if wrong else "this server requires a key; send it"
        raise UnauthorizedError(f"{why} as 'Authorization: Bearer KEY'", "wrong_key" if wrong else "no_key")


def check_browser(request: Request, settings: Settings) -> None:
    """Refuse requests that a browser sends for another site's page, which could otherwise release a local engine.
    Raises ForbiddenError if the page or the host name is not this server's, or if the browser only prefetches."""
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise ForbiddenError("a page of another site may not call this server", "other_site")
    if any("prefetch" in request.headers.get(name, "").lower() for name in ("sec-purpose", "purpose", "x-moz")):
        raise ForbiddenError("a browser may not call this server before its user does", "prefetch")
    if settings.api_key is None:  # a browser has no key to send
        _check_host(request, settings)
        _check_page(request)


def _check_host(request: Request, settings: Settings) -> None:
    """Refuse host names that are not ours: a site can let its own resolve to this machine (DNS rebinding). Pages of any
    site can call ``0.0.0.0`` and ``[::ffff:127.0.0.1]``, too: browsers send no ``Sec-Fetch-Site`` there."""
    name, (_, port) = _host_of(request), _server(request.scope)
    ours = {"localhost", *(each.strip().lower() for each in settings.hosts.split(","))}
    if name and port is not None and name not in ours and not _is_loopback(name):
        raise ForbiddenError(
            f"without a key this server accepts requests to localhost or a loopback address, not to {name!r}; to serve "
            "under that name, add it to MEMSAVER_HOSTS or set MEMSAVER_API_KEY",
            "other_host",
        )


def _check_page(request: Request) -> None:
    """Refuse pages of other sites. Over plain HTTP browsers send no ``Sec-Fetch-Site`` to most hosts."""
    headers = request.headers
    pages = [headers[name] for name in ("origin", "referer") if name in headers]
    if any(_host_and_port(page) != headers.get("host", "").lower() for page in pages):
        raise ForbiddenError("a page of another site may not call this server", "other_site")
    is_browser = request.method in ("GET", "HEAD") and headers.get("user-agent", "").startswith("Mozilla/")
    if is_browser and not (pages or "sec-fetch-site" in headers or _only_reads(request)):
        raise ForbiddenError(
            "a browser that does not say which page calls may not change anything; use the dashboard, or curl",
            "other_site",
        )


def check_address(host: str, settings: Settings) -> None:
    """Raise ConfigurationError if ``host`` is not loopback and no key is set."""
    if not (_is_loopback(host) or host == "localhost") and settings.api_key is None:
        raise ConfigurationError(
            f"refusing to serve on {host!r} without a key: set MEMSAVER_API_KEY, or bind to 127.0.0.1 or a Unix socket"
        )


def caller(request: Request) -> str:
    """Return address and user agent of the caller, for the audit log."""
    address = request.client.host if request.client else "unix"
    return f"{address} {request.headers.get('user-agent', '')[:120]}".strip()


def _only_reads(request: Request) -> bool:
    return getattr(request.scope.get("endpoint"), "reads_only", False)


def _is_local(scope: Mapping[str, Any]) -> bool:
    """Whether the connection ends at a loopback address or a Unix socket; false if the server does not report where."""
    address, port = _server(scope)
    if port is None:
        return bool(address) and not is_ip_address(address)
    return _is_loopback(address)


def _server(scope: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the connection's local address, IPv4-mapped ones as IPv4, and port; or a Unix socket's path, and None."""
    host, port = scope.get("server") or ("", None)
    return host.removeprefix("::ffff:"), port


def _host_of(request: Request) -> str:
    host = request.headers.get("host", "")
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets without an address
        return host


def _host_and_port(page: str) -> str:
    """Return host and port of a page's address or origin; of a hidden origin (``null``) nothing that equals a host."""
    try:
        return urlsplit(page).netloc.lower()
    except ValueError:
        return "null"


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host) if is_ip_address(host) else None
    return address is not None and address.is_loopback and getattr(address, "ipv4_mapped", None) is None
