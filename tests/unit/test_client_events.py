"""The parser of server-sent events."""

from __future__ import annotations

from memsaver_server.client.requests import Event, EventParser


def events_of(text: str) -> list[Event]:
    parser = EventParser()
    return [event for line in text.split("\n") if (event := parser.feed(line.rstrip("\r"))) is not None]


def test_an_event_is_complete_at_the_empty_line() -> None:
    assert events_of('event: phase\ndata: {"name": "drain"}\n\nevent: done\ndata: {}') == [
        Event("phase", {"name": "drain"})
    ]


def test_comments_and_empty_lines_are_no_events() -> None:
    assert events_of(": keep alive\n\n\n\nevent: nothing\n\n") == []


def test_data_over_several_lines_and_carriage_returns() -> None:
    assert events_of('data: {"a":\r\ndata: 1}\r\n\r\n') == [Event("message", {"a": 1})]


def test_data_that_is_not_json_stays_text() -> None:
    assert events_of("event: note\ndata:plain\n\n") == [Event("note", "plain")]
