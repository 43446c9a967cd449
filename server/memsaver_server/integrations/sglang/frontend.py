"""What SGLang's HTTP server and its ``Engine`` answer to a release or a resume that failed in the scheduler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from memsaver_core import MemsaverError

CALLS = ("release_memory_occupation", "resume_memory_occupation")


class SchedulerCallError(MemsaverError):
    """The call failed in the scheduler. SGLang's server answers it with ``status_code``."""

    kind = "scheduler_call"

    def __init__(self, told: str) -> None:
        status, _, message = told.partition(" ")
        self.status_code = int(status)
        super().__init__(message)


def hook(call: str) -> Callable[..., Awaitable[None]]:
    """Return a hook around ``TokenizerManager``'s method ``call``, which forgets what the scheduler answers."""

    async def told(original: Callable[..., Awaitable[None]], manager: Any, request: Any, *arguments: Any) -> None:
        communicate = getattr(manager, f"{call}_communicator", None)
        if communicate is None:
            await original(manager, request, *arguments)
            return
        manager.auto_create_handle_loop()
        for output in await communicate(request):
            if output.rid:
                raise SchedulerCallError(output.rid)

    return told
