"""Starts threads, or leaves nothing half done if the system refuses one; and makes futures of an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

from memsaver_core.contract.errors import NoThreadError
from memsaver_core.rendezvous import settle

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _no_thread(reason: RuntimeError) -> NoThreadError:
    return NoThreadError(
        f"nothing was done: {reason}. Repeat the call once this process may have more threads; ulimit -u and the "
        "container's limit of processes bound them"
    )


def start_thread(name: str, target: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread; raise NoThreadError if the system starts none."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise _no_thread(error) from error
    return thread


async def in_thread(
    work: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
) -> _Result:
    """Return what ``work`` returns in a thread of the event loop's executor; raise NoThreadError if the system starts
    none. Unlike with ``asyncio.to_thread``, ``work`` does not run later in another call's thread after that error."""
    done: Future[_Result] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        if done.set_running_or_notify_cancel():
            settle(done, partial(context.run, work, *arguments, **named))

    try:
        # The executor queues the call before it starts a thread for it.
        await asyncio.get_running_loop().run_in_executor(None, run)
    except RuntimeError as error:
        if done.cancel():
            raise _no_thread(error) from error
    return await asyncio.wrap_future(done)


def on_this_loop(done: Future[None]) -> asyncio.Future[None]:
    """Return a future of the running event loop that is done once ``done`` is. ``asyncio.wrap_future``
    would leave a reference cycle, which keeps what the future refers to alive until the next garbage collection."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def notify(_: Future[None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(end)

    done.add_done_callback(notify)
    return ended
