"""vLLM's KV cache gets smaller and larger while it serves, over HTTP: two workers with real memory, and a stand-in for
vLLM's scheduler and block pool. tests/vllm/test_blocks.py has vLLM's own, tests/gpu/test_vllm_gpu.py all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memsaver_core.compat.vllm import block_limit
from memsaver_core.contract.errors import UnsupportedError
from memsaver_core.resizing import behind
from tests.unit.test_vllm_plugin import Rank, group, two_workers
from tests.unit.test_vllm_routes import World
from tests.waiting import wait_until

__all__ = ["group"]

#: As tests/data/vllm_standin allocates them: 3 layers of 3,271 numbers a block.
BLOCKS, BLOCK_BYTES = 20, 3 * 3271 * 8
SIZE, LEAST = 16, 5


class Queue:
    def __init__(self, blocks: Iterable[Any]) -> None:
        self._blocks = list(blocks)
        self.remove = self._blocks.remove

    @property
    def num_free_blocks(self) -> int:
        return len(self._blocks)

    def prepend_n(self, blocks: list[Any]) -> None:
        self._blocks[:0] = blocks

    def get_all_free_blocks(self) -> list[Any]:
        return list(self._blocks)


class Pool:
    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=0) for number in range(BLOCKS)]
        self.free_block_queue = Queue(self.blocks[1:])
        self.num_gpu_blocks = BLOCKS
        self.evicted: set[int] = set()

    def free_blocks(self, blocks: list[Any]) -> None:
        for block in blocks:
            block.ref_cnt = 0
        self.free_block_queue.prepend_n(blocks)

    def get_cached_block(self, *_: Any) -> None:
        return None

    def evict_blocks(self, numbers: set[int]) -> None:
        self.evicted |= numbers

    def reset_prefix_cache(self) -> bool:
        return True


class Core:
    """An engine core, its scheduler, and the manager of its cache."""

    def __init__(self) -> None:
        cache = SimpleNamespace(kv_cache_max_concurrency=BLOCKS / (LEAST - 1), kv_cache_size_tokens=BLOCKS * SIZE)
        self.vllm_config = SimpleNamespace(cache_config=cache, parallel_config=SimpleNamespace())
        self.scheduler = self.kv_cache_manager = self
        self.connector = None
        self.block_pool = Pool()
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.prev_step_scheduled_req_ids: set[str] = set()

    def get_block_ids(self, name: str) -> tuple[list[int]]:
        return ([block.block_id for block in self.requests[name].blocks],)

    def run(self, name: str, blocks: Iterable[int]) -> None:
        taken = [self.block_pool.blocks[number] for number in blocks]
        for block in taken:
            self.block_pool.free_block_queue.remove(block)
            block.ref_cnt = 1
        request = SimpleNamespace(request_id=name, blocks=taken, num_output_placeholders=1, async_tokens_to_discard=0)
        self.requests[name] = request
        self.running.append(request)

    def _preempt_request(self, request: Any, at: float) -> None:
        self.block_pool.free_blocks(request.blocks)
        request.blocks = []


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Rank]]:
    with two_workers(MEMSAVER_KV_CACHE_PIECE="16KiB") as ranks:
        yield ranks


@pytest.fixture
def world(group: list[Rank], monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(block_limit.ms, "core_settings", lambda: SimpleNamespace(kv_cache_piece=1 << 14))
    world = World(group)
    world.client.core = Core()
    yield world
    world.close()


def sizes(world: World) -> dict[str, Any]:
    answer: dict[str, Any] = world.http.get("/kv_cache").raise_for_status().json()
    return answer


def values(world: World, blocks: int = BLOCKS) -> list[Any]:
    return [rank.cache(blocks)["values"] for rank in world.client.executor.ranks]


def used(world: World) -> list[int]:
    return [rank.cache(0)["used"] for rank in world.client.executor.ranks]


def test_half_of_it_goes_and_comes_back_on_every_rank(world: World) -> None:
    whole, before = sizes(world), used(world)
    page = whole["page_bytes"]
    assert BLOCK_BYTES <= page < 1.1 * BLOCK_BYTES
    assert (whole["bytes"], whole["tokens"], whole["page_tokens"]) == (BLOCKS * page, BLOCKS * SIZE, SIZE)
    assert (whole["used_bytes"], whole["smallest_bytes"]) == (0, LEAST * page)
    half = world.post("/kv_cache", fraction=0.5).json()["kv_cache"]
    assert half["bytes"] == BLOCKS // 2 * page, half
    for rank, bytes_before in zip(world.client.executor.ranks, before, strict=True):
        now = rank.cache(BLOCKS // 2)
        assert now["values"] == [[7]] * 3
        assert bytes_before - now["used"] > 0.8 * BLOCKS / 2 * BLOCK_BYTES
        assert now["tables"] == [[*range(BLOCKS // 2), *[0] * (BLOCKS // 2)]] * 2
    pool = world.client.core.block_pool
    assert pool.num_gpu_blocks == BLOCKS // 2
    assert pool.free_block_queue.num_free_blocks == BLOCKS // 2 - 1
    assert pool.evicted == set(range(BLOCKS // 2, BLOCKS))
    assert world.post("/kv_cache", fraction=1).json()["kv_cache"]["bytes"] == BLOCKS * page
    assert used(world) == before
    assert pool.num_gpu_blocks == BLOCKS
    assert values(world, BLOCKS // 2) == [[[7]] * 3] * 2
    assert values(world) == [[[0, 7]] * 3] * 2


def test_a_block_in_use_stays_until_its_request_ends(world: World) -> None:
    """The engine hands out no other meanwhile; after the deadline all is as before, and the request is named."""
    core = world.client.core
    core.run("low", [2, 3])
    core.run("high", [4, 17])
    late = world.post("/kv_cache", fraction=0.5, timeout_s=0)
    assert late.status_code == 504
    assert late.json()["error"]["pending"] == ["high"]
    assert sizes(world)["bytes"] == BLOCKS * sizes(world)["page_bytes"]
    assert core.block_pool.num_gpu_blocks == BLOCKS
    with ThreadPoolExecutor(1) as pool:
        shrinking = pool.submit(world.post, "/kv_cache", fraction=0.5, timeout_s=600)
        wait_until(lambda: core.block_pool.num_gpu_blocks == BLOCKS // 2 + 1)
        assert not shrinking.done()
        world.run(lambda: core.block_pool.free_blocks(core.requests.pop("high").blocks))
        assert shrinking.result(600).status_code == 200
    assert sizes(world)["used_bytes"] == 2 * sizes(world)["page_bytes"]


def test_requests_are_preempted_if_asked(world: World) -> None:
    core = world.client.core
    core.run("low", [2, 3])
    core.run("high", [4, 17])
    assert world.post("/kv_cache", fraction=0.5, mode="preempt", timeout_s=0).status_code == 200
    assert [request.request_id for request in core.running] == ["low"]
    high = core.requests["high"]
    assert (high.async_tokens_to_discard, high.num_output_placeholders) == (1, 0)


def test_a_cache_too_small_for_the_longest_request_is_refused(world: World) -> None:
    refused = world.post("/kv_cache", tokens=(LEAST - 1) * SIZE)
    assert refused.status_code == 400
    assert f"the longest request needs {LEAST}" in refused.text
    assert world.post("/kv_cache", tokens=LEAST * SIZE).status_code == 200


@pytest.mark.parametrize(("call", "first", "then"), [("unmap", 1.0, 0.5), ("create", 0.5, 1.0)])
def test_a_rank_that_fails_leaves_the_size_on_all(world: World, call: str, first: float, then: float) -> None:
    world.post("/kv_cache", fraction=first).raise_for_status()
    before = used(world)
    world.client.executor.ranks[1].fail(call, "invalid_value", 1)
    failed = world.post("/kv_cache", fraction=then)
    assert failed.status_code == 500
    assert "rank 1" in failed.text
    assert used(world) == before
    assert sizes(world)["bytes"] == first * sizes(world)["full_bytes"]
    assert world.client.core.block_pool.num_gpu_blocks == first * BLOCKS
    assert world.post("/kv_cache", fraction=then).status_code == 200


def test_growing_without_memory_leaves_the_size_on_all(world: World) -> None:
    world.post("/kv_cache", fraction=0.5).raise_for_status()
    before = used(world)
    world.client.executor.ranks[1].fail("create", "out_of_memory", 100)
    assert world.post("/kv_cache", fraction=1).status_code == 503
    assert used(world) == before
    assert world.client.core.block_pool.num_gpu_blocks == BLOCKS // 2


def test_a_sleep_and_its_wake_up_keep_the_size(world: World) -> None:
    world.post("/kv_cache", fraction=0.5).raise_for_status()
    before = used(world)
    for level in (1, 2):
        world.post(f"/sleep?level={level}").raise_for_status()
        asleep = world.post("/kv_cache", fraction=1)
        assert asleep.status_code == 409
        assert "'kv_cache' is released" in asleep.text
        world.post("/wake_up").raise_for_status()
        world.collective_rpc("reload_weights")
        assert used(world) == before
        assert values(world, BLOCKS // 2) == [[[0]] * 3] * 2
    assert world.post("/kv_cache", fraction=1).status_code == 200


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSAVER_KV_CACHE", "1MiB..1GiB")


@pytest.mark.usefixtures("bounds")
def test_it_balances_itself(world: World) -> None:
    """A resume brings back the lower bound; the cache grows again. vLLM's own application serves the routes."""
    world.post("/release_memory_occupation").raise_for_status()
    world.post("/resume_memory_occupation").raise_for_status()
    wait_until(lambda: sizes(world)["bytes"] == sizes(world)["full_bytes"])
    moves = world.http.get("/operations").json()["operations"]
    assert [each["operation"] for each in moves if each["client"] == "memsaver-balance"] == ["resize"]


def test_nothing_is_resized_while_other_memory_is_released(world: World) -> None:
    """A resize also writes to the tables of blocks."""
    world.post("/release_memory_occupation", tags=["runtime"]).raise_for_status()
    refused = world.post("/kv_cache", fraction=0.5)
    assert refused.status_code == 409
    assert "runtime is released" in refused.text
    world.post("/resume_memory_occupation").raise_for_status()
    assert world.post("/kv_cache", fraction=0.5).status_code == 200


def test_what_cannot_be_resized_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> str:
        answers = [world.http.get("/kv_cache"), world.post("/kv_cache", fraction=0.5)]
        assert [answer.status_code for answer in answers] == [409, 409]
        return answers[1].text

    core = world.client.core
    core.vllm_config.parallel_config.distributed_executor_backend = "ray"
    assert "--distributed-executor-backend mp" in refused()
    core.connector = object()
    assert "a KV connector uses its blocks" in refused()
    monkeypatch.setattr(block_limit.ms, "core_settings", lambda: SimpleNamespace(kv_cache_piece=0))
    assert "start vLLM with MEMSAVER_KV_CACHE_PIECE=32MiB" in refused()
    del core.block_pool.free_block_queue
    assert "manages its cache in another way" in refused()
    world.client.engine_core.core_engines = [b"0", b"1"]
    assert "several engine cores" in refused()


def strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int, numbers: int) -> torch.Tensor:
    return torch.zeros(numbers, dtype=torch.int16).as_strided(shape, strides, offset)


LAYOUTS = {
    "blocks first": strided((7, 2, 4, 3), (24, 12, 3, 1), 0, 168),
    "keys and values apart": strided((2, 7, 4, 3), (84, 12, 3, 1), 0, 168),
    "the same, as vLLM's hybrid models see it": strided((2, 7, 4, 3), (12, 24, 3, 1), 0, 168),
    "heads first in a block": strided((7, 4, 2, 3), (24, 3, 12, 1), 0, 168),
    "heads apart": strided((7, 2, 4, 3), (12, 84, 3, 1), 0, 168),
    "padded blocks": strided((7, 2, 4, 3), (30, 12, 3, 1), 0, 210),
    "blocks of all layers together, the last layer": strided((7, 4, 3), (36, 3, 1), 24, 252),
    "smaller blocks of a kernel": strided((14, 2, 2, 3), (12, 6, 3, 1), 0, 168),
    "behind another cache": strided((7, 4, 3), (12, 3, 1), 84, 200),
    "one number a block": strided((7, 1), (1, 1), 0, 7),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_byte_of_a_block_that_stays_goes(layout: str) -> None:
    """And all bytes of those that go do."""
    view = LAYOUTS[layout]
    whole = view.as_strided((view.untyped_storage().nbytes() // 2,), (1,), 0)
    [dimension] = [dimension for dimension, size in enumerate(view.shape) if size % 7 == 0]
    per_block = view.shape[dimension] // 7
    for blocks in range(8):
        whole.zero_()
        for part in behind(view, blocks, 7):
            part.view(torch.int16).fill_(1)
        assert not view.narrow(dimension, 0, blocks * per_block).any()
        assert view.narrow(dimension, blocks * per_block, (7 - blocks) * per_block).all()
        if layout == "behind another cache":
            assert not whole[:84].any()
            assert not whole[168:].any()


def test_a_layout_that_is_not_understood_is_refused() -> None:
    for shape in ((7, 14), (6, 5), (7,)):
        with pytest.raises(UnsupportedError, match="no single dimension"):
            list(behind(torch.zeros(shape), 3, 7))
