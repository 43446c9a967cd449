"""How far a rank is, where the service can see it: while a worker works, it answers nobody.

The board is a page of memory without a name, which the service reads by way of /proc. From another host it cannot; what
it knows of such a rank meanwhile is that it works.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import memsaver_core as ms
from memsaver_core.reports import Progress

#: The phases of a rank, in the order in which they run.
PHASES = (
    "synchronize",
    "pause",
    "trim_workspaces",
    "empty_cache",
    "trim_graphs",
    "trim_pinned",
    "ipc_collect",
    "settle",
    "hibernate",
    "wake",
    "restore",
)
#: How often a rank writes down how far it is, seconds.
REFRESH_S = 0.1

_NAME = "memsaver-board"
_BYTES = mmap.PAGESIZE
# The words of a board, each of eight bytes.
_MARK, _TURN, _PHASE, _DONE, _TOTAL, _COPIED = range(6)


class Board:
    """A rank's own."""

    def __init__(self) -> None:
        self._file = os.memfd_create(_NAME)
        os.ftruncate(self._file, _BYTES)
        self._words = memoryview(mmap.mmap(self._file, _BYTES)).cast("Q")
        self._words[_MARK] = secrets.randbits(32)

    @property
    def place(self) -> dict[str, int]:
        """Where the service finds it."""
        return {"pid": os.getpid(), "file": self._file, "mark": self._words[_MARK]}

    @contextmanager
    def showing(self, log: ms.PhaseLog) -> Iterator[None]:
        """Show how far the operation is that runs inside, and writes ``log``."""
        ended = threading.Event()
        self._words[_DONE] = self._words[_TOTAL] = self._words[_COPIED] = 0
        self._words[_TURN] += 1

        def show() -> None:
            while not ended.wait(REFRESH_S):
                self._show(log.now, ms.status().progress)

        self._show(log.now, ms.status().progress)
        thread = threading.Thread(target=show, name="memsaver-board", daemon=True)
        with suppress(RuntimeError):  # no more threads: the operation matters more than what is shown of it
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread.ident is not None:
                thread.join()
            self._words[_PHASE] = 0

    def _show(self, phase: str, progress: Progress) -> None:
        self._words[_PHASE] = PHASES.index(phase) + 1 if phase in PHASES else 0
        if progress.operation:  # else the last figures stand
            self._words[_DONE] = progress.done_bytes
            self._words[_TOTAL] = progress.total_bytes
            self._words[_COPIED] = progress.copied_bytes


class Boards:
    """Those of all ranks, as far as they can be seen from here."""

    def __init__(self, places: list[Mapping[str, int]]) -> None:
        self._boards = [words for words in map(_words_at, places) if words is not None]
        self._before: list[int] = []

    def begin(self) -> None:
        """From now on, what counts is what ranks begin."""
        self._before = [words[_TURN] for words in self._boards]

    @property
    def phase(self) -> str:
        """What the slowest rank does; an empty string where nobody says."""
        at = [words[_PHASE] for words in self._begun() if words[_PHASE]]
        return PHASES[min(at) - 1] if at else ""

    def progress(self, operation: str, seconds: float) -> Progress:
        """How far the ranks are with ``operation``, which they have worked on for so long, in all."""
        begun = self._begun()
        done, total, copied = (sum(words[at] for words in begun) for at in (_DONE, _TOTAL, _COPIED))
        return Progress(operation if begun else "", done, total, copied, seconds)

    def _begun(self) -> list[memoryview]:
        return [words for words, before in zip(self._boards, self._before, strict=True) if words[_TURN] != before]


def _words_at(place: Mapping[str, int]) -> memoryview | None:
    """The words of a board, or None where another host's or container's numbers mean something else here."""
    path = f"/proc/{place['pid']}/fd/{place['file']}"
    try:
        if _NAME not in os.readlink(path):
            return None
        with open(path, "rb") as file:
            words = memoryview(mmap.mmap(file.fileno(), _BYTES, prot=mmap.PROT_READ)).cast("Q")
    except (OSError, ValueError):
        return None
    return words if words[_MARK] == place["mark"] else None
