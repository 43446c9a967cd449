"""Watches processes, so that the end of one is an event.

A pidfd reports it once the kernel has taken the process's memory down, which may take seconds if tens of gigabytes are
pinned. So the process's state is looked at, too.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from memsaver_core.contract.status import RankStatus

logger = logging.getLogger("memsaver")

#: Interval at which the states of processes are looked at, seconds.
_LOOK_S = 0.25
#: Of the flags in the ninth field of proc_pid_stat(5): the process is ending (PF_EXITING of the kernel's sched.h).
_EXITING = 0x4


class ProcessWatch:
    """Calls the method ``on_end(pid)`` from a separate thread for each of ``pids`` that ends, until it is garbage
    collected. Its ``pids`` are those that are watched: none without a thread."""

    def __init__(self, pids: Collection[int], on_end: Callable[[int], None]) -> None:
        selector = selectors.DefaultSelector()
        stop = os.eventfd(0)
        selector.register(stop, selectors.EVENT_READ)
        finalizer = weakref.finalize(self, os.eventfd_write, stop, 1)
        found = {pid for pid in pids if Path(f"/proc/{pid}").exists()}
        for pid in found:
            with suppress(OSError):  # the kernel, a sandbox or a lack of descriptors may prevent it
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
        arguments = (selector, stop, set(found), weakref.WeakMethod(on_end))
        thread = threading.Thread(target=_watch, args=arguments, name="memsaver-watch", daemon=True)
        try:
            thread.start()
            self.pids = frozenset(found)
        except RuntimeError as error:
            logger.warning("the engine's processes cannot be watched: %s", error)
            finalizer.detach()
            _close(selector)
            self.pids = frozenset()
        for pid in pids:
            if pid not in found:
                on_end(pid)


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    try:
        return _stat(pid)[0] in "Tt"
    except OSError:
        return False


def is_ending(pid: int) -> bool:
    """Return whether a process has ended, or is about to: no signal reaches it any more."""
    try:
        state, *_, flags = _stat(pid)[:7]
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # this process has no free descriptor: that cannot be reported now
        return False
    return state in "ZX" or bool(int(flags) & _EXITING)


def _stat(pid: int) -> list[str]:
    """Return the third and later fields of proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_rank_stopped(rank: RankStatus) -> bool:
    """As ``is_stopped``. A rank that is stopped computes as before once it is continued."""
    return bool(rank.pid and rank.alive and is_stopped(rank.pid))


def stopped_ranks(ranks: Iterable[RankStatus]) -> str:
    """Return which ranks are stopped, or an empty string."""
    names = [f"rank {each.rank} (process {each.pid})" for each in ranks if is_rank_stopped(each)]
    return f"stopped by a signal or a debugger: {' and '.join(names)}; continue with kill -CONT" if names else ""


def _watch(
    selector: selectors.BaseSelector, stop: int, pids: set[int], on_end: weakref.WeakMethod[Callable[[int], None]]
) -> None:
    while True:
        ended = set()
        for key, _ in selector.select(_LOOK_S if pids else None):
            if key.fd == stop:
                _close(selector)
                return
            selector.unregister(key.fd)
            os.close(key.fd)
            ended.add(key.data)
        ended |= set(filter(is_ending, pids))
        for pid in ended & pids:
            if (call := on_end()) is not None:
                call(pid)
                del call  # it would keep its object alive, and with that this watch
        pids -= ended


def _close(selector: selectors.BaseSelector) -> None:
    for key in list(selector.get_map().values()):
        os.close(key.fd)
    selector.close()
