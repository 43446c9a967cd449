"""Prometheus metrics, in a registry of their own.

The values are kept here and not in the client library's own counters: those change their storage when an engine sets
PROMETHEUS_MULTIPROC_DIR, and would then write into the engine's files.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import memsaver_core as ms
from memsaver_server.occupation import Occupation
from memsaver_server.operations import Operation
from memsaver_server.readings import DeviceReadings

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
        return [(bound, float(sum(self.counts[: i + 1]))) for i, bound in enumerate(bounds)]


class Metrics(Collector):
    """What operations have done so far, and at each scrape what the core and the last device reading say."""

    def __init__(self, readings: DeviceReadings) -> None:
        self._readings = readings
        self._lock = threading.Lock()
        self._operations: Counter[tuple[str, str]] = Counter()
        self._phases: dict[tuple[str, str], _Histogram] = {}
        self._copied: Counter[tuple[str, str]] = Counter()
        self._moved: Counter[str] = Counter({"release": 0, "resume": 0})
        self._occupation: Occupation | None = None
        self._registry = CollectorRegistry()

    def watch(self, occupation: Occupation) -> None:
        """Report the state of ``occupation`` from now on."""
        self._occupation = occupation
        self._registry.register(self)

    def count(self, operation: str, outcome: str) -> None:
        """Count a call of ``operation`` that ended as ``outcome``."""
        with self._lock:
            self._operations[operation, outcome] += 1

    def record(self, operation: Operation, outcome: str) -> None:
        """Count an operation that is done, with its phases and bytes."""
        name = operation.request.operation
        with self._lock:
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
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._what_was_done()
        yield from self._what_is_held()

    def _what_was_done(self) -> Iterator[Metric]:
        with self._lock:
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
        status = ms.status()
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
        yield from (tags, backups, used, total)
        if self._occupation is not None:
            now = self._occupation.state
            state = GaugeMetricFamily("memsaver_state", "1 for the state that the process is in.", labels=["state"])
            for name in STATES:
                state.add_metric([name], float(name == now))
            admission = GaugeMetricFamily("memsaver_admission_open", "1 while the engine takes requests.")
            admission.add_metric([], float(not self._occupation.closed_because()))
            yield from (state, admission)
