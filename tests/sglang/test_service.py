"""memsaver's service in a real SGLang scheduler."""

from __future__ import annotations

import time

import pytest

from tests.engine_server import PROMPT, prompts
from tests.waiting import wait_until

from .server import ANSWER_S, Server


def test_release_and_resume(server: Server) -> None:
    expected = server.generate()
    for _ in range(3):
        server.service("/release_memory_occupation")
        assert set(server.tags().values()) == {"released"}
        refused = server.request()
        assert refused.status_code == 503
        assert "released" in refused.text
        assert server.http.get(server.url + "/health_generate").status_code == 200
        assert server.get("/readyz").status_code == 503
        server.service("/resume_memory_occupation")
        assert server.generate() == expected


def test_a_release_waits_for_requests_in_flight(server: Server) -> None:
    expected = [server.generate(300, prompt) for prompt in prompts(4)]
    running = server.in_background(4, 300)
    server.service("/release_memory_occupation")
    assert [each.result(ANSWER_S) for each in running] == expected
    server.service("/resume_memory_occupation")
    assert server.generate(300, prompts(1)[0]) == expected[0]


def test_a_drain_that_runs_out(server: Server) -> None:
    """The answer names the requests, and they continue."""
    expected = server.generate(2000, prompts(1)[0])
    (running,) = server.in_background(1, 2000)
    held_up = server.service("/release_memory_occupation", {"timeout_s": 0}, status=504)
    assert len(held_up["error"]["pending"]) == 1
    assert running.result(ANSWER_S) == expected


def test_a_release_that_aborts(server: Server) -> None:
    (running,) = server.in_background(1, 3000)
    server.service("/release_memory_occupation", {"mode": "abort"})
    assert 0 < len(running.result(ANSWER_S)) < 3000


@pytest.mark.parametrize("cache", ["host", "discard"])
def test_a_release_that_keeps_requests(server: Server, cache: str) -> None:
    """The tokens from before the release are in the answers, streamed or not, and the rest is as it would have been."""
    first, second = prompts(2)
    expected = [server.generate(1500, first), server.generate(1500, second)]
    whole = server.later(server.generate, 1500, second)
    (streamed,) = server.in_background(1, 1500)
    server.service("/release_memory_occupation", {"mode": "keep", "restore": {"kv_cache": cache}})
    assert not streamed.done()
    server.service("/resume_memory_occupation")
    assert [streamed.result(ANSWER_S), whole.result(ANSWER_S)] == expected
    assert server.generate(16, PROMPT) == server.generate(16, PROMPT)


def test_verified_tokens(server: Server) -> None:
    """The verification prompt leaves no trace, and a kept request continues after it."""
    expected = server.generate(1500, prompts(1)[0])
    (running,) = server.in_background(1, 1500)
    released = server.service("/release_memory_occupation", {"mode": "keep", "verify": "token"})
    assert "verify" in [phase["name"] for phase in released["phases"]]
    resumed = server.service("/resume_memory_occupation", {"verify": "token"})
    assert "verify" in [phase["name"] for phase in resumed["phases"]]
    assert running.result(ANSWER_S) == expected
    assert "state was deleted" not in server.output()


def test_a_cache_in_one_piece_is_not_resized(server: Server) -> None:
    refused = server.service("/kv_cache", {"fraction": 0.5}, status=409)
    assert "MEMSAVER_KV_CACHE_PIECE=32MiB" in refused["message"]


def test_discarded_weights(server: Server) -> None:
    """Nothing is generated before SGLang's update has written them."""
    expected = server.generate()
    server.service("/release_memory_occupation", {"restore": {"weights": "discard"}})
    failed = server.write_weights(400)
    assert "released" in failed.json()["message"]
    server.service("/resume_memory_occupation")
    refused = server.request()
    assert refused.status_code == 503
    assert "content of weights" in refused.text
    server.write_weights(400, model_path="/nowhere")
    assert server.request().status_code == 503
    server.write_weights()
    assert server.generate() == expected


def test_kept_requests_whose_weights_are_discarded(server: Server) -> None:
    """They wait for an update, which by SGLang alone waits for them."""
    expected = server.generate(1500, prompts(1)[0])
    (running,) = server.in_background(1, 1500)
    server.service("/release_memory_occupation", {"mode": "keep", "restore": {"weights": "discard"}})
    server.service("/resume_memory_occupation")
    server.write_weights()
    assert running.result(ANSWER_S) == expected


def test_hibernation(server: Server) -> None:
    expected = server.generate()
    server.service("/release_memory_occupation", {"hibernate": True})
    assert server.request().status_code == 503
    assert server.get("/livez").status_code == 200
    server.service("/resume_memory_occupation")
    assert server.generate() == expected


def test_probes_beside_an_idle_scheduler(server: Server) -> None:
    """SGLang's event loop rests: it leaves the processor, and the interpreter's lock, to others."""
    server.generate()
    (scheduler,) = server.schedulers()
    before, begun = scheduler.cpu_times(), time.monotonic()
    wait_until(lambda: time.monotonic() - begun > 2)
    after = scheduler.cpu_times()
    assert after.user + after.system - before.user - before.system < 1
    for _ in range(20):
        assert server.get("/livez").status_code == 200
