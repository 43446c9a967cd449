"""How large the caches of one GPU should be: nobody gets more than there is, and none loses what it needs."""

from __future__ import annotations

import random
from math import inf

import pytest

from memsaver_core.contract.status import DeviceMemory, KvCacheAnswer, Status, TagStatus
from memsaver_server.engine.balance import CacheRow, outside_bytes, step_bytes, target_bytes, wanted_bytes
from memsaver_server.settings import Settings

TOTAL = 1000


def cache(size: int, used: int, reused: int = 0) -> KvCacheAnswer:
    sizes = {"bytes": size, "used_bytes": used, "smallest_bytes": used, "largest_bytes": TOTAL, "full_bytes": TOTAL}
    return KvCacheAnswer(**sizes, reused_bytes=reused, tokens=size, page_bytes=1, page_tokens=1)


@pytest.mark.parametrize(
    ("size", "used", "recomputed_s", "wanted"),
    [
        *((400, 0, inf, 100), (400, 200, inf, 300), (400, 360, inf, 600), (400, 400, inf, 600), (800, 800, inf, 900)),
        *((50, 10, inf, 100), (400, 0, 1.0, 600), (400, 0, 20.0, 400), (400, 300, 20.0, 450), (400, 0, 31.0, 100)),
        (60, 60, inf, 120),
    ],
)
def test_what_a_cache_wants(size: int, used: int, recomputed_s: float, wanted: int) -> None:
    """It may have had no room for a prefix so long ago."""
    assert wanted_bytes(cache(size, used), 100, 900, recomputed_s, 0.0) == wanted


@pytest.mark.parametrize(("used", "reused", "wanted"), [(100, 100, 300), (0, 300, 450), (300, 300, 600)])
def test_prefixes_that_are_found_again_are_wanted(used: int, reused: int, wanted: int) -> None:
    assert wanted_bytes(cache(400, used, reused), 100, 900, inf, 4.0) == wanted


@pytest.mark.parametrize("recomputed_s", [6.0, 20.0, inf])
def test_an_idle_cache_wants_the_least(recomputed_s: float) -> None:
    assert wanted_bytes(cache(400, 0, 300), 100, 900, recomputed_s, 6.0) == 100


def settled(demands: list[int], sizes: list[int], low: int = 100, step: int = 0) -> list[int]:
    """The sizes once every engine, one after the other, has looked many times; each uses what it demands, if it can."""
    for _ in range(60):
        for each, size in enumerate(sizes):
            rows = [
                CacheRow(0.0, other, wanted_bytes(cache(other, min(other, demand)), low, 900, inf, 0.0))
                for other, demand in zip(sizes, demands, strict=True)
            ]
            mine = rows.pop(each)
            sizes[each] = target_bytes(mine, rows, TOTAL - sum(sizes), low, step)
            assert sum(sizes) <= TOTAL
            assert sizes[each] >= min(size, mine.wanted, TOTAL // len(sizes) - step)
    return sizes


@pytest.mark.parametrize(
    ("demands", "sizes"),
    [
        ([0, 900], [800, 200]),  # all that one does not need goes to the other
        ([900, 0], [100, 900]),
        ([900, 900], [900, 100]),  # both lack memory: half for each
        ([100, 300], [500, 500]),  # both have enough: nothing moves
    ],
)
def test_two_engines(demands: list[int], sizes: list[int]) -> None:
    now = settled(demands, list(sizes))
    if max(demands) == min(demands):
        assert now == [500, 500]
    elif sum(demands) < TOTAL // 2 + 1:
        assert now == sizes
    else:
        assert now[demands.index(900)] == 900
        assert settled(demands, list(now)) == now


@pytest.mark.parametrize("small", [15, 30, 60])
def test_a_small_cache_grows_beside_one_that_has_everything(small: int) -> None:
    """Half of what it has is less than the least change."""
    large, now = settled([300, 200], [TOTAL - small - 5, small], low=10, step=step_bytes(cache(0, 0)))
    assert now >= 200
    assert large >= 300


def test_many_engines_with_changing_demands() -> None:
    choose = random.Random(4)
    sizes = [250, 250, 250, 250]
    for _ in range(50):
        demands = [choose.choice((0, 50, 300, 900)) for _ in sizes]
        sizes = settled(demands, sizes)
        lacking = [size for size, demand in zip(sizes, demands, strict=True) if demand > size]
        assert not lacking or TOTAL - sum(sizes) < 4 or min(lacking) >= 900 or sum(sizes) >= TOTAL - 4


@pytest.mark.parametrize(
    ("mine", "needs", "free", "size"),
    [
        ((800, 800), 300, 100, 600),  # all that it lacks, also by one that uses all
        ((800, 800), 900, 0, 100),  # but no more than it has above its lower bound
        ((800, 800), 300, 300, 800),  # it finds room
        ((200, 600), 300, 400, 300),  # and nobody takes that meanwhile
        ((100, 100), 300, 0, 100),
    ],
)
def test_a_resume_gets_what_it_lacks(mine: tuple[int, int], needs: int, free: int, size: int) -> None:
    assert target_bytes(CacheRow(0.0, *mine), [CacheRow(0.0, 0, 0, needs)], free, 100, 0) == size


@pytest.mark.parametrize(
    ("mine", "spare", "others", "free", "size"),
    [
        ((300, 600), 100, 150, 400, 450),  # what is spare for each is not taken
        ((300, 600), 100, 150, 200, 250),  # what is missing of it is given back
        ((300, 600), 500, 150, 0, 100),
    ],
)
def test_what_an_engine_needs_outside_its_cache_stays_free(
    mine: tuple[int, int], spare: int, others: int, free: int, size: int
) -> None:
    assert (
        target_bytes(CacheRow(0.0, *mine, spare=spare), [CacheRow(0.0, 100, 100, spare=others)], free, 100, 0) == size
    )


@pytest.mark.parametrize(("driver", "process", "outside"), [("cuda", 900, 150), ("cuda", None, 0), ("host", 900, 0)])
def test_what_an_engine_has_outside_its_regions(driver: str, process: int | None, outside: int) -> None:
    sizes = dict.fromkeys(("bytes", "resident_bytes", "released_bytes", "retained_bytes", "backed_up_bytes"), 0)
    counts = {**sizes, "allocations": 1, "chunks": 1, "mapped_by_device": {0: 500, 1: 700}}
    tags = [TagStatus(tag=tag, restore="host", state="resident", **counts) for tag in ("weights", "kv_cache")]
    status = Status(enabled=True, driver=driver, state="resident", tags=tuple(tags))
    read = {"uuid": "", "name": "", "total_bytes": TOTAL, "used_bytes": TOTAL}
    own = None if process is None else process + 250
    devices = [DeviceMemory(index=index, **read, process_bytes=own) for index in (0, 1)]
    assert outside_bytes(status, devices) == outside


@pytest.mark.parametrize("bounds", ["4GiB", "4GiB..", "40GiB..4GiB", "a..b", "-1..5"])
def test_bounds_that_are_none(bounds: str) -> None:
    with pytest.raises(ValueError, match="is not a smaller and a larger size, such as"):
        Settings(kv_cache=bounds)
