"""Server-sent events, as much of them as the service sends."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """One event: its name, and the JSON that came with it."""

    name: str
    data: Any


class EventParser:
    """Turns lines into events. Comments (keep-alives) give none."""

    def __init__(self) -> None:
        self._name = "message"
        self._data: list[str] = []

    def feed(self, line: str) -> Event | None:
        """Take one line without its end; return the event that it completes, if it does."""
        if not line:
            return self._complete()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)
        return None

    def _complete(self) -> Event | None:
        name, data = self._name, "\n".join(self._data)
        self._name, self._data = "message", []
        if not data:
            return None
        try:
            return Event(name, json.loads(data))
        except ValueError:
            return Event(name, data)
