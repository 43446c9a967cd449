"""Log output that never blocks the threads that log: a separate thread writes what waits in a bounded queue.

If nobody reads the pipe, the disk is full or the file system hangs, lines are lost, and counted. The standard library's
``QueueListener`` does not do: its thread ends with an error of a handler, a forked child has none, and its ``stop``
waits without a limit.
"""

from __future__ import annotations

import io
import logging
import os
import queue
import select
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

#: Lines that may wait to be written; further ones are dropped.
CAPACITY = 1000

#: The loggers of the service.
LOGGERS = ("memsaver", "memsaver.audit")

#: Lines that were dropped, or could not be written, by the name of their output.
dropped: Counter[str] = Counter()
_counting = threading.Lock()


class LogOutput:
    """Passes items from any thread to ``write``, in order."""

    def __init__(self, name: str, write: Callable[[Any], object]) -> None:
        """``name`` labels the output in the metrics; ``write`` may block, and may raise."""
        self._name = name
        self._write = write
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def put(self, item: Any) -> None:
        """Queue ``item``, or drop and count it. Never blocks, never raises."""
        if self._process != os.getpid():  # a forked child: it has no thread, and its parent writes what was queued
            self._begin()
        if self._waiting.qsize() >= CAPACITY:
            self._drop()
            return
        self._waiting.put(item)
        self._start()

    def close(self, timeout_s: float) -> bool:
        """End the thread once everything put so far is written, which a later item starts again; return whether that
        took at most ``timeout_s`` seconds."""
        self._waiting.put(None)
        self._start()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
        return thread is None or not thread.is_alive()

    def _start(self) -> None:
        if sys.is_finalizing():  # a thread started now never runs; before Python 3.12 its start() would hang
            return
        if (self._thread is None or not self._thread.is_alive()) and self._starting.acquire(blocking=False):
            try:
                thread = threading.Thread(target=self._run, name=f"memsaver-{self._name}", daemon=True)
                thread.start()
                self._thread = thread
            except RuntimeError:  # no thread can be started now: the next item tries again
                pass
            finally:
                self._starting.release()

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            if item is None:
                return
            try:
                self._write(item)
            except Exception:  # also of handlers that are not ours
                self._drop()
            del item  # it may hold an operation, which would live until the next item comes

    def _drop(self) -> None:
        with _counting:
            dropped[self._name] += 1


class LogStream(io.TextIOBase):
    """A text stream that writes to a file descriptor through a ``LogOutput``; it can replace ``sys.stderr``."""

    encoding = "utf-8"

    def __init__(self, name: str, descriptor: int) -> None:
        self._descriptor = descriptor
        self._output = LogOutput(name, lambda content: write_all(descriptor, content))

    def write(self, text: str) -> int:
        self._output.put(text.encode(errors="backslashreplace"))
        return len(text)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def wait_written(self, timeout_s: float) -> bool:
        """Return whether everything was written within ``timeout_s`` seconds; ``flush`` waits for nothing."""
        return self._output.close(timeout_s)


def write_all(descriptor: int, content: bytes) -> None:
    """Write all of ``content``, however long this takes. Raises OSError if the descriptor is closed, or its other end,
    disk or device does not take the content."""
    while content:
        try:
            content = content[os.write(descriptor, content) :]
        except BlockingIOError:  # another process made the pipe non-blocking
            select.select([], [descriptor], [])


class _Relay:
    """A filter of a logger: takes each record and has the handlers called from a thread, because they may block."""

    def __init__(self, logger: logging.Logger) -> None:
        self._output = LogOutput("log", logger.callHandlers)

    def __call__(self, record: logging.LogRecord) -> bool:
        # Formatted now: a record that waits must hold neither an error's frames nor objects that may change.
        with suppress(TypeError, ValueError):  # arguments that do not fit are reported by the handlers
            record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        self._output.put(record)
        return False


def relay() -> None:
    """Let the loggers of the service call their handlers, and those of the process, from threads. Idempotent."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(each, _Relay) for each in logger.filters):
            logger.addFilter(_Relay(logger))


def hold_standard_files() -> None:
    """Open the null device for each closed standard file, so that no socket gets its number and receives output."""
    for number in (0, 1, 2):
        with suppress(OSError):
            os.fstat(number)
            continue
        os.open(os.devnull, os.O_RDWR)
