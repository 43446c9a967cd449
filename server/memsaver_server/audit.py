"""Audit log: one line of JSON per operation, with its caller, outcome and duration.

Written to the logger ``memsaver.audit`` at INFO; an engine's process gets no handler unless it asks for one.
"""

from __future__ import annotations

import json
import logging
import sys

from memsaver_server.operation import Operation

logger = logging.getLogger("memsaver.audit")


def to_stderr() -> None:
    """Write the lines to stderr, for a process whose logging is ours to configure."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def record(operation: Operation, outcome: str) -> None:
    """Write the line of an operation that has ended."""
    if not logger.isEnabledFor(logging.INFO):
        return
    report = operation.report
    line = {
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
    }
    logger.info("%s", json.dumps(line))
