"""Logs and audit: operations and probes go on, whatever becomes of their lines."""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from memsaver_core.contract.errors import ConfigurationError
from memsaver_server import Settings, attach
from tests.programs import output_of
from tests.waiting import wait_until

from .tensor_engine import TensorEngine

Serve = Callable[..., httpx.Client]


def dropped(http: httpx.Client, output: str) -> float:
    """The metric of lines that were dropped."""
    name = f'memsaver_log_lines_dropped_total{{output="{output}"}} '
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name)]
    return float(lines[0].removeprefix(name)) if lines else 0.0


def cycle(http: httpx.Client) -> None:
    assert http.post("/release_memory_occupation").json()["state"] == "released"
    assert http.post("/resume_memory_occupation").json()["state"] == "resident"


@pytest.fixture
def blocked(http: httpx.Client) -> Iterator[list[str]]:
    """Handlers of the engine's process that block, as those of a full pipe do; what they were given, once they end."""
    begin = threading.Event()
    given: list[str] = []

    class Blocked(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert begin.wait(600)
            given.append(self.format(record))

    handler = Blocked(logging.INFO)
    handler.addFilter(logging.Filter("memsaver"))  # not of the client here
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield given
    root.removeHandler(handler)
    root.setLevel(level)
    begin.set()


def test_logging_of_the_engine_s_process_does_not_hold_operations(
    http: httpx.Client, blocked: list[str], engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Audit lines, warnings of malformed requests, and a route that fails unexpectedly."""
    before = dropped(http, "log")
    monkeypatch.setattr(engine, "flush_cache", lambda: 1 / 0)
    for _ in range(3):
        cycle(http)
        assert http.post("/flush_cache").status_code == 500
    while dropped(http, "log") == before:
        with socket.create_connection((http.base_url.host, http.base_url.port or 0), timeout=600) as one:
            one.sendall(b"no HTTP\r\n\r\n")
            assert one.recv(65536).startswith(b"HTTP/1.1 400")
    cycle(http)
    assert http.get("/livez").status_code == 200
    assert blocked == []


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_audit_file_has_each_operation(serve: Serve, tmp_path: Path) -> None:
    """It is the user's alone, it is appended to, and it is opened anew once a program has moved it."""
    path, moved = tmp_path / "audit", tmp_path / "audit.1"
    path.write_text('{"event": "earlier"}\n')
    path.unlink()
    http = serve(audit_file=str(path))
    cycle(http)
    wait_until(lambda: len(lines_of(path)) == 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.rename(moved)
    cycle(http)
    wait_until(lambda: len(lines_of(path)) == 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.unlink()
    path.write_text('{"event": "kept"}\n')
    cycle(http)
    wait_until(lambda: len(lines_of(path)) == 3)
    assert [line["event"] for line in lines_of(path)] == ["kept", "release", "resume"]
    assert [line["event"] for line in lines_of(moved)] == ["release", "resume"]


def test_the_audit_file_is_complete_when_the_server_has_ended(engine: TensorEngine, tmp_path: Path) -> None:
    path = tmp_path / "audit"
    with (
        attach(engine, settings=Settings(audit_file=str(path))) as server,
        httpx.Client(base_url=server.url, timeout=600, verify=False) as http,
    ):
        for _ in range(10):
            cycle(http)
    assert len(lines_of(path)) == 20


def test_an_audit_file_that_takes_nothing_holds_no_operation(serve: Serve, tmp_path: Path) -> None:
    """A full disk, and a pipe that nobody reads. What is lost is counted."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for path in ("/dev/full", str(pipe)):
            http = serve(audit_file=path)
            before = dropped(http, "audit_file")
            for _ in range(150):  # together more than a pipe holds
                http.post("/release_memory_occupation", json={"tags": ["workspace"]}, headers={"User-Agent": "x" * 120})
                http.post("/resume_memory_occupation", json={"tags": ["workspace"]}, headers={"User-Agent": "x" * 120})
            cycle(http)
            if path == "/dev/full":
                wait_until(lambda before=before, http=http: dropped(http, "audit_file") - before == 302)
    finally:
        os.close(reader)


def test_an_audit_file_that_cannot_be_opened_is_told_at_once(engine: TensorEngine, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "audit"):
        with pytest.raises(ConfigurationError, match="MEMSAVER_AUDIT_FILE"):
            attach(engine, settings=Settings(audit_file=str(path)))


def test_a_line_at_the_interpreter_s_end_does_not_hold_it() -> None:
    """No thread starts then. A coordinator that had refused a call never ended."""
    program = """
        from memsaver_server.log_output import LogStream

        class Late:
            stream = LogStream("late", 2)

            def __del__(self):
                self.stream.write("late")
                print("ends")

        late = Late()
    """
    assert output_of(program, by_itself=True) == "ends\n"
