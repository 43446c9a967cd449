"""Prometheus metrics of a fleet. They need no call to an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from memsaver_server.fleet.observer import Observer
from memsaver_server.fleet.turns.turns import Turns
from memsaver_server.metrics import CallerFigures, Registry, caller_metrics, counters, gauges

STATES = ("resident", "releasing", "released", "resuming", "prepared", "mixed", "failed", "unknown")


class FleetMetrics:
    """The figures of a scrape: what was last seen, and what was counted.

    Attributes:
        operations: how many have ended, by verb and outcome.
        reconciled: likewise those by which the coordinator brought an engine to what is wanted.
    """

    def __init__(self, observer: Observer, turns: Turns, callers: CallerFigures) -> None:
        self._observer = observer
        self._turns = turns
        self._callers = callers
        self.operations: Counter[tuple[str, str]] = Counter()
        self.reconciled: Counter[tuple[str, str]] = Counter()
        self._registry = Registry(self._collect)

    def scrape(self) -> bytes:
        return generate_latest(self._registry)

    def _collect(self) -> Iterator[Metric]:
        yield from self._engines()
        by_outcome = ["operation", "outcome"]
        help_text = "Operations of the fleet, by how they ended."
        yield counters("memsaver_fleet_operations", help_text, by_outcome, self.operations)
        help_text = "Operations on engines that were not as wanted, by how they ended."
        yield counters("memsaver_fleet_reconciliations", help_text, by_outcome, self.reconciled)
        yield counters("memsaver_fleet_wakes", "Engines woken for a request.", ["model"], self._turns.wakes)
        waiting = dict(sorted(self._turns.waiting().items()))
        yield gauges("memsaver_fleet_waiting_requests", "Requests that wait for their turn.", ["model"], waiting)
        in_flight = dict(sorted(self._turns.in_flight().items()))
        help_text = "Requests in flight through the coordinator."
        yield gauges("memsaver_fleet_requests_in_flight", help_text, ["engine"], in_flight)
        yield from caller_metrics(self._callers)

    def _engines(self) -> Iterator[Metric]:
        engines = self._observer.status.engines
        help_text = "1 while the members can be read and asked."
        yield GaugeMetricFamily("memsaver_fleet_readable", help_text, value=float(not self._observer.trouble))
        up = {engine.name: float(engine.alive) for engine in engines}
        yield gauges("memsaver_fleet_engine_up", "1 while the engine answers.", ["engine"], up)
        states = Counter(engine.state for engine in engines)
        by_state = {state: float(states[state]) for state in STATES}
        yield gauges("memsaver_fleet_engines", "Engines, by state.", ["state"], by_state)
        sizes = {
            (engine.name, state): float(size)
            for engine in engines
            if engine.occupation is not None
            for state, size in (("resident", engine.resident_bytes), ("released", engine.released_bytes))
        }
        yield gauges("memsaver_fleet_engine_bytes", "Memory of each engine's tags.", ["engine", "state"], sizes)
