"""Sizes and times as text."""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*((?:([kmgtp])(i?))?b?)\s*", re.IGNORECASE | re.ASCII)


def format_bytes(count: int) -> str:
    """Return a size with three digits: ``0``, ``512 B``, ``2.94 GiB``, ``39.8 GiB``, ``512 MiB``."""
    if count == 0:
        return "0"
    value, unit = float(abs(count)), 0
    while value >= 1023.5 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    digits = 0 if unit == 0 or value >= 99.95 or value == int(value) else 1 if value >= 9.995 else 2
    return f"{'-' if count < 0 else ''}{value:.{digits}f} {_UNITS[unit]}"


def format_delta(count: int) -> str:
    """As ``format_bytes``, with a sign."""
    return f"+{format_bytes(count)}" if count > 0 else format_bytes(count)


def format_seconds(seconds: float) -> str:
    """``0.4 ms``, ``31 ms``, ``2.35 s``, ``3 min 20 s``."""
    if seconds < 0.9995:
        milliseconds = seconds * 1e3
        return f"{milliseconds:.0f} ms" if milliseconds >= 9.95 else f"{milliseconds:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"


def parse_size(text: str) -> int:
    """Return ``text`` (``8GiB``, ``500MB``, ``20G``, ``4194304``) in bytes; raise ValueError unless it is more than 0
    and below 8 EiB. Without a unit it is at least 1 MiB: with less, the unit was forgotten."""
    matched = _SIZE.fullmatch(text)
    count = int(Decimal(matched[1]) * _unit_bytes(matched)) if matched else 0
    if matched is None or not (1 if matched[2] else 1 << 20) <= count < 1 << 63:
        raise ValueError(f"{text!r} is not a size; write for example 8GiB, 500MB, or a number of bytes from 1 MiB on")
    return count


def like(text: str, count: int) -> str:
    """Return ``count`` bytes in the unit of the size ``text``: what was asked in GB is shown in GB."""
    matched = _SIZE.fullmatch(text)
    if matched is None or not matched[2]:
        return f"{count} bytes"
    return f"{count / _unit_bytes(matched):.4g} {matched[2]}"


def _unit_bytes(matched: re.Match[str]) -> int:
    step = 1024 if matched[4] else 1000
    return int(step ** " kmgtp".index((matched[3] or " ").lower()))
