"""Prometheus metrics, in a registry of their own.

The values are kept here and not in the client library's own counters: those change their storage when an engine sets
PROMETHEUS_MULTIPROC_DIR, and would then write into the engine's files.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from memsaver_server.device_monitor import DeviceReadings
from memsaver_server.lifecycle import Occupation
from memsaver_server.operation_queue import Operation

#: Upper bounds of the histogram of phases, seconds: from an empty tag to a terabyte over PCIe.
PHASE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
STATES = ("resident", "releasing", "released", "resuming", "failed")


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(PHASE_BUCKETS_S) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[next((i for i, bound in enumerate(PHASE_BUCKETS_S) if value <= bound), len(PHASE_BUCKETS_S))] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        bounds = [str(bound) for bound in PHASE_BUCKETS_S] + ["+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


class _Source(Collector):
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()


def _registry_of(collect: Callable[[], Iterator[Metric]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Source(collect))
    return registry


class Metrics:
    """What operations have done so far, and at each scrape what the core and the last device reading say."""

    def __init__(self, readings: DeviceReadings) -> None:
        self._readings = readings
        self._lock = threading.Lock()
        self._operations: Counter[tuple[str, str]] = Counter()
        self._phases: dict[tuple[str, str], _Histogram] = {}
        self._copied: Counter[tuple[str, str]] = Counter()
        self._moved: Counter[str] = Counter({"release": 0, "resume": 0})
        self._occupation: Occupation | None = None
        self._done = _registry_of(self._what_was_done)
        self._held = _registry_of(self._what_is_held)
        # Rendering what was done takes milliseconds, in which nobody else is answered; it changes with an operation.
        self._done_text: bytes | None = None

    def watch(self, occupation: Occupation) -> None:
        """Report the state of ``occupation`` from now on."""
        self._occupation = occupation

    def count(self, operation: str, outcome: str) -> None:
        """Count a call of ``operation`` that ended as ``outcome``."""
        with self._lock:
            self._done_text = None
            self._operations[operation, outcome] += 1

    def record(self, operation: Operation, outcome: str) -> None:
        """Count an operation that is done, with its phases and bytes."""
        name = operation.request.operation
        with self._lock:
            self._done_text = None
            self._operations[name, outcome] += 1
            for phase in operation.phases:
                self._phases.setdefault((name, phase.name), _Histogram()).observe(phase.seconds)
            if operation.report is not None:
                self._moved["release"] += operation.report.released_bytes
                self._moved["resume"] += operation.report.resumed_bytes
                for tag in operation.report.tags:
                    self._copied["to_host", "false"] += tag.backed_up_bytes
                    self._copied["to_host", "true"] += tag.unchanged_bytes
                    self._copied["to_device", "false"] += tag.restored_bytes

    def scrape(self) -> bytes:
        """Return the exposition text. Waits for no operation and calls no driver."""
        done = self._done_text
        if done is None:
            with self._lock:
                done = self._done_text = generate_latest(self._done)
        return done + generate_latest(self._held)

    def _what_was_done(self) -> Iterator[Metric]:
        """Needs the lock."""
        operations = CounterMetricFamily(
            "memsaver_operations",
            "Calls of release and resume, by how they ended.",
            labels=["operation", "outcome"],
        )
        for labels, count in sorted(self._operations.items()):
            operations.add_metric(list(labels), count)
        phases = HistogramMetricFamily(
            "memsaver_phase_seconds", "How long each phase of an operation took.", labels=["operation", "phase"]
        )
        for labels, histogram in sorted(self._phases.items()):
            phases.add_metric(list(labels), histogram.buckets(), sum_value=histogram.total)
        copied = CounterMetricFamily(
            "memsaver_copy_bytes",
            "Content copied to or from backups; skipped: not copied, because the backup was still equal.",
            labels=["direction", "skipped"],
        )
        for labels, count in sorted(self._copied.items()):
            copied.add_metric(list(labels), count)
        released = CounterMetricFamily("memsaver_released_bytes", "Device memory given back to the driver so far.")
        released.add_metric([], self._moved["release"])
        resumed = CounterMetricFamily("memsaver_resumed_bytes", "Device memory taken back from the driver so far.")
        resumed.add_metric([], self._moved["resume"])
        yield from (operations, phases, copied, released, resumed)

    def _what_is_held(self) -> Iterator[Metric]:
        assert self._occupation is not None  # nobody scrapes before
        now = self._occupation.now()
        status = now.status
        tags = GaugeMetricFamily("memsaver_tag_bytes", "Memory under each tag, by its state.", labels=["tag", "state"])
        for tag in status.tags:
            tags.add_metric([tag.tag, "resident"], tag.resident_bytes)
            tags.add_metric([tag.tag, "released"], tag.released_bytes)
            tags.add_metric([tag.tag, "retained"], tag.retained_bytes)
        backup = status.host_backup
        backups = GaugeMetricFamily(
            "memsaver_backup_bytes",
            "Content kept in host memory and in files, the pinned memory that is ready for it, and its bound.",
            labels=["kind"],
        )
        backups.add_metric(["memory"], backup.bytes - backup.file_bytes)
        backups.add_metric(["file"], backup.file_bytes)
        backups.add_metric(["capacity"], backup.capacity_bytes)
        backups.add_metric(["limit"], backup.limit_bytes)
        used = GaugeMetricFamily("memsaver_device_used_bytes", "Device memory in use by everybody.", labels=["device"])
        total = GaugeMetricFamily("memsaver_device_total_bytes", "Memory of the device.", labels=["device"])
        for device in self._readings.latest().devices:
            used.add_metric([str(device.index)], device.used_bytes)
            total.add_metric([str(device.index)], device.total_bytes)
        state = GaugeMetricFamily("memsaver_state", "1 for the state that the process is in.", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(name == now.state))
        admission = GaugeMetricFamily("memsaver_admission_open", "1 while the engine takes requests.")
        admission.add_metric([], float(not now.closed_because))
        stalled = GaugeMetricFamily(
            "memsaver_stalled_seconds",
            "How long the operation in work has made no progress; only while that is longer than it may.",
            labels=["operation", "phase"],
        )
        if now.running is not None and (stall := now.running.stall()) is not None:
            stalled.add_metric([now.running.request.operation, stall.phase], stall.seconds)
        yield from (tags, backups, used, total, state, admission, stalled)
