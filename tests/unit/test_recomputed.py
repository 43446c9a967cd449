"""Prefixes that are computed again are counted, and memory for that is bounded."""

from __future__ import annotations

from memsaver_core.compat.page_limit import KNOWN, Recomputed


def test_each_computation_after_the_first_counts() -> None:
    recomputed = Recomputed()
    for prefix in ("a", "b", "a", "c", "a"):
        recomputed.note(prefix)
    assert recomputed.count == 2


def test_the_oldest_is_forgotten() -> None:
    recomputed = Recomputed()
    for number in range(KNOWN):
        recomputed.note(number)
    recomputed.note(0)  # the newest now
    recomputed.note(KNOWN)
    assert recomputed.count == 1
    recomputed.note(0)
    assert recomputed.count == 2
    recomputed.note(1)
    assert recomputed.count == 2


def test_a_cache_that_is_emptied_lacks_no_room() -> None:
    recomputed = Recomputed()
    recomputed.note("a")
    assert recomputed.forget(lambda answer: answer, "done") == "done"
    recomputed.note("a")
    assert recomputed.count == 0
