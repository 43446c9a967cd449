"""Starts threads where the system may refuse one for a moment: nothing is left half done, and a repeat succeeds."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from memsaver_core import MemsaverError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class NoThreadError(MemsaverError):
    """The system starts no thread. Nothing was done."""

    kind = "no_thread"
    status = 503
    retry_after_s = 1

    def __init__(self, reason: RuntimeError) -> None:
        super().__init__(
            f"nothing was done: {reason}. Repeat the call once this process may have more threads; ulimit -u and the "
            "container's limit of processes bound them"
        )


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread.

    Raises:
        NoThreadError: the system starts none.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise NoThreadError(error) from error
    return thread


async def in_thread(
    work: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
) -> _Result:
    """Return what ``work`` returns in a thread of the event loop's executor.

    Unlike with ``asyncio.to_thread``, ``work`` does not run later in another call's thread after an error.

    Raises:
        NoThreadError: the system starts no thread.
    """
    done: Future[_Result] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(context.run(work, *arguments, **named))
        except BaseException as error:
            done.set_exception(error)

    try:
        # The executor queues the call before it starts a thread for it.
        await asyncio.get_running_loop().run_in_executor(None, run)
    except RuntimeError as error:
        if done.cancel():
            raise NoThreadError(error) from error
    return await asyncio.wrap_future(done)
