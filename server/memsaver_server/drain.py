"""The drain of a release: ends with its cancellation, and goes on with the mode that its callers ask for now."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import ExitStack

from memsaver_server.engine import DrainTimeoutError, Engine
from memsaver_server.memory_lock import MemoryLock
from memsaver_server.operation import Operation, ReleaseRequest


def drain(engine: Engine, lock: MemoryLock, operation: Operation, until_released: ExitStack) -> None:
    """Drain ``engine`` for a release, and hold ``lock`` until ``until_released`` is closed.

    Raises:
        DrainTimeoutError: requests or a weight update did not end in time.
        OperationCancelledError: the release was cancelled.
    """
    while True:
        asked = operation.request
        assert isinstance(asked, ReleaseRequest)
        deadline = time.monotonic() + asked.timeout_s

        def given_up(asked: ReleaseRequest = asked) -> bool:
            return operation.cancellation.requested or operation.request is not asked

        try:
            _drain_engine(engine, asked, given_up)
            until_released.enter_context(lock.for_release(asked.timeout_s, deadline, given_up))
            return
        except DrainTimeoutError:
            if operation.fails_for(asked):
                raise
        operation.cancellation.check()


def _drain_engine(engine: Engine, asked: ReleaseRequest, given_up: Callable[[], bool]) -> None:
    # Engines written for version 0.1 have no such parameter; their drains go on until they end by themselves.
    if "given_up" in inspect.signature(engine.drain).parameters:
        engine.drain(asked.timeout_s, asked.mode, given_up)
    else:
        engine.drain(asked.timeout_s, asked.mode)
