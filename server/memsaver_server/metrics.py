"""Prometheus metrics, in a registry of their own.

The values are not kept in the client library's counters: with PROMETHEUS_MULTIPROC_DIR set, those would write into the
engine's files.
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

from memsaver_server.device_monitor import DeviceMonitor
from memsaver_server.lifecycle import Lifecycle
from memsaver_server.operation import Operation

#: Upper bounds of the phase histogram, seconds: from an empty tag to a terabyte over PCIe.
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


class _Collector(Collector):
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        return self._collect()


def _registry_of(collect: Callable[[], Iterator[Metric]]) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Collector(collect))
    return registry


class Metrics:
    """Counts operations as they end; at a scrape adds the state of the core and the last device sample."""

    def __init__(self, monitor: DeviceMonitor, lifecycle: Lifecycle) -> None:
        self._monitor = monitor
        self._lifecycle = lifecycle
        self._lock = threading.Lock()
        self._operations: Counter[tuple[str, str]] = Counter()
        self._phases: dict[tuple[str, str], _Histogram] = {}
        self._copied: Counter[tuple[str, str]] = Counter()
        self._moved: Counter[str] = Counter({"release": 0, "resume": 0})
        self._counters = _registry_of(self._collect_counters)
        self._gauges = _registry_of(self._collect_gauges)
        # Cached until an operation changes them: rendering takes milliseconds, which would delay other requests.
        self._counters_text: bytes | None = None

    def count(self, operation: str, outcome: str) -> None:
        """Count a call of ``operation`` that ended with ``outcome``."""
        with self._lock:
            self._counters_text = None
            self._operations[operation, outcome] += 1

    def record(self, operation: Operation, outcome: str) -> None:
        """Count an operation that has ended, with its phases and bytes."""
        name = operation.request.operation
        with self._lock:
            self._counters_text = None
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
        counters = self._counters_text
        if counters is None:
            with self._lock:
                counters = self._counters_text = generate_latest(self._counters)
        return counters + generate_latest(self._gauges)

    def _collect_counters(self) -> Iterator[Metric]:
        """The caller holds the lock."""
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
            "Content copied to or from backups; skipped: not copied, because the backup is current.",
            labels=["direction", "skipped"],
        )
        for labels, count in sorted(self._copied.items()):
            copied.add_metric(list(labels), count)
        released = CounterMetricFamily("memsaver_released_bytes", "Device memory released to the driver so far.")
        released.add_metric([], self._moved["release"])
        resumed = CounterMetricFamily("memsaver_resumed_bytes", "Device memory resumed from the driver so far.")
        resumed.add_metric([], self._moved["resume"])
        yield from (operations, phases, copied, released, resumed)

    def _collect_gauges(self) -> Iterator[Metric]:
        now = self._lifecycle.snapshot()
        status = now.status
        tags = GaugeMetricFamily("memsaver_tag_bytes", "Memory under each tag, by its state.", labels=["tag", "state"])
        for tag in status.tags:
            tags.add_metric([tag.tag, "resident"], tag.resident_bytes)
            tags.add_metric([tag.tag, "released"], tag.released_bytes)
            tags.add_metric([tag.tag, "retained"], tag.retained_bytes)
        backup = status.host_backup
        backups = GaugeMetricFamily(
            "memsaver_backup_bytes",
            "Backups in host memory and in files, pinned memory allocated for them, and its limit.",
            labels=["kind"],
        )
        backups.add_metric(["memory"], backup.bytes - backup.file_bytes)
        backups.add_metric(["file"], backup.file_bytes)
        backups.add_metric(["capacity"], backup.capacity_bytes)
        backups.add_metric(["limit"], backup.limit_bytes)
        used = GaugeMetricFamily(
            "memsaver_device_used_bytes", "Device memory in use by all processes.", labels=["device"]
        )
        total = GaugeMetricFamily("memsaver_device_total_bytes", "Memory of the device.", labels=["device"])
        for device in self._monitor.latest().devices:
            used.add_metric([str(device.index)], device.used_bytes)
            total.add_metric([str(device.index)], device.total_bytes)
        state = GaugeMetricFamily("memsaver_state", "1 for the state that the process is in.", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(name == now.state))
        admission = GaugeMetricFamily("memsaver_admission_open", "1 while the engine takes requests.")
        admission.add_metric([], float(not now.closed_reason))
        stalled = GaugeMetricFamily(
            "memsaver_stalled_seconds",
            "How long the operation in progress has made no progress; only while it is stalled.",
            labels=["operation", "phase"],
        )
        if now.running is not None and (stall := now.running.stall()) is not None:
            stalled.add_metric([now.running.request.operation, stall.phase], stall.seconds)
        yield from (tags, backups, used, total, state, admission, stalled)
