"""What every result says of how it came about."""

from __future__ import annotations

import shlex
import sys


def command(script: str) -> str:
    """The command line that anybody can repeat: this one, without the place where the results went."""
    kept: list[str] = []
    arguments = iter(sys.argv[1:])
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif not argument.startswith("--out="):
            kept.append(argument)
    return shlex.join(["python", f"benchmarks/{script}", *kept])
