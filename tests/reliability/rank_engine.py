"""Engines of several processes for tests: the side of the service."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from memsaver_core.ranks.connection import SocketChannel
from memsaver_core.ranks.protocol import Plain
from memsaver_core.rendezvous import Listener
from tests.native import injection
from tests.programs import Child

RANKS = 4
#: The tags of a rank whose content is kept.
KEPT = ("disk", "weights")


class Zygote:
    """The process that forks ranks."""

    def __init__(self) -> None:
        self._child = Child("-m", "tests.reliability.rank_processes", MEMSAVER_DRIVER="host", **injection.in_child())
        self._lock = threading.Lock()

    def fork(self, ranks: int, folder: Path, settings: dict[str, Any]) -> Group:
        listener = Listener(ranks, first=0)
        with self._lock:
            pids = json.loads(self._child.ask(json.dumps([ranks, listener.path, str(folder), settings])))
        return Group(SocketChannel(None, listener.accept(600)), pids)

    def close(self) -> None:
        self._child.end()


class Group:
    """The ranks of one engine."""

    def __init__(self, channel: SocketChannel, pids: Sequence[int]) -> None:
        self.channel = channel
        self.pids = pids
        self._handles = [os.pidfd_open(pid) for pid in pids]

    def arm(self, rank: int, step: str, kind: str, *, after: bool) -> None:
        """Have ``rank`` fail the next ``step``: before or after it took effect."""
        self.tell("Fault", rank=rank, step=step, kind=kind, after=after)

    def look(self) -> list[Plain]:
        """What each rank holds."""
        return self.tell("Look")

    def kill(self) -> None:
        handles, self._handles = self._handles, []
        for handle in handles:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)
        self.channel.close()

    def tell(self, name: str, **fields: Any) -> list[Plain]:
        """Send the ranks a message of the tests."""
        return self.channel.start({"type": name, **fields}).result(600)
