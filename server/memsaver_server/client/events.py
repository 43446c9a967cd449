"""Server-sent events, as far as the service uses them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Event:
    """One event: its name and its JSON."""

    name: str
    data: Any


class EventParser:
    """Parses lines into events; ignores comments (keep-alives)."""

    def __init__(self) -> None:
        self._name = "message"
        self._data: list[str] = []

    def feed(self, line: str) -> Event | None:
        """Take one line without its line break; return the event that it completes, if any."""
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
