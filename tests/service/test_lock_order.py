"""The service's locks are taken in one order; the fixture ``lock_order`` checks that in each test of this folder."""

from __future__ import annotations

import httpx
import pytest

from .lock_order import LockOrder
from .test_leases import RELEASE, RESUME, prepare
from .test_operations import post

MEMORY, ADMISSION, OPERATIONS = range(3)


def test_an_operation_takes_its_locks_in_order(http: httpx.Client, lock_order: LockOrder) -> None:
    """While memory moves, what it lost is noted, and callers commit."""
    for path in (RELEASE, RESUME):
        post(http, path, commit=prepare(http, path)["operation_id"]).raise_for_status()
    assert lock_order.seen == {(MEMORY, ADMISSION), (MEMORY, OPERATIONS)}


def test_a_lock_that_is_taken_out_of_order_fails() -> None:
    order = LockOrder()
    memory, admission = (order.module(level).Lock() for level in (MEMORY, ADMISSION))
    with memory, admission:
        pass
    with admission, pytest.raises(AssertionError, match=r"the lock of .*lifecycle in that of .*admission"):
        memory.acquire()
    assert order.broken
    with memory:  # nothing is left held
        pass
