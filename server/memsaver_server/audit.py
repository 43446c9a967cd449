"""One line of JSON for each operation: who asked for what, how it ended, how long it took.

Written to the logger ``memsaver.audit`` at INFO; no handler is installed in an engine's process unless asked for.
"""

from __future__ import annotations

import json
import logging
import sys

from memsaver_server.operation_queue import Operation

logger = logging.getLogger("memsaver.audit")


def to_stderr() -> None:
    """Write the lines to stderr, for a process whose logging is ours to set up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def record(operation: Operation, outcome: str) -> None:
    """Write the line of ``operation``, which is done."""
    if not logger.isEnabledFor(logging.INFO):
        return
    report = operation.report
    line = {
        "event": operation.request.operation,
        "operation_id": operation.id,
        "client": operation.client,
        "tags": None if operation.request.tags is None else list(operation.request.tags),
        "outcome": outcome,
        "error": None if operation.error is None else str(operation.error),
        "created_at": operation.created_at,
        "seconds": round(operation.seconds, 6),
        "released_bytes": report.released_bytes if report else 0,
        "resumed_bytes": report.resumed_bytes if report else 0,
    }
    logger.info("%s", json.dumps(line))
