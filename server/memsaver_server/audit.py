"""Audit log: one line of JSON per operation, with its caller, outcome and duration; in a fleet also its engines.

Written to the logger ``memsaver.audit`` at INFO, and to the file that the setting ``audit_file`` names. An engine's
process gets no handler unless it asks for one. Writing blocks no operation; see ``log_output``.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys

from memsaver_core.contract.errors import ConfigurationError
from memsaver_server.log_output import LogOutput, write_all
from memsaver_server.operation.operation import Operation

logger = logging.getLogger("memsaver.audit")

#: Time for the lines to be written when a service closes, seconds.
CLOSE_S = 1.0


def to_stderr() -> None:
    """Write the lines to stderr, for a process whose logging is ours to configure."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


class AuditLog:
    def __init__(self, path: str) -> None:
        """Write to the file ``path`` as well, unless it is empty; raise ConfigurationError if it cannot be opened."""
        self._file: _File | None = None
        if path:
            try:
                self._file = _File(path)
                self._lines = LogOutput("audit_file", self._file.write)
            except OSError as error:
                raise ConfigurationError(
                    f"cannot append to the audit file {path!r}: {error}; correct or unset MEMSAVER_AUDIT_FILE"
                ) from None

    def record(self, operation: Operation, outcome: str) -> None:
        if self._file is None and not logger.isEnabledFor(logging.INFO):
            return
        line = json.dumps(_line(operation, outcome))
        logger.info("%s", line)
        if self._file is not None:
            self._lines.put(line.encode() + b"\n")

    def close(self) -> None:
        """Close the file once it has all lines; leave it open if that takes more than ``CLOSE_S`` seconds."""
        if self._file is not None and self._lines.close(CLOSE_S):
            self._file.close()


class _File:
    """A file that lines are appended to. Opened anew after another program has moved or removed it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        # Without O_NONBLOCK, opening a pipe would wait for its reader. Writes may block again.
        self._file = io.FileIO(self._path, "a", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK, 0o600))
        os.set_blocking(self._file.fileno(), True)

    def write(self, line: bytes) -> None:
        if not self._is_there():
            self.close()
            self._open()
        write_all(self._file.fileno(), line)

    def close(self) -> None:
        """Close the file; a later line opens it again."""
        self._file.close()

    def _is_there(self) -> bool:
        try:
            return not self._file.closed and os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False


def _line(operation: Operation, outcome: str) -> dict[str, object]:
    report = operation.report
    return {
        "event": operation.request.operation,
        "operation_id": operation.id,
        "client": operation.client,
        "tags": list(operation.request.tags) or None,
        "outcome": outcome,
        "error": None if operation.error is None else str(operation.error),
        "created_at": operation.created_at,
        "seconds": round(operation.seconds, 6),
        "released_bytes": report.released_bytes if report else 0,
        "resumed_bytes": report.resumed_bytes if report else 0,
        **operation.audited(),
    }
