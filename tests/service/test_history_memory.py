"""Forgotten operations are freed at once, not at Python's next cycle collection, which may be hours away."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

import memsaver_core as ms
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import Release
from memsaver_server.engine import LOCAL_MEMORY
from memsaver_server.operation.operation import Operation
from memsaver_server.operation.queue import OperationQueue


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def work(fails: bool, operation: Operation, log: ms.PhaseLog) -> OperationReport:
    with log.phase(Phase.DRAIN):
        pass
    if fails:
        raise RuntimeError("the engine failed")
    operation.await_commit()
    return operation.moved(ms.resume(log=log))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.guards("memory grew with every cycle")
def test_a_forgotten_operation_is_gone(fails: bool) -> None:
    """With all its phases and figures, with or without a waiting caller, and however it ended."""
    operations = OperationQueue(1, lambda _operation: None, LOCAL_MEMORY)
    request = Release(tags=("nothing",))

    async def run() -> weakref.ref[Operation]:
        operation = operations.submit(request, partial(work, fails), key="one", client="test")
        await asyncio.wait({operation.ended(), operation.ended()})
        assert (operation.status, [phase.name for phase in operation.phases][:1]) == (
            "failed" if fails else "succeeded",
            ["drain"],
        )
        return weakref.ref(operation)

    first = asyncio.run(run())
    assert first() is not None
    operations.submit(request, partial(work, fails), key="two", client="test").done.result()
    assert first() is None
