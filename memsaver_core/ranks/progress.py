"""How far a rank is with its operation, in shared memory: a rank that works answers no request. The record is a page of
anonymous memory. The service maps it through /proc, unless the rank is in another container or on another host."""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import memsaver_core as ms
from memsaver_core.contract.phases import Phase
from memsaver_core.contract.status import Progress
from memsaver_core.ranks.protocol import ProgressLocation

#: The numbers of phases in a record, from 1, in the order in which they run.
_PHASES = [phase.value for phase in Phase]
#: How often a rank updates its record, seconds.
REFRESH_S = 0.1

_NAME = "memsaver-progress"
_BYTES = mmap.PAGESIZE
# The words of a record, eight bytes each. _OPERATIONS counts the operations begun, _BEGUN and _ENDED the messages.
_MARK, _OPERATIONS, _PHASE, _DONE, _TOTAL, _COPIED, _BEGUN, _ENDED = range(8)


class ProgressRecord:
    def __init__(self) -> None:
        fd = os.memfd_create(_NAME)  # open as long as the process, for the service to map
        os.ftruncate(fd, _BYTES)
        self._words = memoryview(mmap.mmap(fd, _BYTES)).cast("Q")
        self._words[_MARK] = secrets.randbits(32)
        self.location = ProgressLocation(os.getpid(), fd, self._words[_MARK])

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Count the message that is carried out inside; it may be a part of another one."""
        self._words[_BEGUN] += 1
        try:
            yield
        finally:
            self._words[_ENDED] += 1

    @contextmanager
    def following(self, log: ms.PhaseLog) -> Iterator[None]:
        """Keep the record up to date while the operation inside runs and appends to ``log``."""
        ended = threading.Event()
        self._words[_DONE] = self._words[_TOTAL] = self._words[_COPIED] = 0
        self._words[_OPERATIONS] += 1

        def follow() -> None:
            while not ended.wait(REFRESH_S):
                self._update(log.now, ms.status().progress)

        self._update(log.now, ms.status().progress)
        thread = threading.Thread(target=follow, name="memsaver-progress", daemon=True)
        with suppress(RuntimeError):  # no more threads: the operation matters more than its progress
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread.ident is not None:
                thread.join()
            self._words[_PHASE] = 0

    def _update(self, phase: str, progress: Progress) -> None:
        self._words[_PHASE] = _PHASES.index(phase) + 1 if phase else 0
        if progress.operation:  # else the last figures stay
            self._words[_DONE] = progress.done_bytes
            self._words[_TOTAL] = progress.total_bytes
            self._words[_COPIED] = progress.copied_bytes


class GroupProgress:
    """The records of all ranks that can be mapped from here; ``locations`` has one for each rank, or None. ``seen`` are
    the ranks whose records are mapped: their process ids are also valid here."""

    def __init__(self, locations: Sequence[ProgressLocation | None]) -> None:
        mapped = {rank: _map(location) for rank, location in enumerate(locations) if location is not None}
        self._records = {rank: words for rank, words in mapped.items() if words is not None}
        self.seen = frozenset(self._records)
        self._before: dict[int, int] = {}
        self._asked: dict[int, int] = {}

    def begin(self) -> None:
        """Count only operations that ranks begin from now on."""
        self._before = {rank: words[_OPERATIONS] for rank, words in self._records.items()}

    def asking(self) -> None:
        """Note that a message is about to be sent to every rank."""
        self._asked = {rank: words[_BEGUN] for rank, words in self._records.items()}

    def late(self) -> dict[int, str]:
        """Return, for each rank that has not carried out the last message, how far it is."""
        late = {}
        for rank, words in self._records.items():
            if words[_BEGUN] == self._asked.get(rank, 0):
                late[rank] = "has not begun it"
            elif words[_ENDED] != words[_BEGUN]:
                late[rank] = "has begun it and has not ended"
        return late

    def figures(self) -> tuple[int, ...]:
        """Return figures of all ranks that change whenever one of them makes progress."""
        return tuple(
            words[at] for words in self._records.values() for at in (_PHASE, _DONE, _TOTAL, _COPIED, _BEGUN, _ENDED)
        )

    @property
    def phase(self) -> str:
        """The phase of the slowest rank; an empty string if no rank reports one."""
        phases = [words[_PHASE] for words in self._begun() if words[_PHASE]]
        return _PHASES[min(phases) - 1] if phases else ""

    def progress(self, operation: str, seconds: float) -> Progress:
        """Sum up the ranks' progress with ``operation``, which has taken ``seconds`` so far."""
        begun = self._begun()
        done, total, copied = (sum(words[at] for words in begun) for at in (_DONE, _TOTAL, _COPIED))
        name = operation if begun else ""
        return Progress(operation=name, done_bytes=done, total_bytes=total, copied_bytes=copied, seconds=seconds)

    def _begun(self) -> list[memoryview]:
        return [words for rank, words in self._records.items() if words[_OPERATIONS] != self._before.get(rank)]


def _map(location: ProgressLocation) -> memoryview | None:
    """Map a record; None if ``location`` leads to no such record here, as for a rank on another host."""
    path = f"/proc/{location.pid}/fd/{location.fd}"
    try:
        if _NAME not in os.readlink(path):
            return None
        with open(path, "rb") as file:
            words = memoryview(mmap.mmap(file.fileno(), _BYTES, prot=mmap.PROT_READ)).cast("Q")
    except (OSError, ValueError):
        return None
    return words if words[_MARK] == location.mark else None
