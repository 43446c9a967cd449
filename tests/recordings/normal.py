"""What differs from run to run, replaced by names: times, ids, addresses, versions, and figures of the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

#: Keys of numbers that are a time or depend on one.
_TIMES = re.compile(
    r"(.*_)?seconds|at|(created|started|finished)_at|phase_starts|seconds_left|lease_s|expected_s|e2e_latency|"
    r"gb_per_s|gigabytes_per_second"
)
#: Keys of numbers that depend on the machine or the process.
_FIGURES = {
    "process_bytes",
    "host_bytes_free",
    "host_bytes",
    "capacity_bytes",
    "unused_bytes",
    "target_bytes",
    "pid",
    "disk",
    "fd",
    "mark",
}
#: What holds ``free_bytes`` of the host or its disk. Those of a device are the host driver's, and always the same.
_OF_HOST = {"host", "file"}
_TEXTS = (
    (re.compile(r"host-private-\d+"), "host-private-PID"),
    (re.compile(r"127\.0\.0\.1:\d+"), "127.0.0.1:PORT"),
    (re.compile(r"\b\d+\.\d{3} s\b"), "TIME s"),
    (re.compile(r"(in phase '\w+' for )\d+ s\b"), r"\1TIME s"),
    (re.compile(r"(memsaver|python-httpx)/[\d.]+"), r"\1/VERSION"),
    (re.compile(r"\(process \d+\)"), "(process PID)"),
    (re.compile(r"whose lease ends in \d+ s"), "whose lease ends in TIME s"),
    (re.compile(r"memsaver-coordinator \S+:\d+"), "memsaver-coordinator HOST:PID"),
    (re.compile(r"named-by-its-caller-\d+"), "named-by-its-caller"),
    (re.compile(r"^[\w.:-]{1,64}-[0-9a-f]{8}$"), "KEY"),
    (re.compile(r"\br1 #\d+"), "r1 #N"),
    (re.compile(r"\b0x[0-9a-f]+"), "ADDRESS"),
    # As its status: it may have ended by the answer to who started it.
    (re.compile(r"^((?:release|resume) \S+) has ended: succeeded$"), r"\1 continues in the background"),
)
_FIGURE = re.compile(r"\d")
_ID = re.compile(r"\b(?:[0-9a-f]{12}|[0-9a-f]{32})\b")


class Names:
    """The names of one scenario. An id keeps its name in all of it, so that equal ids stay equal.

    Args:
        texts: parts of texts, for example addresses, and what replaces them.
    """

    def __init__(self, texts: Mapping[str, str] | None = None) -> None:
        self._texts = texts or {}
        self._ids: dict[str, str] = {}

    def normal(self, value: Any, key: str = "", holder: str = "") -> Any:
        """Return ``value``, which stands under ``key`` in what stands under ``holder``, with names for what differs."""
        if isinstance(value, dict):
            found = {self.text(name): self.normal(each, name, key) for name, each in value.items()}
            return {**found, "status": "STARTED"} if "location" in value and "status" in value else found
        if isinstance(value, (list, tuple)):
            return [self.normal(each, key, holder) for each in value]
        if isinstance(value, str):
            if holder == "meta_info" and key == "id" and value != "r1":
                return "NAME"  # that the engine has given a request
            if key == "host_id":
                return "HOST" if value else ""
            return "VERSION" if key in ("version", "python", "torch") else self.text(value)
        if isinstance(value, bool) or value is None:
            return value
        if _TIMES.fullmatch(key):
            return "TIME"
        if key in _FIGURES or (key == "free_bytes" and holder in _OF_HOST):
            return "BYTES" if "bytes" in key else key.upper()
        return value

    def texts(self, value: Any) -> Any:
        """Return ``value`` with names in its texts alone: what callers send has the figures that they chose."""
        if isinstance(value, dict):
            return {self.text(name): self.texts(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.texts(each) for each in value]
        return self.text(value) if isinstance(value, str) else value

    def text(self, text: str) -> str:
        """Return ``text`` with names for what differs."""
        for old, new in self._texts.items():
            text = text.replace(old, new)
        if _FIGURE.search(text):
            for pattern, name in _TEXTS:
                text = pattern.sub(name, text)
        return _ID.sub(lambda found: self._ids.setdefault(found[0], f"ID-{len(self._ids) + 1}"), text)


def brief(value: Any) -> Any:
    """Return an answer without what others say already, on few lines. Its shape is recorded elsewhere, as a whole.

    Phases are their names; rows of tags, devices and engines are texts without zeros; of an error that repeats its
    message, the type and the message are left.
    """
    if isinstance(value, list):
        return [brief(each) for each in value]
    if not isinstance(value, dict):
        return value
    short = {key: brief(each) for key, each in value.items()}
    for key, rows in value.items():
        if not isinstance(rows, list) or not rows or not isinstance(rows[0], dict):
            continue
        if key == "phases" and "name" in rows[0]:
            short[key] = " ".join(row["name"] for row in rows)
        elif key == "tags" and "restore" in rows[0]:
            short[key] = {row["tag"]: _row(row, "tag") for row in rows}
        elif key == "engines" and "kind" in rows[0]:
            short[key] = {row["name"]: _row(row, "name", "url", "seconds") for row in rows}
        elif key == "devices" and "uuid" in rows[0]:
            short[key] = [_row(row, "index", "uuid", "name", "process_bytes", "total_bytes", "sources") for row in rows]
    error = value.get("error")
    if isinstance(error, dict) and error.get("message") == value.get("message") and value.get("success") is False:
        del short["message"], short["success"]
        if error.keys() == {"type", "message"}:
            short["error"] = f"{error['type']}: {error['message']}"
    return short["error"] if short.keys() == {"error"} else short


def _row(row: Mapping[str, Any], *left_out: str) -> str:
    """Return a row as text, without what is zero or empty."""
    shown = {key: each for key, each in row.items() if key not in left_out and each not in (0, False, None, "", [])}
    return ", ".join(key if each is True else f"{key} {each}" for key, each in shown.items())
