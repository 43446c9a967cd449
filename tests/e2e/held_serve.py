"""Runs a ``memsaver`` command, held at the place where a test kills it: PHASE CALL COMMAND..."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from memsaver_core import PhaseLog, process
from memsaver_server.cli import main


def stand_still(phase: str, call: str) -> None:
    """Hold in the second phase of that name: at its first ``call`` to the driver (and print so), or at its
    beginning."""
    begin = PhaseLog.phase
    turns = itertools.count(1)

    @contextmanager
    def phase_of(log: PhaseLog, name: str) -> Iterator[dict[str, float]]:
        with begin(log, name) as details:
            if name == phase and next(turns) == 2:
                stand(call)
            yield details

    PhaseLog.phase = phase_of  # type: ignore[method-assign]


def stand(call: str) -> None:
    if not call:
        threading.Event().wait()
    driver = process.saver()
    before = driver.counts().get(call, 0)
    driver.delay(call, 3600)

    def say_so() -> None:
        while driver.counts().get(call, 0) == before:
            time.sleep(0.001)
        print("standing still", flush=True)

    threading.Thread(target=say_so, daemon=True).start()


_, phase, call, *arguments = sys.argv
stand_still(phase, call)
sys.argv = ["memsaver", *arguments]
main()
