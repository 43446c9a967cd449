"""JSON as text that people read and compare: sorted keys, and a value on one line if it fits."""

from __future__ import annotations

import json
from typing import Any

WIDTH = 140


def text_of(value: Any) -> str:
    """Return ``value`` as JSON that ends with a line break."""
    return _text(value, 0, 0) + "\n"


def _text(value: Any, indent: int, used: int) -> str:
    """Return ``value`` as text whose first line follows ``used`` characters."""
    line = json.dumps(value, sort_keys=True, ensure_ascii=False)
    if not isinstance(value, (dict, list)) or not value or used + len(line) < WIDTH:
        return line
    inner = " " * (indent + 1)
    if isinstance(value, dict):
        names = {key: json.dumps(key, ensure_ascii=False) + ": " for key in sorted(value)}
        rows = [name + _text(value[key], indent + 1, len(inner + name) + 1) for key, name in names.items()]
    else:
        rows = [_text(each, indent + 1, len(inner) + 1) for each in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return begin + "\n" + ",\n".join(inner + row for row in rows) + f"\n{' ' * indent}{end}"
