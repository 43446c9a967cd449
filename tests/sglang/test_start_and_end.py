"""Releases while a real SGLang server starts, and the end of its scheduler."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.engine_server import START_S, prompts
from tests.waiting import wait_until

from .conftest import Start
from .server import ANSWER_S, Server


def releases(server: Server) -> bool:
    assert not server.is_dead(), server.output()[-3000:]
    try:
        server.service("/release_memory_occupation", {"timeout_s": 60})
    except httpx.ConnectError:
        return False
    return True


def test_from_the_warm_up_to_the_end(start: Start) -> None:
    server = start("--enable-weights-cpu-backup", wait=False, MEMSAVER_DRAIN_TIMEOUT_S="0.01")
    wait_until(lambda: releases(server), START_S)  # as soon as there is a service, and before the warm-up
    # A refusal of the warm-up's request would end the server.
    wait_until(lambda: "GET /model_info" in server.output(), START_S)
    seen = time.monotonic()
    wait_until(lambda: time.monotonic() > seen + 1)
    assert not server.is_dead(), server.output()[-3000:]
    assert "fired up" not in server.output()
    server.service("/resume_memory_occupation")
    server.wait_until_up()

    # SGLang's own call reports which requests held it up, and they continue.
    expected = server.generate(2000, prompts(1)[0])
    (running,) = server.in_background(1, 2000)
    held_up = server.own("/release_memory_occupation", status=504)
    assert "1 request(s) still ran" in held_up.json()["error"]["message"]
    assert running.result(ANSWER_S) == expected

    # What was released by one service is known to the other.
    server.own("/release_memory_occupation", {"tags": ["kv_cache"]})
    assert server.tags()["kv_cache"] == "released"
    server.service("/resume_memory_occupation")
    assert server.generate(2000, prompts(1)[0]) == expected

    (scheduler,) = server.schedulers()
    scheduler.send_signal(signal.SIGKILL)
    wait_until(lambda: server.process.poll() is not None)


@pytest.mark.guards("an upgrade of the engine put the other torch_memory_saver back")
def test_beside_another_torch_memory_saver(start: Start) -> None:
    """Which is first on the path, and of which nothing is changed."""
    stock = Path(sys.prefix) / "stock"
    before = {file: file.read_bytes() for file in stock.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    assert stock / "torch_memory_saver/__init__.py" in before
    server = start("--enable-weights-cpu-backup", serve=False, MEMSAVER_SGLANG="1", PYTHONPATH=str(stock))
    expected = server.generate(2000, prompts(1)[0])
    (running,) = server.in_background(1, 2000)
    server.own("/release_memory_occupation")  # by SGLang alone an assertion ends the server
    assert running.result(ANSWER_S) == expected
    server.own("/resume_memory_occupation")
    assert server.generate(2000, prompts(1)[0]) == expected
    assert {file: file.read_bytes() for file in before} == before


def test_updates_beside_requests_that_are_held(start: Start) -> None:
    """The warm-up's, and then a client's, while memory is released: they wait for an update, as by SGLang alone it for
    them."""
    server = start("--log-requests", wait=False, MEMSAVER_WHILE_RELEASED="queue")
    wait_until(lambda: releases(server), START_S)
    wait_until(lambda: "Receive: obj=" in server.output(), START_S)
    server.write_weights(400)
    server.service("/resume_memory_occupation")
    server.write_weights()
    server.wait_until_up()

    expected = server.generate()
    server.own("/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
    seen = server.output().count("Receive: obj=")
    held = server.later(server.generate)
    wait_until(lambda: server.output().count("Receive: obj=") > seen)
    server.own("/resume_memory_occupation", {"tags": ["weights"]})
    server.write_weights(flush_cache=False)
    assert not held.done()
    server.own("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert held.result(ANSWER_S) == expected
