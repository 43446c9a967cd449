"""The address of a service, as callers write it."""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

DEFAULT_PORT = 30000
DEFAULT_URL = f"http://127.0.0.1:{DEFAULT_PORT}"


def place(host: str, port: int) -> str:
    """Return host and port as an address has them: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_ip_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def parse_address(url: str) -> str:
    """Return ``url`` in full: ``localhost:30000`` is ``http://localhost:30000``, ``unix:/run`` is ``unix:///run``.
    Raises ValueError if it is not the address of a service."""
    address = url.strip()
    if address.startswith("unix:/") and not address.startswith("unix://"):
        address = address.replace("unix:", "unix://", 1)
    if address and "://" not in address and not address.startswith("/"):
        address = f"http://{address}"
    try:
        parts = urlsplit(address)
        is_host = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        known = is_host or (parts.scheme == "unix" and address != "unix://")
    except ValueError:  # a port that is no number, or brackets without an address
        known = False
    if not known:
        raise ValueError(f"{url!r} is not the address of a service; write http://host:port or unix:///path")
    return address.rstrip("/")
