"""Fault injection: a native module of the tests' own in the place of ``memsaver_core._native``.

Its savers have the functions of :class:`Faulty` besides the product's, and the hibernation helper next to it has steps
that fail on request. Neither is part of the product: no wheel contains them.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from tests.native import build
from tests.native.site import sitecustomize

#: The folder that puts the module into the place of the product's in a child process.
SITE = Path(sitecustomize.__file__).parent


class Faulty(Protocol):
    """What the module adds to ``Saver``; see faults/faulty_driver.hpp and audit.hpp."""

    def fail(self, call: str, nth: int = 1, kind: str = "invalid_value", times: int = 1) -> None: ...
    def delay(self, call: str, seconds: float) -> None: ...
    def heal(self) -> None: ...
    def counts(self) -> dict[str, int]: ...
    def audit(self, others: Mapping[int, int] = ...) -> list[str]: ...
    def left_mapped(self) -> list[tuple[int, int]]: ...


def install() -> None:
    """Use the module in this process, unless it was started so. Call it before anything imports ``memsaver_core``."""
    if not os.environ.pop(sitecustomize.VARIABLE, ""):  # programs that tests start use the product's
        sitecustomize.install(str(build.faulty_module()))


def in_child(inherited: Mapping[str, str] = os.environ, *, small: bool = False) -> dict[str, str]:
    """Variables with which a Python child process uses the module; to be added to its environment ``inherited``.

    Args:
        small: the module with small units, see ``build.small_module``.
    """
    paths = [str(SITE), *filter(None, [inherited.get("PYTHONPATH")])]
    module = build.small_module() if small else build.faulty_module()
    return {sitecustomize.VARIABLE: str(module), "PYTHONPATH": os.pathsep.join(paths)}


def fail_step(step: str, *, times: int = 1, lost: bool = False, after: bool = False) -> None:
    """Make the next ``times`` of a hibernation step of this process fail: lock, checkpoint, restore or unlock.

    Args:
        lost: from then on the process cannot be restored, either.
        after: the step is taken before it fails.
    """
    from memsaver_core import _native

    plan = Path(_native.__file__).with_name(f"step-faults.{os.getpid()}")
    planned = dict(line.split(maxsplit=1) for line in plan.read_text().splitlines()) if plan.exists() else {}
    planned[step] = f"{times} {'lost' if lost else 'after' if after else 'error'}"
    plan.write_text("".join(f"{name} {how}\n" for name, how in planned.items()))
    atexit.register(plan.unlink, missing_ok=True)
