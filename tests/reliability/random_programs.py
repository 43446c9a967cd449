"""Runs the random programs of ``machine``: ``python -m tests.reliability.random_programs``.

Each run prints its seed, and --seed repeats its programs (threads and other processes may still be scheduled
differently); --replay runs one program from a file, in the form in which a failure prints it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import time
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import seed as seed_of
from hypothesis.stateful import run_state_machine_as_test

from tests.amount import amount
from tests.native.build import faulty_module, small_module
from tests.native.site import sitecustomize
from tests.reliability.figures import FOLDER

CORES = ("small", "shipped")
#: File with the current program, by core, to be read if it crashed the process.
JOURNALS = {core: FOLDER / f"program-on-{core}-core.txt" for core in CORES}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.random_programs")
    # The same programs every time, except in a long search.
    parser.add_argument("--seed", type=int, default=amount(0, long=random.getrandbits(32)))
    parser.add_argument("--core", choices=CORES, default="small", help="blocks of 16 KiB, or those that are shipped")
    parser.add_argument("--store", action="store_true", help="keep backups in a store that two other processes use")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run this program alone")
    arguments = parser.parse_args()
    faulthandler.enable()  # crashes are reported too
    sitecustomize.install(str(small_module() if arguments.core == "small" else faulty_module()))
    from tests.reliability import machine, sharing_machine
    from tests.reliability.known_programs import KNOWN, read

    devices = sharing_machine.three_processes if arguments.store else machine.two_devices
    kind = sharing_machine.SharingMachine if arguments.store else machine.Machine
    with devices():
        if arguments.replay is not None:
            machine.replay(read(arguments.replay.read_text()), kind())
            return
        few = arguments.store or arguments.core == "shipped"
        examples = amount(2 if few else 6, long=300)
        print(f"seed {arguments.seed}", flush=True)
        start = time.monotonic()
        FOLDER.mkdir(parents=True, exist_ok=True)
        kind.journal = JOURNALS[arguments.core]
        for program in KNOWN.values():
            machine.replay(program, kind())
        run_state_machine_as_test(
            seed_of(arguments.seed)(kind),
            settings=settings(
                max_examples=examples,
                stateful_step_count=50,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    figures = {
        "programs": examples + len(KNOWN),
        "steps": sum(machine.steps.values()),
        "seconds": round(time.monotonic() - start, 1),
        "seed": arguments.seed,
        "by_rule": dict(machine.steps),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
