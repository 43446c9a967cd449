"""Other processes of the store in which random programs keep their backups: ``python -m tests.reliability.neighbours``.

Each is forked by a process of its own, which forks another one if it is killed, and answers each line by a line.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback

import numpy as np

from memsaver_core import _native
from memsaver_core.contract.errors import OutOfHostMemoryError
from tests.native.injection import SITE
from tests.native.site import sitecustomize
from tests.programs import Child
from tests.unit.saver_memory import PAGE, view

PAGES = 48

#: Content that every process may write, by page: bfloat16 values of four exponents.
COMMON = np.frombuffer(np.random.default_rng(1).bytes(PAGES * PAGE), np.uint64).reshape(PAGES, -1)
COMMON = COMMON & np.uint64(0x81FF81FF81FF81FF) | np.uint64(0x3C003C003C003C00)

#: What one can be told: to write what is common to all, or from a page on what no other process has.
ORDERS = ("write 48", "write 48", "write 24", "write 5", "release", "release", "resume", "forget")


class Neighbour(Child):
    def __init__(self, store: str, limit: int) -> None:
        environment = {sitecustomize.VARIABLE: _native.__file__, "PYTHONPATH": str(SITE)}
        super().__init__("-m", "tests.reliability.neighbours", store, str(limit), **environment)
        self.pid = int(self.read_line())

    def answer(self) -> str:
        """What it says to the last order: ok, or that host memory was short. Anything else ends the process."""
        said = self.read_line()
        assert said in ("ok", "no room"), f"a process of the store is gone, or said {said!r}"
        return said

    def obey(self, order: str) -> str:
        self.say(order)
        return self.answer()

    def die(self) -> None:
        """Kill it, whatever it does. Another one comes."""
        os.kill(self.pid, signal.SIGKILL)
        lines = [self.read_line()]
        while lines[-1] in ("ok", "no room"):  # it may have been done
            lines.append(self.read_line())
        self.pid = int(lines[-1])


class Memory:
    """Of a neighbour: kept in the store while it is released."""

    def __init__(self, store: str, limit: int) -> None:
        self._saver = _native.Saver(
            driver="host", host_capacity=1 << 20, host_backup_limit=limit, verify="full", shared_backups=store
        )
        self._address = self._saver.allocate(0, "weights", "host", PAGES * PAGE)
        self._released = False
        self._written = np.zeros_like(COMMON)
        self.write(PAGES)

    def write(self, common: int) -> None:
        self.resume()
        self._written = COMMON.copy()
        self._written[common:] = np.frombuffer(os.urandom((PAGES - common) * PAGE), np.uint64).reshape(-1, PAGE // 8)
        self._pages()[:] = self._written

    def release(self) -> None:
        self._saver.release([], [], {})
        self._released = True

    def resume(self) -> None:
        if self._released:
            self._saver.resume([])
            self._released = False
            assert np.array_equal(self._pages(), self._written), "content differs after a resume"

    def forget(self) -> None:
        self.resume()
        self._saver.drop_backups([])

    def _pages(self) -> np.ndarray:
        return view(self._address, PAGES * PAGE).view(np.uint64).reshape(PAGES, -1)


def say(answer: object) -> None:
    """At once: one that is killed leaves a whole line or none."""
    os.write(1, f"{answer}\n".encode())


def live(store: str, limit: int) -> None:
    """One neighbour, to the end of its input."""
    memory = Memory(store, limit)
    say(os.getpid())
    while order := sys.stdin.readline():
        what, *arguments = order.split()
        said = "ok"
        try:
            getattr(memory, what)(*map(int, arguments))
        except OutOfHostMemoryError:
            said = "no room"
        say(said)
    del memory
    gc.collect()


def main() -> None:
    store, limit = sys.argv[1], int(sys.argv[2])
    while True:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                live(store, limit)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code != -signal.SIGKILL:
            sys.exit(code)


if __name__ == "__main__":
    main()
