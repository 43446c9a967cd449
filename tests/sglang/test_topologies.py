"""Real SGLang servers whose requests are received by several ranks, or whose ranks are on several hosts: all ranks are
released together, or none."""

from __future__ import annotations

import itertools
import os
import re
import signal
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from tests.engine_server import free_port, prompts
from tests.waiting import wait_until

from . import checkpoint
from .conftest import Start
from .server import ANSWER_S, Server
from .test_ranks import CORES, CORES_OF_FOUR

#: By name: the arguments, the model, what happens to requests while memory is released, and the ranks' cores.
SHAPES = {
    "attention": (("--tp", "2", "--dp", "2", "--enable-dp-attention"), checkpoint.QWEN3, "refuse", CORES),
    "replicas": (("--tp", "2", "--dp", "2"), checkpoint.QWEN, "queue", CORES_OF_FOUR),
}


@pytest.fixture(scope="module", params=list(SHAPES))
def served(request: pytest.FixtureRequest, start: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:
    arguments, config, while_released, cores = SHAPES[request.param]
    return start(
        *(*arguments, "--enable-weights-cpu-backup", "--log-requests"),
        model=checkpoint.write(tmp_path_factory.mktemp("model"), config=config),
        SGLANG_CPU_OMP_THREADS_BIND=cores,
        MEMSAVER_WHILE_RELEASED=while_released,
    )


def answers(server: Server, length: int = 16) -> list[list[int]]:
    """The tokens after four prompts, which SGLang gives to the ranks in turn."""
    return [server.generate(length, prompt) for prompt in prompts(4)]


def attends(server: Server) -> bool:
    return "--enable-dp-attention" in server.command


def test_all_release_and_resume(server: Server) -> None:
    server.check_cycles(lambda: answers(server))
    ranks = server.get("/memory_occupation").json()["ranks"]
    assert [each["rank"] for each in ranks] == list(range(2 if attends(server) else 4))
    assert {each["pid"] for each in ranks} == {each.pid for each in server.schedulers()}


def test_requests_in_flight_on_all_end_first(server: Server) -> None:
    expected = answers(server, 100)
    running = server.in_background(4, 100)
    server.own("/release_memory_occupation")
    assert [each.result(ANSWER_S) for each in running] == expected
    assert server.http.get(server.url + "/health_generate").status_code == 200
    if attends(server):
        assert [server.request().status_code for _ in range(2)] == [503, 503]
        server.own("/resume_memory_occupation")
    else:
        seen = server.output().count("Receive: obj=")
        held = [server.later(server.generate, 100, prompt) for prompt in prompts(4)]
        wait_until(lambda: server.output().count("Receive: obj=") == seen + 4)
        server.own("/resume_memory_occupation")
        assert [each.result(ANSWER_S) for each in held] == expected
    assert answers(server, 100) == expected


def test_a_release_names_what_runs_on_all_and_sets_it_aside(server: Server) -> None:
    expected = [server.generate(2000, prompt) for prompt in prompts(2)]
    running = server.in_background(2, 2000)
    held_up = server.service("/release_memory_occupation", {"timeout_s": 0.1}, status=504)
    assert len(held_up["error"]["pending"]) == 2
    assert set(server.tags().values()) == {"resident"}
    server.service("/release_memory_occupation", {"mode": "keep"})
    server.own("/flush_cache")
    server.service("/resume_memory_occupation")
    assert [each.result(ANSWER_S) for each in running] == expected


def test_updates_of_discarded_weights(server: Server) -> None:
    expected = answers(server)
    server.service("/release_memory_occupation", {"restore": {"weights": "discard"}})
    server.own("/resume_memory_occupation", {"tags": ["weights"]})
    server.write_weights()
    server.own("/resume_memory_occupation")
    assert answers(server) == expected


def test_all_hibernate(server: Server) -> None:
    expected = answers(server)
    for _ in range(2):
        server.service("/release_memory_occupation", {"hibernate": True, "verify": "token"})
        assert server.get("/memory_occupation").json()["hibernated"] is True
        server.service("/resume_memory_occupation", {"verify": "token"})
        assert answers(server) == expected


def test_their_caches_keep_their_size(server: Server) -> None:
    refused = server.service("/kv_cache", {"fraction": 0.5}, status=409)
    assert "use different pages" in refused["message"]


def test_the_death_of_one_is_the_end_of_all(served: Server) -> None:
    """By SGLang, also if it is one of another replica; nothing hangs, and nobody reads that all is well."""
    served.service("/release_memory_occupation")
    victim = served.get("/memory_occupation").json()["ranks"][-1]["pid"]
    os.kill(victim, signal.SIGKILL)

    def has_ended() -> bool:
        with suppress(httpx.TransportError):
            said = served.get("/readyz").json()["reason"]
            assert "has ended" in said or "released" in said
        return served.process.poll() is not None

    wait_until(has_ended, ANSWER_S)  # it may first look for dumps for a minute


def test_ranks_on_two_hosts(start: Start) -> None:
    """Both are this one; the ranks reach each other as on others, by TCP with the key."""
    key = "a key of both hosts"
    both = ("--tp", "2", "--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}", "--enable-weights-cpu-backup")
    environment = {"MEMSAVER_API_KEY": key, "SGLANG_CPU_OMP_THREADS_BIND": CORES}
    server, other = (start(*both, "--node-rank", rank, wait=False, **environment) for rank in ("0", "1"))
    server.http.headers["Authorization"] = f"Bearer {key}"
    server.wait_until_up()
    server.check_cycles(lambda: answers(server))
    ranks = server.get("/memory_occupation").json()["ranks"]
    assert {each["pid"] for each in ranks} == {each.pid for host in (server, other) for each in host.schedulers()}
    expected = [server.generate(100, prompt) for prompt in prompts(2)]
    running = server.in_background(2, 100)
    server.service("/release_memory_occupation", {"hibernate": True, "mode": "keep"})
    server.service("/resume_memory_occupation")
    assert [each.result(ANSWER_S) for each in running] == expected
    assert any(each.laddr.ip == "127.0.0.1" for each in psutil.Process(ranks[0]["pid"]).net_connections("tcp"))


def test_a_prefill_and_a_decode_server(start: Start) -> None:
    """Each is released by itself, once its transfers have ended."""
    bootstrap = free_port()
    mooncake = ("--disaggregation-transfer-backend", "mooncake", "--disaggregation-bootstrap-port", str(bootstrap))
    # SGLang sends cached prefixes by events of CUDA alone.
    arguments = (*mooncake, "--disable-radix-cache", "--enable-weights-cpu-backup")
    sides = [start("--disaggregation-mode", mode, *arguments, MC_FORCE_TCP="1") for mode in ("prefill", "decode")]
    prefill, decode = sides
    rooms = itertools.count(1)

    def generate(length: int = 16) -> list[int]:
        """As a router: both get the request."""
        room: dict[str, Any] = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": bootstrap,
            "bootstrap_room": next(rooms),
        }
        first = prefill.later(lambda: prefill.generate(length, **room))
        tokens = decode.generate(length, **room)
        first.result(ANSWER_S)
        return tokens

    expected = generate()
    for side in sides:
        side.check_cycles(generate)
        registered = re.findall(r"transfer engine: (\d+) ranges registered", side.output())
        assert registered[-4:] == [*registered[-4:-3], "0", *registered[:2]]

    running = decode.later(generate, 1000)
    wait_until(lambda: "Decode batch" in decode.output().rpartition("transfer engine:")[2])
    for side in sides:
        side.service("/release_memory_occupation")
    assert running.result(ANSWER_S)[:16] == expected
    for side in sides:
        side.service("/resume_memory_occupation")
        for body, why in (({"mode": "keep"}, "another engine's, too"), ({"hibernate": True}, "mooncake holds memory")):
            assert why in side.service("/release_memory_occupation", body, status=409)["message"]
    assert generate() == expected


def test_a_decode_server_that_hibernates(start: Start) -> None:
    """With SGLang's backend that transfers nothing it computes with pages that nobody has written."""
    backend = ("--disaggregation-transfer-backend", "fake", "--enable-weights-cpu-backup")
    server = start("--disaggregation-mode", "decode", *backend)
    assert len(server.generate(bootstrap_host="2.2.2.2", bootstrap_room=1)) == 16
    server.service("/release_memory_occupation", {"hibernate": True})
    assert server.get("/memory_occupation").json()["hibernated"] is True
    server.service("/resume_memory_occupation")
    assert len(server.generate(bootstrap_host="2.2.2.2", bootstrap_room=2)) == 16
