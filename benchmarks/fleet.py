"""A fleet of light engines on one machine: how long a coordinator takes to prepare, commit, abort and undo on all of
them, and what it needs; with a model of larger fleets, fitted to what was measured.

The engines are real services over the real core on the host driver, 2 MiB each, many to a process. The coordinator is
this process. Engines and coordinator share the processors here, so that a time over all engines is mostly the engines'
own work. What the coordinator takes beyond the slowest engine, and its processor time, are measured on stand-ins, which
repeat a real engine's answers and only wait in their commit.

    python benchmarks/fleet.py
    python benchmarks/fleet.py --sizes 50,100 --rounds 3 --out /tmp
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from _record import ROOT, new_parser, new_result, write

from memsaver_server.fleet import AsyncFleet, Member, MemoryRecord, RecordContent, StaticMembership

#: Engines in a process.
PER_PROCESS = 10
#: The fleet that the model speaks of.
LARGE = 10_000
#: What a stand-in's commit takes, seconds.
STAND_IN_S = 1.0


class TimedRecord(MemoryRecord):
    """Notes when an operation's stages begin and when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.moments: list[tuple[str, float]] = []

    async def save(self, content: RecordContent) -> None:
        stages = [running.stage for running in content.running.values()]
        self.moments.append((stages[0] if stages else "ended", time.perf_counter()))
        await super().save(content)

    def durations(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        found = {stage: after - at for (stage, at), (_, after) in pairs}
        self.moments.clear()
        return found


class Engines:
    """Processes of light engines."""

    def __init__(self, count: int) -> None:
        code = "from tests.fleet.light_engine import serve; serve()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, str(count), str(PER_PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MEMSAVER_DRIVER": "host", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        )
        lines = [json.loads(self._line()) for _ in range(0, count, PER_PROCESS)]
        self.members = [Member(**about) for each in lines for about in each]
        self.members.sort(key=lambda member: int(member.name[1:]))

    def fail(self, call: str) -> None:
        """Make the next ``call`` of the first engine fail."""
        assert self._process.stdin is not None
        print(call, file=self._process.stdin, flush=True)
        self._line()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the engines have ended"
        return line


async def measure(engines: Engines, size: int, rounds: int) -> dict[str, Any]:
    """Return the figures of a fleet of ``size`` engines; medians over the rounds, seconds."""
    record = TimedRecord()
    me = psutil.Process()
    figures: dict[str, list[float]] = defaultdict(list)
    before = me.memory_info().rss
    # Patient, as engines that share two processors answer late.
    patience = {"silence_s": 120.0, "lease_s": 240.0}
    async with AsyncFleet(StaticMembership(engines.members[:size]), record=record, **patience) as fleet:
        await fleet.status()  # connects
        for _ in range(rounds):
            for verb in (fleet.release, fleet.resume):
                record.durations()
                result = await verb()
                assert result.success, result.message
                name = result.operation
                stages = record.durations()
                figures[f"{name}"].append(result.seconds)
                figures[f"{name}: prepare"].append(stages["preparing"])
                figures[f"{name}: commit"].append(stages["committing"])
            for call, stage in (("check_release", "preparing"), ("release", "rolling_back")):
                engines.fail(call)
                record.durations()
                result = await fleet.release()
                assert not result.success
                assert all(engine.state == "resident" for engine in result.engines), result.message
                name = "one cannot prepare" if stage == "preparing" else "one fails to commit"
                figures[name].append(result.seconds)
                figures[f"{name}: {'prepare and abort' if stage == 'preparing' else 'undo'}"].append(
                    record.durations()[stage]
                )
        about = {
            "memory_bytes": me.memory_info().rss - before,
            "sockets": sum(connection.status == "ESTABLISHED" for connection in me.net_connections("tcp")),
        }
    return {"engines": size, "seconds": {name: statistics.median(each) for name, each in figures.items()}, **about}


@contextmanager
def stand_ins(count: int) -> Iterator[list[Member]]:
    """Run stand-ins while the block runs."""
    command_line = [sys.executable, str(ROOT / "benchmarks/_standins.py"), str(count), str(STAND_IN_S)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command_line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield [Member(f"e{number}", url) for number, url in enumerate(json.loads(process.stdout.readline()))]
        process.stdin.close()


async def beyond(members: list[Member], size: int, rounds: int) -> dict[str, float]:
    """Return what operations take beyond the commit of a stand-in, and of the processor; medians, seconds."""
    figures: dict[str, list[float]] = defaultdict(list)
    async with AsyncFleet(StaticMembership(members[:size])) as fleet:
        await fleet.status()  # connects
        for _ in range(rounds):
            for verb in (fleet.release, fleet.resume):
                busy = time.process_time()
                result = await verb()
                used = time.process_time() - busy
                assert result.success, result.message
                figures[f"{result.operation}: beyond the slowest engine"].append(result.seconds - STAND_IN_S)
                figures[f"{result.operation}: coordinator's processor time"].append(used)
    return {name: statistics.median(each) for name, each in figures.items()}


def line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return ``a`` and ``b`` of the least squares line y = a + b x."""
    fitted = statistics.linear_regression([x for x, _ in points], [y for _, y in points])
    return fitted.intercept, fitted.slope


def models(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the line of each figure, and what it gives for a large fleet: flat, and with coordinators of coordinators.

    With ``m`` coordinators below one, each of ``n / m`` engines, a phase takes ``2 a + b (m + n / m)``, least for
    ``m = sqrt(n)``.
    """
    found = {}
    for name in results[0]["seconds"]:
        a, b = line([(each["engines"], each["seconds"][name]) for each in results])
        tree = 2 * max(a, 0) + 2 * b * LARGE**0.5
        found[name] = {"a": a, "b": b, "flat": a + b * LARGE, "tree": tree}
    return found


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def to_markdown(result: dict[str, Any]) -> str:
    results, fitted, about = (result[key] for key in ("results", "model", "about"))
    sizes = [f"{each['engines']} engines" for each in results]
    heads = ["ms more for each engine", f"{LARGE:,} engines, one coordinator", f"{LARGE:,} engines, a tree"]
    times = [
        row(
            name,
            *(format(each["seconds"][name], ".3f") for each in results),
            format(line["b"] * 1e3, ".2f"),
            format(line["flat"], ".1f"),
            format(line["tree"], ".2f"),
        )
        for name, line in fitted.items()
    ]
    memory = [format(each["memory_bytes"] / 2**20, ".1f") for each in results]
    return "\n".join(
        [
            "# A fleet on one machine",
            "",
            f"{about['machine']}, Python {about['python']}, host driver. Engines of 2 MiB, {PER_PROCESS} to a process;",
            f"medians of {about['rounds']} rounds, seconds. Engines and coordinator share the processors: a time over",
            "all engines is mostly the engines' own work. What is beyond the slowest engine, and the coordinator's",
            "processor time, are measured on stand-ins that repeat a real engine's answers, and whose commit waits for",
            f"{STAND_IN_S:g} s.",
            "",
            row("what", *sizes, *heads),
            row("---", *["---:"] * (len(sizes) + len(heads))),
            *times,
            "",
            row("the coordinator's", *sizes),
            row("---", *["---:"] * len(sizes)),
            row("memory beside that of the smaller fleets, MiB", *memory),
            row("sockets", *(each["sockets"] for each in results)),
            "",
            "The last columns are a model, not measured: the line a + b n, fitted to the measured sizes, for one",
            f"coordinator of {LARGE:,} engines; and 2 a + 2 b sqrt(n) for one coordinator of {LARGE**0.5:.0f} others,",
            f"each of {LARGE**0.5:.0f} engines. They hold for engines that share processors as here; if engines have",
            "separate machines, what is beyond the slowest engine is all that grows with their number.",
            "",
            f"Repeat: `{about['command']}`",
            "",
        ]
    )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--sizes", default="50,100,250,500", help="numbers of engines")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    results: list[dict[str, Any]] = []
    engines = Engines(max(sizes))
    try:
        for size in sizes:
            results.append(asyncio.run(measure(engines, size, options.rounds)))
            print(json.dumps(results[-1]), file=sys.stderr)
    finally:
        engines.close()
    with stand_ins(max(sizes)) as members:
        for each in results:
            each["seconds"] |= asyncio.run(beyond(members, each["engines"], options.rounds))
    about = {
        "machine": f"{os.cpu_count()} processors ({platform.machine()})",
        "python": platform.python_version(),
        "rounds": options.rounds,
        **new_result("fleet.py"),
    }
    print(write("fleet", {"about": about, "results": results, "model": models(results)}, to_markdown, options.out))


if __name__ == "__main__":
    main()
