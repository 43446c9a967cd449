"""Other processes on the same GPU: programs that a test runs to their end, and co-tenants that take its memory."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from types import TracebackType

#: For `tests.e2e.serving.serving`, which serves on the host driver unless told otherwise.
ON_CUDA = {"MEMSAVER_DRIVER": "cuda"}

TENANT = """
import sys, torch
device = int(sys.argv[1])
held = []
for line in sys.stdin:
    order, *amount = line.split()
    if order == "leave":
        free, _ = torch.cuda.mem_get_info(device)
        held.append(torch.empty(free - int(amount[0]), dtype=torch.uint8, device=device))
    else:
        held.clear()
        torch.cuda.empty_cache()
    print(torch.cuda.mem_get_info(device)[0], flush=True)
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
        check=False,
    )


class CoTenant:
    """A process that takes plain device memory, as any other CUDA program does, and gives it back on demand."""

    def __init__(self, device: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", TENANT, str(device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.let_go()  # it has its context from here on

    def leave(self, nbytes: int) -> int:
        """Take all but ``nbytes`` of what is free. Returns the bytes that are free now."""
        return self._ask(f"leave {nbytes}")

    def let_go(self) -> int:
        """Give everything back. Returns the bytes that are free now."""
        return self._ask("let go")

    def _ask(self, order: str) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(order, file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def __enter__(self) -> CoTenant:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()
