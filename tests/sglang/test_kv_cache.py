"""The KV cache of a real SGLang server gets smaller and larger while it serves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engine_server import COUNTS, prompts

from . import checkpoint
from .conftest import Start
from .server import ANSWER_S, ENVIRONMENT, Server, source

SIZE = 16384
#: With another first token it is another prompt.
LONG = [(7919 * (place + 3)) % 1000 + 10 for place in range(3500)]
#: Of the device that the server shares with whoever else uses its name.
DEVICE = {**ENVIRONMENT, "MEMSAVER_HOST_DEVICE": f"sglang-{uuid.uuid4().hex[:8]}"}
#: A program that has device memory until its input ends.
TENANT = """
import sys, torch, memsaver_core as ms
with ms.region("theirs"):
    memory = torch.ones(int(sys.argv[1]), dtype=torch.uint8)
print("has it", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def served(start: Start) -> Server:
    chunks = ("--chunked-prefill-size", "2048")  # some versions compute a long prompt at once otherwise
    return start("--enable-weights-cpu-backup", "--enable-metrics", *chunks, MEMSAVER_KV_CACHE_PIECE="64KiB", **DEVICE)


@pytest.fixture
def server(served: Server) -> Iterator[Server]:
    yield served
    assert not served.is_dead(), served.output()[-3000:]
    served.service("/resume_memory_occupation")
    served.service("/kv_cache", {"fraction": 1})
    assert "memory leak" not in served.output()


def cache(server: Server) -> dict[str, Any]:
    answer: dict[str, Any] = server.get("/kv_cache").raise_for_status().json()
    return answer


def shrunk(server: Server) -> int:
    tags = server.get("/memory_occupation").json()["tags"]
    return sum(each["shrunk_bytes"] for each in tags if each["tag"] == "kv_cache")


def size_of_sglang(server: Server) -> int:
    """By its own metrics."""
    metrics = server.http.get(server.url + "/metrics/").text
    [size] = re.findall(r"^sglang:max_total_num_tokens\{[^}]*\} (\S+)$", metrics, re.MULTILINE)
    return int(float(size))


def cached(server: Server, prompt: list[int]) -> int:
    """Return how many tokens of a prompt were found."""
    found: int = server.request(1, prompt).json()["meta_info"]["cached_tokens"]
    return found


def fill(server: Server) -> list[list[int]]:
    """Have prefixes in more than half of the cache, so that a request that begins now is behind; return tokens."""
    server.own("/flush_cache")
    return [server.generate(8, [number, *LONG]) for number in (11, 12, 13)]


def test_half_of_it_goes_and_comes_back(server: Server) -> None:
    expected, whole = [server.generate(100, prompt) for prompt in prompts(4)], cache(server)
    assert (whole["tokens"], whole["page_tokens"], whole["used_bytes"]) == (SIZE + 1, 1, 0)
    assert 4096 <= whole["smallest_bytes"] / whole["page_bytes"] < 4200
    for _ in range(2):
        half = server.service("/kv_cache", {"fraction": 0.5})["kv_cache"]
        assert half["tokens"] == SIZE // 2
        assert size_of_sglang(server) == SIZE // 2 - 1
        assert shrunk(server) == pytest.approx(whole["bytes"] / 2, rel=0.1)
        assert [server.generate(100, prompt) for prompt in prompts(4)] == expected
        server.service("/kv_cache", {"fraction": 1})
        assert {**cache(server), **COUNTS} == {**whole, **COUNTS}
        assert shrunk(server) == 0
        assert size_of_sglang(server) == SIZE
        assert [server.generate(100, prompt) for prompt in prompts(4)] == expected


def test_prefixes_that_stay_are_found_and_others_are_computed_again(server: Server) -> None:
    server.service("/kv_cache", {"fraction": 0.9})  # pages are counted from now on
    expected = fill(server)  # all of it in pages that stay
    assert [cached(server, [number, *LONG]) for number in (11, 12, 13)] == [len(LONG)] * 3
    server.generate(8, [13, *LONG])
    assert cache(server)["reused_bytes"] == len(LONG) * cache(server)["page_bytes"]
    recomputed = cache(server)["recomputed"]
    server.service("/kv_cache", {"fraction": 0.5})
    assert cached(server, [13, *LONG]) == 0
    assert cache(server)["recomputed"] == recomputed + 1
    assert fill(server) == expected
    assert cache(server)["recomputed"] == recomputed + 1


def test_requests_behind_it_end_first(server: Server) -> None:
    expected = server.generate(2000, prompts(1)[0])
    fill(server)
    (running,) = server.in_background(1, 2000)
    used = cache(server)
    assert used["smallest_bytes"] > used["full_bytes"] / 2
    late = server.service("/kv_cache", {"fraction": 0.5, "timeout_s": 0}, status=504)
    assert len(late["error"]["pending"]) == 1
    assert cache(server)["bytes"] == used["full_bytes"]
    assert size_of_sglang(server) == SIZE
    shrinking = server.later(server.service, "/kv_cache", {"fraction": 0.5, "timeout_s": ANSWER_S})
    assert running.result(ANSWER_S) == expected
    assert shrinking.result(ANSWER_S)["kv_cache"]["tokens"] == SIZE // 2
    assert server.generate(2000, prompts(1)[0]) == expected


@pytest.mark.parametrize("paused", [False, True])
def test_requests_behind_it_are_preempted(server: Server, paused: bool) -> None:
    """They go on in the smaller cache; if somebody has paused them in place, once that ends."""
    expected = [server.generate(1500, prompt) for prompt in prompts(2)]
    fill(server)
    running = server.in_background(2, 1500)
    if paused:
        server.own("/pause_generation", {"mode": "in_place"})
    server.service("/kv_cache", {"fraction": 0.5, "mode": "preempt", "timeout_s": 0})
    assert not any(each.done() for each in running)
    if paused:
        assert cache(server)["used_bytes"] == 0
        server.own("/continue_generation")
    assert [each.result(ANSWER_S) for each in running] == expected
    server.service("/kv_cache", {"fraction": 1})
    assert [server.generate(1500, prompt) for prompt in prompts(2)] == expected


def test_a_flush_hands_out_no_page_that_is_gone(server: Server) -> None:
    expected = fill(server)
    server.service("/kv_cache", {"fraction": 0.5})
    for _ in range(2):
        assert fill(server) == expected
        assert size_of_sglang(server) == SIZE // 2 - 1


def test_a_release_keeps_the_size(server: Server) -> None:
    expected = fill(server)
    size = server.service("/kv_cache", {"fraction": 0.5})["kv_cache"]["bytes"]
    gone = shrunk(server)
    for call in (server.own, server.service):
        call("/release_memory_occupation")
        refused = server.service("/kv_cache", {"fraction": 1}, status=409)
        assert "released" in refused["message"]
        assert cache(server)["bytes"] == size
        call("/resume_memory_occupation")
        assert (cache(server)["bytes"], shrunk(server)) == (size, gone)
        assert fill(server) == expected
    (running,) = server.in_background(1, 1000)
    server.service("/release_memory_occupation", {"mode": "keep"})
    server.service("/resume_memory_occupation")
    assert len(running.result(ANSWER_S)) == 1000
    server.service("/kv_cache", {"fraction": 1})
    assert fill(server) == expected


@contextmanager
def tenant(taken_bytes: int) -> Iterator[None]:
    """Take so much memory of the server's device during the block."""
    command = [sys.executable, "-c", TENANT, str(taken_bytes)]
    with subprocess.Popen(
        command, env={**os.environ, **DEVICE}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "has it\n"
        yield
        process.communicate()


@pytest.mark.parametrize("restore", ["discard", "host"])
def test_a_resume_brings_back_what_finds_room(server: Server, restore: str) -> None:
    expected, whole = fill(server), cache(server)
    server.service("/release_memory_occupation", {"restore": {"kv_cache": restore}})
    occupied = server.get("/memory_occupation").json()
    missing = 1 << 20
    with tenant(occupied["devices"][0]["free_bytes"] - sum(tag["bytes"] for tag in occupied["tags"]) + missing):
        server.service("/resume_memory_occupation", status=503)
        server.service("/resume_memory_occupation", {"kv_cache": "shrink"})
        assert 0.4 * whole["bytes"] < cache(server)["bytes"] <= whole["bytes"] - missing
        assert [server.generate(8, [number, *LONG]) for number in (11, 12, 13)] == expected
        assert fill(server) == expected
    server.service("/kv_cache", {"fraction": 1})
    assert fill(server) == expected


def test_the_longest_request_fits_the_smallest_cache(server: Server) -> None:
    refused = server.service("/kv_cache", {"tokens": 4000}, status=400)
    assert "the longest request needs" in refused["message"]
    assert cache(server)["bytes"] == cache(server)["full_bytes"]
    prompt = [*LONG, *LONG][:4050]
    expected = server.generate(40, prompt)
    smallest = cache(server)["smallest_bytes"]
    assert server.service("/kv_cache", {"bytes": smallest})["kv_cache"]["bytes"] == smallest
    assert server.generate(40, prompt) == expected
    assert [each.result(ANSWER_S) for each in server.in_background(4, 1500)] == [
        server.generate(1500, prompt) for prompt in prompts(4)
    ]


def test_pages_of_several_tokens_without_prefixes(start: Start) -> None:
    """Older versions need Triton for pages of more than one token."""
    page = 16 if "use_triton_kernels" in source("mem_cache/allocator/paged.py") else 1
    server = start("--page-size", str(page), "--disable-radix-cache", MEMSAVER_KV_CACHE_PIECE="64KiB")
    expected = [server.generate(300, prompt) for prompt in prompts(4)]
    assert cache(server)["page_tokens"] == page
    running = server.in_background(4, 300)
    server.service("/kv_cache", {"fraction": 0.5, "mode": "preempt"})
    assert [each.result(ANSWER_S) for each in running] == expected
    server.own("/flush_cache")
    assert cache(server)["tokens"] == pytest.approx(SIZE / 2, abs=16)
    assert [server.generate(300, prompt) for prompt in prompts(4)] == expected
    server.service("/kv_cache", {"fraction": 1})
    assert [server.generate(300, prompt) for prompt in prompts(4)] == expected


@pytest.mark.parametrize(
    ("config", "arguments"),
    [(checkpoint.MELLUM, ()), (checkpoint.LFM2, ("--max-mamba-cache-size", "64", "--max-running-requests", "8"))],
    ids=["sliding windows", "states"],
)
def test_a_model_of_which_some_layers_have_other_pages(
    config: dict[str, Any], arguments: tuple[str, ...], tmp_path: Path
) -> None:
    """The pages of the others go."""
    model = checkpoint.write(tmp_path / "model", config=config)
    server = Server(model, tmp_path / "log", *arguments, MEMSAVER_KV_CACHE_PIECE="64KiB")
    try:
        server.wait_until_up()
        expected, longer = fill(server), [server.generate(1500, prompt) for prompt in prompts(4)]
        whole = cache(server)
        assert whole["bytes"] == 2 * 2 * 16 * 4 * (SIZE + whole["page_tokens"])  # of one layer, fp32
        for fraction in (0.5, 0.3, 1.0, 0.3):
            server.service("/kv_cache", {"fraction": fraction})
            running = server.in_background(4, 1500)
            server.service("/kv_cache", {"fraction": 0.5, "mode": "preempt"})
            assert shrunk(server) == pytest.approx(whole["bytes"] / 2, rel=0.1)
            assert [each.result(ANSWER_S) for each in running] == longer
            assert [server.generate(8, [number, *LONG]) for number in (11, 12, 13)] == expected
        server.own("/flush_cache")
        assert cache(server)["used_bytes"] == 0
        assert "memory leak" not in server.output()
    finally:
        server.close()


def test_prefixes_in_host_memory(start: Start) -> None:
    """A prefix whose pages went is copied back when it comes again."""
    server = start(
        "--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-write-policy", "write_through",
        "--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first", MEMSAVER_KV_CACHE_PIECE="64KiB",
        SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND="rust",  # the default of versions that have one
    )  # fmt: skip
    expected, longer = fill(server), [server.generate(1500, prompt) for prompt in prompts(4)]
    for fraction in (0.5, 0.3, 1.0, 0.3):
        server.service("/kv_cache", {"fraction": fraction})
        for number, tokens in zip((11, 12, 13), expected, strict=True):
            assert cached(server, [number, *LONG]) == len(LONG)
            assert server.generate(8, [number, *LONG]) == tokens
        running = server.in_background(4, 1500)
        server.service("/kv_cache", {"fraction": 0.5, "mode": "preempt"})
        assert [each.result(ANSWER_S) for each in running] == longer
    server.own("/flush_cache")
    assert cache(server)["used_bytes"] == 0
