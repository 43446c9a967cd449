"""Starts threads and tasks so that nothing is left half done: if the system refuses a thread, or if a task ends first;
reserves heap for threads that answer requests."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar

from memsaver_core.contract.errors import NoThreadError
from memsaver_core.rendezvous import settle

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

#: Free heap for each thread that answers requests, bytes. An answer takes some ten thousand.
RESERVE_BYTES = 4 << 20
#: Below malloc's threshold for mapping a block by itself, and unmapping it when freed (128 KiB).
_BLOCK_BYTES = 64 << 10


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


@asynccontextmanager
async def first_of(*works: Awaitable[Any]) -> AsyncIterator[Sequence[asyncio.Future[Any]]]:
    """Do ``works`` side by side until one has ended; yield their futures. After the block none goes on: those that have
    not ended were cancelled, and have ended. An error of a work is raised only by its future."""
    futures = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        yield futures
    finally:
        for each in futures:
            each.cancel()
        await asyncio.gather(*futures, return_exceptions=True)


@contextmanager
def reserved_heap() -> Iterator[None]:
    """Keep ``RESERVE_BYTES`` free in the calling thread's heap while the block runs, if there is that much memory.

    While the CUDA driver checkpoints a process it pins about 700 MiB of host memory and holds the lock on the process's
    address space for 0.2 s (measured on an H200, driver 580). A thread whose heap grows in that time blocks in the
    kernel; a Python thread then blocks every thread that needs the interpreter's lock, and no probe is answered.
    """
    blocks: list[bytearray] = []
    with suppress(MemoryError):  # the thread matters more than its reserve
        while len(blocks) < RESERVE_BYTES // _BLOCK_BYTES:
            blocks.append(bytearray(_BLOCK_BYTES))
    end = bytearray(1 << 10)  # malloc returns free memory at the end of a heap to the kernel
    del blocks
    yield
    del end
