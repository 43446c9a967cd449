"""The parser of server-sent events."""

from __future__ import annotations

from memsaver_server.client.requests import Event, EventParser


def events_of(text: str) -> list[Event]:
    parser = EventParser()
    return [event for line in text.split("\n") if (event := parser.feed(line)) is not None]


def test_an_event_has_the_name_before_its_data() -> None:
    assert events_of('event: phase\ndata: {"name": "drain: 1"}\n\nevent: done\ndata: {}\n\n') == [
        Event("phase", {"name": "drain: 1"}),
        Event("done", {}),
    ]


def test_comments_and_empty_lines_are_no_events() -> None:
    assert events_of(": keep alive\n\n\n\nevent: nothing\n\n") == []
