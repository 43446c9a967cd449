"""What memsaver changes in the process of SGLang's HTTP server, or of its ``Engine``.

A release or a resume that failed in the scheduler is answered as a failure. An update of weights waits for the requests
in flight: each holds a lock until it is answered. It does not wait for those that memsaver holds back, which may
themselves wait for that update.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from memsaver_core import MemsaverError

CALLS = ("release_memory_occupation", "resume_memory_occupation")
#: The name of a request for the scheduler's state that memsaver's ``Controls`` answer.
QUESTION = "memsaver"
#: How often an update that waits asks what it waits for, seconds.
ASK_S = 1.0


class SchedulerCallError(MemsaverError):
    """The call failed in the scheduler. SGLang's server answers it with ``status_code``."""

    kind = "scheduler_call"

    def __init__(self, told: str) -> None:
        status, _, message = told.partition(" ")
        self.status_code = int(status)
        super().__init__(message)


def hook(call: str) -> Callable[..., Awaitable[None]]:
    """Return a hook around ``TokenizerManager``'s method ``call``, which forgets what the scheduler answers."""

    async def told(original: Callable[..., Awaitable[None]], manager: Any, obj: Any, request: Any = None) -> None:
        communicate = getattr(manager, f"{call}_communicator", None)
        if communicate is None:
            await original(manager, obj, request)
            return
        manager.auto_create_handle_loop()
        for output in await communicate(obj):
            if output.rid:
                raise SchedulerCallError(output.rid)

    return told


def initialize(original: Callable[..., None], manager: Any, *arguments: Any, **named: Any) -> None:
    """A hook around ``TokenizerManager.__init__``."""
    original(manager, *arguments, **named)
    if manager.server_args.enable_memory_saver:
        lock = manager.model_update_lock
        lock.acquire_writer = partial(_acquire_writer, manager, lock, lock.acquire_writer)


async def _acquire_writer(manager: Any, lock: Any, acquire: Callable[[], Awaitable[None]]) -> None:
    """Return once no request is in flight, or those that are wait in the scheduler until memory is back or written.

    ``release_writer`` may follow either.
    """
    acquiring = asyncio.ensure_future(acquire())
    timeout_s = 0.0
    try:
        while not (await asyncio.wait([acquiring], timeout=timeout_s))[0]:
            if await _all_are_held(manager):
                acquiring.cancel()
                return
            timeout_s = ASK_S
    except BaseException:
        if not acquiring.cancel():
            await lock.release_writer()
        raise


async def _all_are_held(manager: Any) -> bool:
    messages = importlib.import_module("sglang.srt.managers.io_struct")
    outputs = await manager.get_internal_state_communicator(messages.GetInternalStateReq(rid=QUESTION))
    replicas = [output.internal_state for output in outputs]
    return all(each.get("still") for each in replicas) and any(each.get("closed") for each in replicas)
