"""Two engines on one device hand the memory of their KV caches to each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from memsaver_server.client import Client
from tests.e2e.serving import serving
from tests.waiting import wait_until

MIB = 1 << 20
#: Fifteen pages of 512 tokens, at most one for each request.
SERVE = ("--kv-cache-bytes", "16MiB", "--max-len", "512")
REQUESTS = 15


@contextmanager
def load(url: str) -> Iterator[None]:
    """More requests than a small cache has pages for, while the block runs. Each is answered, with the same tokens."""
    ended = threading.Event()

    def repeat(number: int) -> set[tuple[int, ...]]:
        found = set()
        with Client(url) as client:
            while not ended.is_set():
                answer = client.generate(input_ids=[3 + number, 5, 8], max_new_tokens=30, ignore_eos=True)
                found.add(tuple(answer["output_ids"]))
        return found

    with ThreadPoolExecutor(REQUESTS) as pool:
        running = [pool.submit(repeat, number) for number in range(REQUESTS)]
        try:
            yield
        finally:
            ended.set()
        assert [len(each.result()) for each in running] == [1] * REQUESTS


def test_memory_follows_the_load() -> None:
    with serving(*SERVE) as alone, Client(alone.url) as client:
        whole = client.occupation().devices[0].used_bytes
    name = f"balance-{os.getpid()}"
    # Two whole engines do not fit: one of them has a small cache, or both have.
    shared = {"MEMSAVER_HOST_DEVICE": name, "MEMSAVER_HOST_CAPACITY": str(2 * whole - 9 * MIB)}
    shared["MEMSAVER_KV_CACHE"] = "2MiB..15MiB"
    with serving(*SERVE, changes=shared) as first, Client(first.url) as one:
        one.resize_kv_cache(bytes=4 * MIB)
        with serving(*SERVE, changes=shared) as second, Client(second.url) as two:
            assert one.resize_kv_cache(fraction=1.0).kv_cache.limit_bytes is None
            for url, busy, idle in ((first.url, one, two), (second.url, two, one)):
                with load(url):
                    wait_until(lambda busy=busy: busy.kv_cache().bytes >= 14 * MIB)
                assert idle.kv_cache().bytes <= 8 * MIB
            moves = [each for each in two.operations() if each.client == "memsaver-balance"]
            assert {each.status for each in moves} <= {"succeeded", "failed"}
            assert any(each.operation == "resize" and each.status == "succeeded" for each in moves)
