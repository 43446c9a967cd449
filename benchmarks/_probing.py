"""Probes asked all the time, and how long their answers took, by what the process was doing meanwhile.

They are asked by a separate process: in that of a benchmark, dozens of other clients' threads would be measured too.
"""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

PATHS = ("/livez", "/memory_occupation", "/metrics")
#: Between two questions, seconds.
PAUSE_S = 0.004


@dataclass
class Answer:
    """One answer: when it was asked for and when it was there, seconds since the epoch."""

    path: str
    asked: float
    answered: float


@dataclass
class Probes:
    """The answers so far; complete when the block of ``probing`` has ended."""

    answers: list[Answer] = field(default_factory=list)


@contextmanager
def probing(url: str) -> Iterator[Probes]:
    """Ask the probes of the server at ``url`` for as long as the block runs."""
    process = subprocess.Popen(
        [sys.executable, __file__, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    probes = Probes()
    try:
        yield probes
    finally:
        output, _ = process.communicate()
    if process.returncode != 0:
        raise RuntimeError("a probe was not answered")
    probes.answers = [Answer(*each) for each in json.loads(output)]


class Timeline:
    """What a process did when."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Call the time of the block ``name``."""
        begin = time.time()
        yield
        self.spans.append((name, begin, time.time()))

    @contextmanager
    def operation(self, name: str, part: str, phase: str, *, last: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
        """The same for an operation, whose first or ``last`` phase is called ``part``. Give it the answer."""
        begin = time.time()
        seconds = 0.0

        def done(answer: dict[str, Any]) -> None:
            nonlocal seconds
            seconds = sum(each["seconds"] for each in answer["phases"] if each["name"] == phase)

        yield done
        end = time.time()
        at = end - seconds if last else begin + seconds
        first, second = (name, part) if last else (part, name)
        self.spans += [(first, begin, at), (second, at, end)]

    def during(self, begin: float, end: float) -> str:
        """What was being done for most of that time."""
        overlaps: dict[str, float] = {}
        for name, since, until in self.spans:
            overlap = min(end, until) - max(begin, since)
            if overlap > 0:
                overlaps[name] = overlaps.get(name, 0.0) + overlap
        return max(overlaps, key=lambda name: overlaps[name], default="between")

    def place(self, at: float) -> tuple[str, int, float]:
        """What was being done then, for the how manieth time (from 0), and for how many seconds already."""
        counts: dict[str, int] = {}
        for name, since, until in sorted(self.spans, key=lambda span: span[1]):
            if since <= at <= until:
                return name, counts.get(name, 0), at - since
            counts[name] = counts.get(name, 0) + 1
        return "between", 0, 0.0


def percentiles(answers: list[Answer], timeline: Timeline) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds by what was done and by path: count, median, p99, max."""
    found: dict[str, dict[str, list[float]]] = {}
    for each in answers:
        phase = timeline.during(each.asked, each.answered)
        for name in (phase, "all of it"):
            found.setdefault(name, {}).setdefault(each.path, []).append(1e3 * (each.answered - each.asked))
    return {
        name: {
            path: {
                "count": len(took),
                "median": statistics.median(took),
                "p99": sorted(took)[max(0, round(0.99 * len(took)) - 1)],
                "max": max(took),
            }
            for path, took in by_path.items()
        }
        for name, by_path in sorted(found.items())
    }


def slowest(answers: list[Answer], timeline: Timeline, count: int = 8) -> list[dict[str, Any]]:
    """The slowest answers, and where in the run they were asked for."""
    found = []
    for each in sorted(answers, key=lambda answer: answer.asked - answer.answered)[:count]:
        name, times, seconds = timeline.place(each.asked)
        took = 1e3 * (each.answered - each.asked)
        found.append({"path": each.path, "ms": took, "while": name, "time": times, "after_ms": 1e3 * seconds})
    return found


def ask(url: str, ended: threading.Event) -> list[tuple[str, float, float]]:
    address = url.split("//", 1)[1]
    connections = {path: http.client.HTTPConnection(address, timeout=60) for path in PATHS}
    answers = []
    while not ended.is_set():
        for path, connection in connections.items():
            asked = time.time()
            connection.request("GET", path)
            response = connection.getresponse()
            response.read()
            answers.append((path, asked, time.time()))
            if response.status != 200:
                raise SystemExit(f"{path} answers {response.status}")
            time.sleep(PAUSE_S)
    return answers


if __name__ == "__main__":
    end = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
    json.dump(ask(sys.argv[1], end), sys.stdout)
