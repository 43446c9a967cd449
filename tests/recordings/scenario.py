"""Calls of a server, one after another, and what it answers to each."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx

from .normal import Names, brief

#: A request without a body; ``None`` is the JSON ``null``.
ABSENT: Any = object()
#: Headers of an answer that are left out: they differ, or every answer has them.
_LEFT_OUT = {"date", "content-length", ("content-type", "application/json"), ("server", "uvicorn")}
THREADS = ThreadPoolExecutor(16)
_NUMBERS = count()


class Scenario:
    """Steps to record: ``{"request": [line, body, headers], "response": [status, body, headers], "then": state}``.

    Body and headers are left out if there are none, and headers of an answer that all answers have.

    Args:
        http: calls the server.
        texts: as of ``Names``.
        state: returns in one line what the server is after a call with this answer; asked if that may have changed.
    """

    def __init__(
        self,
        http: httpx.Client,
        texts: Mapping[str, str] | None = None,
        state: Callable[[httpx.Response], str] | None = None,
    ) -> None:
        self.names = Names({str(http.base_url).rstrip("/"): "http://SERVER", **(texts or {})})
        self.steps: list[Any] = []
        #: Whether an engine with a bug is called.
        self.has_bug = False
        self._http = http
        self._state = state

    def call(
        self,
        line: str,
        body: Any = ABSENT,
        headers: Mapping[str, str] | None = None,
        *,
        whole: bool = False,
        until: Callable[[Any], object] | None = None,
    ) -> httpx.Response:
        """Send a request, and note it with its answer.

        Args:
            line: method, path and query.
            body: sent as JSON; bytes are sent as they are.
            whole: note the answer as it is, not in brief.
            until: repeat the call until this is true of the JSON of its answer, and note only the last one.
        """
        answer = self._send(line, body, headers)
        while until is not None and not until(answer.json()):
            answer = self._send(line, body, headers)
        self._note(line, body, headers, answer, whole)
        return answer

    @contextmanager
    def during(self, line: str, body: Any = ABSENT, *, whole: bool = False) -> Iterator[None]:
        """Send a request that is answered at the end of the block or later; note it then."""
        answer = THREADS.submit(self._send, line, body, None)
        try:
            yield
        finally:
            self._note(line, body, None, answer.result(600), whole)

    def note(self, **step: Any) -> None:
        """Note something else than a call."""
        self.steps.append(self.names.normal(step))

    def _send(self, line: str, body: Any, headers: Mapping[str, str] | None) -> httpx.Response:
        method, path = line.split(" ", 1)
        content = None if body is ABSENT else body if isinstance(body, bytes) else json.dumps(body).encode()
        if content is not None:  # an id stands for one request; each try is another
            content = content.replace(b'"named-by-its-caller"', f'"named-by-its-caller-{next(_NUMBERS)}"'.encode())
        return self._http.request(method, path, content=content, headers=headers)

    def _note(
        self, line: str, body: Any, headers: Mapping[str, str] | None, answer: httpx.Response, whole: bool
    ) -> None:
        request = [line, *([] if body is ABSENT else [_readable(body)])]
        request += [{"headers": dict(headers)}] if headers else []
        said = {name: value for name, value in answer.headers.items() if not {name, (name, value)} & _LEFT_OUT}
        if "allow" in said:  # a set's order
            said["allow"] = ", ".join(sorted(said["allow"].split(", ")))
        content = self.names.normal(content_of(answer))
        assert self.has_bug or "internal_error" not in str(content), content
        response = [answer.status_code, content if whole else brief(content), *([{"headers": said}] if said else [])]
        step = {"request": self.names.texts(request), "response": self.names.normal(response)}
        if self._state is not None and _may_change(line) and (state := self._state(answer)):
            step["then"] = self.names.text(state)
        self.steps.append(step)


def _may_change(line: str) -> bool:
    """Whether a request may change something."""
    return not line.startswith(("GET", "HEAD")) or line.startswith(("GET /release", "GET /resume", "GET /flush"))


def raw(http: httpx.Client, sent: bytes) -> Any:
    """Send bytes on a new connection; return what the server answers, as a step."""
    url = http.base_url
    with socket.create_connection((url.host, url.port or 0), timeout=600) as one, one.makefile("rb") as file:
        one.sendall(sent)
        head = [line.decode().rstrip() for line in iter(file.readline, b"\r\n")]
        length = next(int(line.split(":")[1]) for line in head if line.lower().startswith("content-length:"))
        body = file.read(length)
    lines = [line for line in head if not line.lower().startswith(("date:", "content-length:"))]
    said = json.loads(body) if body.startswith(b"{") else _readable(body)
    return {"sent": sent.decode().splitlines(), "said": [*lines, said]}


def content_of(answer: httpx.Response) -> Any:
    """Return the body of an answer: its JSON, its events as ``[name, data]``, or its text if that is short."""
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return list(sent_events(answer.text.splitlines()))
    try:
        return answer.json()
    except ValueError:
        return _readable(answer.content)


def sent_events(lines: Iterable[str]) -> Iterator[list[Any]]:
    """Yield the server-sent events of ``lines``, each as ``[name, data]``."""
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield [name, json.loads(line.removeprefix("data: "))]


def _readable(body: Any) -> Any:
    """Return what was sent or said: bytes as text, which is shortened if it is long."""
    if not isinstance(body, bytes):
        return body
    text = body.decode(errors="replace")
    return text if len(text) <= 100 else f"{text[:30]} and so on"
