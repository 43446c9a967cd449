"""Watches processes, so that the end of one is an event."""

from __future__ import annotations

import logging
import os
import selectors
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

from memsaver_core.reports import RankStatus

logger = logging.getLogger("memsaver")


class ProcessWatch:
    """Calls the method ``on_end(pid)`` from a thread of its own for each of ``pids`` that ends, until it is garbage
    collected.

    Attributes:
        pids: those that are watched. The kernel, a sandbox or a lack of threads may prevent it.
    """

    def __init__(self, pids: Iterable[int], on_end: Callable[[int], None]) -> None:
        selector = selectors.DefaultSelector()
        stop = os.eventfd(0)
        selector.register(stop, selectors.EVENT_READ)
        finalizer = weakref.finalize(self, os.eventfd_write, stop, 1)
        watched, ended = set(), []
        for pid in pids:
            try:
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                watched.add(pid)
            except ProcessLookupError:
                ended.append(pid)
            except OSError as error:
                logger.warning("process %d cannot be watched: %s", pid, error)
        arguments = (selector, stop, weakref.WeakMethod(on_end))
        thread = threading.Thread(target=_watch, args=arguments, name="memsaver-watch", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("the engine's processes cannot be watched: %s", error)
            finalizer.detach()
            _close(selector)
            watched = set()
        self.pids = frozenset(watched)
        for pid in ended:
            on_end(pid)


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process; see proc_pid_stat(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def is_rank_stopped(rank: RankStatus) -> bool:
    """As ``is_stopped``. A rank that is stopped computes as before once it is continued."""
    return bool(rank.pid and rank.alive and is_stopped(rank.pid))


def stopped_ranks(ranks: Iterable[RankStatus]) -> str:
    """Return which ranks are stopped, or an empty string."""
    names = [f"rank {each.rank} (process {each.pid})" for each in ranks if is_rank_stopped(each)]
    return f"stopped by a signal or a debugger: {' and '.join(names)}; continue with kill -CONT" if names else ""


def _watch(selector: selectors.BaseSelector, stop: int, on_end: weakref.WeakMethod[Callable[[int], None]]) -> None:
    while True:
        for key, _ in selector.select():
            if key.fd == stop:
                _close(selector)
                return
            selector.unregister(key.fd)
            os.close(key.fd)
            if (call := on_end()) is not None:
                call(key.data)


def _close(selector: selectors.BaseSelector) -> None:
    for key in list(selector.get_map().values()):
        os.close(key.fd)
    selector.close()
