"""Prefixes that are computed again, and pages on which they are found, are counted; memory for that is bounded."""

from __future__ import annotations

import pytest

from memsaver_core.compat import page_limit
from memsaver_core.compat.page_limit import KNOWN, RECENT_S, Prefixes


def test_each_computation_after_the_first_counts() -> None:
    prefixes = Prefixes()
    for prefix in ("a", "b", "a", "c", "a"):
        prefixes.computed(prefix)
    assert prefixes.recomputed == 2


def test_the_oldest_is_forgotten() -> None:
    prefixes = Prefixes()
    for number in range(KNOWN):
        prefixes.computed(number)
    prefixes.computed(0)  # the newest now
    prefixes.computed(KNOWN)
    assert prefixes.recomputed == 1
    prefixes.computed(0)
    assert prefixes.recomputed == 2
    prefixes.computed(1)
    assert prefixes.recomputed == 2


def test_pages_count_while_they_are_found_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(page_limit.time, "monotonic", lambda: now[0])
    prefixes = Prefixes()
    for prefix, pages in (("a", 3), ("b", 5), ("a", 3)):
        prefixes.found(prefix, pages)
    assert prefixes.reused() == 8
    for now[0], pages in ((RECENT_S + 1, 8), (2 * RECENT_S + 2, 3)):
        assert prefixes.reused() == pages
        prefixes.found("a", 3)


def test_a_cache_that_is_emptied_lacks_no_room() -> None:
    prefixes = Prefixes()
    prefixes.computed("a")
    prefixes.found("b")
    assert prefixes.forget(lambda answer: answer, "done") == "done"
    assert prefixes.reused() == 0
    prefixes.computed("a")
    assert prefixes.recomputed == 0
