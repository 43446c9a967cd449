"""TensorRT-LLM's signed requests: HMAC-SHA256 with the key over the body, or over the whole request with a nonce.

Newer releases send ``x-trtllm-runtime-control-auth`` with a timestamp and a nonce against replay, older ones without;
``x-trtllm-rl-control-auth`` is older still.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Mapping

BODY_HEADERS = ("x-trtllm-runtime-control-auth", "x-trtllm-rl-control-auth")
TIMESTAMP_HEADER = "x-trtllm-runtime-control-timestamp"
NONCE_HEADER = "x-trtllm-runtime-control-nonce"
#: A signature with a timestamp is valid for this long before and after it, seconds.
VALID_S = 300
#: Nonces that are kept at most.
MAX_NONCES = 4096
_NONCE = re.compile(r"[0-9a-f]{32}")


class NonceCache:
    """The nonces that are still valid: each signed request is accepted once. Use it in one event loop."""

    def __init__(self) -> None:
        self._expires: dict[str, float] = {}

    def claim(self, nonce: str, expires: float, now: float) -> bool:
        """Store ``nonce``; return whether it is new. A full cache rejects new ones instead of forgetting old ones."""
        self._expires = {seen: until for seen, until in self._expires.items() if until >= now}
        if nonce in self._expires or len(self._expires) >= MAX_NONCES:
            return False
        self._expires[nonce] = expires
        return True


def is_signed(headers: Mapping[str, str]) -> bool:
    return any(name in headers for name in BODY_HEADERS)


def has_valid_signature(
    key: str, method: str, path: str, headers: Mapping[str, str], body: bytes, nonces: NonceCache
) -> bool:
    """Return whether the request is signed with ``key``, within ``VALID_S`` and with a new nonce."""
    if TIMESTAMP_HEADER not in headers and NONCE_HEADER not in headers:
        return any(_matches(headers.get(name), key, body) for name in BODY_HEADERS)
    timestamp, nonce = headers.get(TIMESTAMP_HEADER, ""), headers.get(NONCE_HEADER, "")
    if not (timestamp.isascii() and timestamp.isdecimal() and len(timestamp) < 20 and _NONCE.fullmatch(nonce)):
        return False
    head = "\n".join(("trtllm-runtime-control-v1", method, path, timestamp, nonce))
    signed = head.encode() + b"\n" + body
    now = time.time()
    return (
        _matches(headers.get(BODY_HEADERS[0]), key, signed)
        and abs(now - int(timestamp)) <= VALID_S
        and nonces.claim(nonce, int(timestamp) + VALID_S, now)
    )


def _matches(given: str | None, key: str, signed: bytes) -> bool:
    expected = "sha256=" + hmac.new(key.encode(), signed, hashlib.sha256).hexdigest()
    return given is not None and hmac.compare_digest(given.encode("latin-1"), expected.encode())
