"""tokenspeed's own endpoints of a server without memsaver's service, as RL frameworks call them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine_server import prompts

from .conftest import Start
from .server import NO_PREFIXES, Server


@pytest.fixture(scope="module")
def unserved(start: Start) -> Server:
    return start(NO_PREFIXES, serve=False, MEMSAVER_DRAIN_TIMEOUT_S="2", MEMSAVER_WHILE_RELEASED="queue")


@pytest.fixture
def server(unserved: Server) -> Iterator[Server]:
    yield unserved
    assert not unserved.is_dead(), unserved.output()[-3000:]
    unserved.own("/resume_memory_occupation")


def test_a_release_under_load(server: Server) -> None:
    """8 requests in flight: all are answered in full, then memory is released; a repeat succeeds."""
    expected = [server.generate(60, prompt) for prompt in prompts(8)]
    running = server.in_background(8, 60)
    server.own("/release_memory_occupation")
    assert [each.result(60) for each in running] == expected
    server.own("/release_memory_occupation")
    waiting = server.later(server.generate, 60, prompts(1)[0])
    server.own("/resume_memory_occupation")
    server.own("/resume_memory_occupation")
    assert waiting.result(60) == expected[0]


def test_a_drain_that_runs_out(server: Server) -> None:
    """By tokenspeed alone it waits without an end."""
    (running,) = server.in_background(1, 1500)
    failed = server.own("/release_memory_occupation", status=400)
    assert failed["success"] is False
    assert "1 request(s) still ran after 2 s" in failed["message"]
    assert len(running.result(60)) == 1500


def test_a_trainer_that_pauses(server: Server) -> None:
    """The pause is that of tokenspeed's server, before its scheduler."""
    expected = server.generate()
    server.own("/pause_generation")
    server.own("/release_memory_occupation")
    server.own("/resume_memory_occupation")
    waiting = server.later(server.generate)
    server.write_weights()
    server.own("/continue_generation")
    assert waiting.result(60) == expected
