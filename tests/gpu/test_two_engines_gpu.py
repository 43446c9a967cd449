"""Two engines on one GPU, each a process with CUDA graphs, that release and resume concurrently."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import Server, serving
from tests.gpu.children import ON_CUDA

QWEN2 = Path(__file__).parents[1] / "data" / "qwen2-1.5b" / "config.json"
CYCLES = 200
OPTIONS = ("--random-weights", str(QWEN2), "--kv-cache-bytes", "2GiB", "--batch-sizes", "1,2,4")

# A deadlock in the driver would last forever: a call's timeout or this limit then ends the test.
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(280)]
CALL_S = 60


class Load:
    """Continuously requests tokens from an engine, and counts the answers by status."""

    def __init__(self, url: str) -> None:
        self.statuses: Counter[int] = Counter()
        self.turn = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,))
        self._thread.start()

    def _run(self, url: str) -> None:
        body = {"text": "load", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        with httpx.Client(base_url=url, timeout=CALL_S) as http:
            while not self._stop.is_set():
                with self.turn:
                    self.statuses[http.post("/generate", json=body).status_code] += 1
                self._stop.wait(0.002)  # so that other threads can run

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


def tokens(http: httpx.Client) -> list[int]:
    body = {"text": "the same prompt", "sampling_params": {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}}
    return list(http.post("/generate", json=body).raise_for_status().json()["output_ids"])


def cycle(server: Server, both: threading.Barrier) -> Counter[int]:
    with httpx.Client(base_url=server.url, timeout=CALL_S) as http:
        expected = tokens(http)
        with Load(server.url) as load:
            both.wait(CALL_S)  # neither ends before the other has begun
            for number in range(CYCLES):
                answer = http.post("/release_memory_occupation").raise_for_status().json()
                assert answer["released_bytes"] > 5 << 30
                http.post("/resume_memory_occupation").raise_for_status()
                if number % 10 == 9:
                    with load.turn:  # alone in its batch, because other batch sizes round differently
                        assert tokens(http) == expected, number
        assert tokens(http) == expected
    return load.statuses


@pytest.mark.guards("two engines on one GPU hung")
def test_two_engines_release_and_resume_at_once() -> None:
    """200 cycles each, under load: both finish, and every token is right."""
    both = threading.Barrier(2)
    with serving(*OPTIONS, changes=ON_CUDA) as one, serving(*OPTIONS, "--seed", "1", changes=ON_CUDA) as other:
        with ThreadPoolExecutor(2) as pool:
            futures = [pool.submit(cycle, server, both) for server in (one, other)]
            statuses = [future.result() for future in futures]
        for server, counted in zip((one, other), statuses, strict=True):
            assert set(counted) <= {200, 503}, (counted, server.log)
            assert counted[200] > 0
            assert server.end() == 0, server.log
    print(f"{2 * CYCLES} cycles, load answered {statuses}")
