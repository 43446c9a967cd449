"""Runs ``memsaver serve`` in forks of one program, one after another, each held at the place where a test kills it.

Forking saves most of the start time, which is importing torch and transformers. Each line of input is a JSON request:
the command's ``arguments``, the ``environment`` to add, and the ``phase`` and driver ``call`` in which the fork is
held. The output is the fork's process id, then what the fork prints, then ``exit`` and its exit code.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import transformers.models.qwen2.modeling_qwen2  # noqa: F401

import memsaver_server.attachment
import memsaver_server.reference.engine  # noqa: F401
from memsaver_core import PhaseLog, process
from memsaver_server.cli import commands, main  # noqa: F401


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


gc.collect()
gc.freeze()  # the collector does not touch loaded objects, so forks do not copy their pages
for line in sys.stdin:
    request = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
    print("exit", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

os.environ.update(request["environment"])
stand_still(request["phase"], request["call"])
sys.argv = ["memsaver", *request["arguments"]]
main()
