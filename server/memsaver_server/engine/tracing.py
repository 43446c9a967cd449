"""OpenTelemetry spans per operation and phase, if the ``otel`` extra is installed and an SDK is configured.

Made in a separate thread, because an exporter may wait for the network.
"""

from __future__ import annotations

from memsaver_server.log_output import LogOutput
from memsaver_server.operation.operation import Operation

try:
    from opentelemetry import trace
except ImportError:  # the extra is not installed
    trace = None  # type: ignore[assignment]


def record(operation: Operation, outcome: str) -> None:
    """Write the spans of an operation that has ended, with its own start and end times."""
    if trace is not None and operation.started_at is not None and operation.finished_at is not None:
        _output.put((operation, outcome, operation.started_at, operation.finished_at))


def _write(of: tuple[Operation, str, float, float]) -> None:
    operation, outcome, started_at, finished_at = of
    tracer = trace.get_tracer("memsaver")
    name = operation.request.operation
    report = operation.report
    span = tracer.start_span(
        f"memsaver.{name}",
        start_time=_nanoseconds(started_at),
        attributes={
            "memsaver.operation_id": operation.id,
            "memsaver.tags": list(operation.request.tags),
            "memsaver.outcome": outcome,
            "memsaver.released_bytes": report.released_bytes if report else 0,
            "memsaver.resumed_bytes": report.resumed_bytes if report else 0,
        },
    )
    inside = trace.set_span_in_context(span)
    for phase, began in zip(operation.phases, operation.phase_starts, strict=False):
        part = tracer.start_span(
            f"memsaver.{name}.{phase.name}",
            context=inside,
            start_time=_nanoseconds(began),
            attributes={
                **{f"memsaver.{key}": value for key, value in phase.details.items()},
                "memsaver.delta_bytes": sum(device.delta_bytes for device in phase.devices),
            },
        )
        part.end(_nanoseconds(began + phase.seconds))
    if operation.error is not None:
        span.set_status(trace.StatusCode.ERROR, str(operation.error))
    span.end(_nanoseconds(finished_at))


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


_output = LogOutput("spans", _write)
