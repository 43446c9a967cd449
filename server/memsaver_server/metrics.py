"""What every server measures, and how Prometheus metrics are made without the client library's counters.

With PROMETHEUS_MULTIPROC_DIR set, those would write into the engine's files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from memsaver_server.log_output import dropped


@dataclass
class CallerFigures:
    """What a server counts of its callers."""

    #: Connections that are open now: those that wait for their caller, and those that are busy.
    open: dict[str, int] = field(default_factory=lambda: {"waiting": 0, "busy": 0})
    ended: Counter[str] = field(default_factory=Counter)  # connections that the server ended so far, by reason
    refused: Counter[str] = field(default_factory=Counter)  # requests refused because of their caller, by reason


class Registry(CollectorRegistry):
    """Holds what a function yields at each scrape."""

    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        super().__init__()
        self.collect = collect  # type: ignore[method-assign]


def caller_metrics(callers: CallerFigures) -> Iterator[Metric]:
    """Yield the figures of a server's callers, and how many lines could not be logged."""
    help_text = "Requests that were refused because of their caller, by reason."
    yield counters("memsaver_refused_requests", help_text, ["reason"], callers.refused)
    help_text = "Connections that the service's own server ended, by reason."
    yield counters("memsaver_ended_connections", help_text, ["reason"], callers.ended)
    yield gauges("memsaver_connections", "Open connections of the service's own server.", ["state"], callers.open)
    help_text = "Lines of logs and audit that could not be written in time, by output."
    yield counters("memsaver_log_lines_dropped", help_text, ["output"], dropped)


def counters(name: str, help_text: str, labels: list[str], counts: Mapping[Any, float]) -> Metric:
    """Return a counter. A key of ``counts`` is the value of the label, or a tuple of the values of several."""
    return _filled(CounterMetricFamily(name, help_text, labels=labels), dict(sorted(counts.items())))


def gauges(name: str, help_text: str, labels: list[str], values: Mapping[Any, float]) -> Metric:
    """Return a gauge; keys as for ``counters``."""
    return _filled(GaugeMetricFamily(name, help_text, labels=labels), values)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[Any, float]) -> Metric:
    for key, value in values.items():
        family.add_metric(list(key) if isinstance(key, tuple) else [key], value)
    return family
