"""The Prometheus metrics of an engine."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from memsaver_server.engine.device_monitor import DeviceMonitor
from memsaver_server.engine.kv_cache import ElasticCache
from memsaver_server.engine.lifecycle import Lifecycle
from memsaver_server.metrics import CallerFigures, Registry, caller_metrics, counters, gauges
from memsaver_server.operation.operation import Operation

#: Upper bounds of the phase histogram, seconds: from an empty tag to a terabyte over PCIe.
PHASE_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
_BOUNDS = (*map(str, PHASE_BUCKETS_S), "+Inf")
STATES = ("resident", "releasing", "released", "resuming", "failed")


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(PHASE_BUCKETS_S) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(PHASE_BUCKETS_S, value)] += 1
        self.total += value


class EngineMetrics:
    """Counts operations as they end; at a scrape adds the state of the core and the last device sample."""

    def __init__(
        self, monitor: DeviceMonitor, lifecycle: Lifecycle, cache: ElasticCache | None, callers: CallerFigures
    ) -> None:
        self._monitor = monitor
        self._lifecycle = lifecycle
        self._cache = cache
        self._lock = threading.Lock()
        self._operations: Counter[tuple[str, str]] = Counter()
        self._phases: dict[tuple[str, str], _Histogram] = {}
        self._copied: Counter[tuple[str, str]] = Counter()
        self._moved: Counter[str] = Counter({"release": 0, "resume": 0})
        self._counters = Registry(self._collect_counters)
        self._gauges = Registry(lambda: chain(self._collect_gauges(), caller_metrics(callers)))
        # Cached until an operation changes them: rendering takes milliseconds, which would delay other requests.
        self._counters_text: bytes | None = None

    def count(self, operation: str, outcome: str) -> None:
        with self._lock:
            self._counters_text = None
            self._operations[operation, outcome] += 1

    def record(self, operation: Operation, outcome: str) -> None:
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
                    self._copied["to_host", "true"] += tag.unchanged_bytes + tag.shared_bytes
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
        help_text = "Operations, by how they ended."
        yield counters("memsaver_operations", help_text, ["operation", "outcome"], self._operations)
        help_text = "How long each phase of an operation took."
        phases = HistogramMetricFamily("memsaver_phase_seconds", help_text, labels=["operation", "phase"])
        for labels, histogram in sorted(self._phases.items()):
            buckets = zip(_BOUNDS, map(float, accumulate(histogram.counts)), strict=True)
            phases.add_metric(list(labels), list(buckets), sum_value=histogram.total)
        yield phases
        help_text = "Content copied to or from backups; skipped: not copied, because the backup is current."
        yield counters("memsaver_copy_bytes", help_text, ["direction", "skipped"], self._copied)
        for name, text in (("release", "released to"), ("resume", "resumed from")):
            help_text = f"Device memory {text} the driver so far."
            yield CounterMetricFamily(f"memsaver_{name}d_bytes", help_text, value=self._moved[name])

    def _collect_gauges(self) -> Iterator[Metric]:
        now = self._lifecycle.snapshot()
        backup = now.status.host_backup
        devices = self._monitor.latest().devices
        running = now.running
        stall = running.stall() if running else None
        tags = {
            (tag.tag, state): getattr(tag, f"{state}_bytes")
            for tag in now.status.tags
            for state in ("resident", "released", "retained")
        }
        yield gauges("memsaver_tag_bytes", "Memory under each tag, by its state.", ["tag", "state"], tags)
        kept = {
            (tag.tag, form): size
            for tag in now.status.tags
            for form, size in (("content", tag.backed_up_bytes), ("kept", tag.kept_bytes))
        }
        help_text = "Content with a backup under each tag, and what these backups take: less if they are packed."
        yield gauges("memsaver_tag_backup_bytes", help_text, ["tag", "form"], kept)
        lost = {tag.tag: float(tag.tag in now.unwritten) for tag in now.status.tags}
        help_text = "1 from a release that discards the content of the tag until the content is written again."
        yield gauges("memsaver_content_lost", help_text, ["tag"], lost)
        stays = {(f"{each.rank}", each.name): each.persistent_bytes for each in now.status.communicators}
        help_text = "Device memory of an NCCL communicator that a suspend does not free; the rest is under its tag."
        yield gauges("memsaver_communicator_persistent_bytes", help_text, ["rank", "communicator"], stays)
        backups = {"memory": backup.bytes - backup.file_bytes, "file": backup.file_bytes}
        backups |= {"capacity": backup.capacity_bytes, "limit": backup.limit_bytes}
        help_text = "What backups take in host memory and in files, pinned memory allocated for them, and its limit."
        yield gauges("memsaver_backup_bytes", help_text, ["kind"], backups)
        if (store := backup.shared_store) is not None:
            help_text = "The store of host memory that several processes use: blocks that this one holds, its share of "
            help_text += "them, blocks in use by any, and the store's memory and its limit."
            kinds = ("held", "share", "used", "total", "limit")
            sizes = {kind: getattr(store, f"{kind}_bytes") for kind in kinds}
            yield gauges("memsaver_shared_store_bytes", help_text, ["kind"], sizes)
            help_text = "Processes that use the same store of host memory, this one included."
            yield gauges("memsaver_shared_store_processes", help_text, ["store"], {store.name: store.processes})
        if self._cache is not None and (cache := self._cache.latest(devices)) is not None:
            sizes = {kind: getattr(cache, f"{kind}_bytes") for kind in ("used", "smallest", "largest", "full")}
            help_text = (
                "The KV cache: its size, used by requests, smallest and largest possible now, full at the start."
            )
            yield gauges("memsaver_kv_cache_bytes", help_text, ["kind"], {"size": cache.bytes, **sizes})
        for kind, text in (("used", "Device memory in use by all processes."), ("total", "Memory of the device.")):
            values = {str(device.index): getattr(device, f"{kind}_bytes") for device in devices}
            yield gauges(f"memsaver_device_{kind}_bytes", text, ["device"], values)
        alive = {str(rank.rank): float(rank.alive) for rank in now.status.ranks if rank.alive is not None}
        yield gauges("memsaver_rank_alive", "1 while the rank's process runs.", ["rank"], alive)
        states = {name: float(name == now.state) for name in STATES}
        yield gauges("memsaver_state", "1 for the state that the process is in.", ["state"], states)
        is_open = float(not now.closed_reason)
        yield GaugeMetricFamily("memsaver_admission_open", "1 while the engine accepts requests.", value=is_open)
        stalls = {(running.request.operation, stall.phase): stall.seconds} if running and stall else {}
        leases = {running.request.operation: running.lease_left_s()} if running and running.status == "prepared" else {}
        help_text = "How long an operation still waits for its commit; only while one is prepared."
        yield gauges("memsaver_lease_seconds", help_text, ["operation"], leases)
        help_text = "How long the operation in progress has made no progress; only while it is stalled."
        yield gauges("memsaver_stalled_seconds", help_text, ["operation", "phase"], stalls)
