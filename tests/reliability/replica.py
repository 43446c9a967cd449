"""A process that keeps its content in a shared store, on the core with small units: ``replica STORE SETTINGS``.

Each line of JSON on its standard input is what it does, ``[operation, argument]``, and is answered by a line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from memsaver_core import _native
from memsaver_core.contract.errors import OutOfHostMemoryError
from tests.unit.saver_memory import content, fill, view

#: kSizeUnit of tests/native/small_units.cpp; the product's units are of 1 MiB.
UNIT = 512
WEIGHTS = 160 * UNIT  # several blocks, and more than one slab


def main() -> None:
    store, settings = sys.argv[1], json.loads(sys.argv[2])
    saver: Any = _native.Saver(driver="host", host_capacity=1 << 20, verify="full", shared_backups=store, **settings)
    address = saver.allocate(0, "weights", "host", WEIGHTS)
    written = b""
    for line in sys.stdin:
        operation, argument = json.loads(line)
        answer: Any = None
        try:
            if operation == "write":
                written = fill(address, WEIGHTS, argument)
            elif operation == "write weights":
                exponents = np.random.default_rng(argument).integers(0x3C00, 0x3D00, WEIGHTS // 2, dtype=np.uint16)
                view(address, WEIGHTS)[:] = exponents.view(np.uint8)
                written = exponents.tobytes()
            elif operation == "fail":
                saver.fail(argument, times=1_000_000)
            elif operation == "count":
                answer = saver.counts().get(argument, 0)
            elif operation == "release":
                answer = saver.release([], [], {})["tags"][0]
            elif operation == "resume":
                saver.resume([])
                answer = content(address, WEIGHTS) == written
            elif operation == "hold":
                saver.delay("copy_to_host", 3600)
            elif operation == "status":
                answer = saver.status()["host_backup"]["shared_store"]
            elif operation == "audit":
                answer = saver.audit()
        except OutOfHostMemoryError as error:
            answer = str(error)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
