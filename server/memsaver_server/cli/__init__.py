"""The command line, ``memsaver``. Commands that need torch or FastAPI import them when they run."""

from __future__ import annotations

import errno
import os
import sys

from memsaver_server.missing_package import missing_package

#: Errors of a write to a pipe that nobody reads, or to a disk that is full or broken.
_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    try:
        from memsaver_server.cli.commands import app
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("memsaver"):
            raise
        sys.exit(f"memsaver: {missing_package(error, 'cli')}")
    try:
        try:
            app(prog_name="memsaver")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        if sys.stdout is not None:  # what is left in its buffer is written when the interpreter ends: nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        # Nothing is printed for a reader that has enough, such as head.
        sys.exit(1 if error.errno == errno.EPIPE else f"memsaver: cannot write the output: {error.strerror}")
