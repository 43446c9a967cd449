"""What HTTP costs: release and resume of an empty engine against the native calls, and what it answers while a copy
runs, or stands still.

The engine is a separate process and the client another one, on one kept-alive connection, as an orchestrator has it.
Native calls and requests alternate in rounds, so that both see the same machine.

    python benchmarks/overhead.py
    python benchmarks/overhead.py --rounds 40 --copy 4GiB --out /tmp
"""

from __future__ import annotations

import argparse
import functools
import http.client
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from _record import ROOT, new_parser, new_result, write

#: Pairs of release and resume in a round, and rounds that are not counted.
PAIRS = 25
#: What the release of a stalled copy keeps.
STALLED_BYTES = 64 << 20
WARM_UP_ROUNDS = 2


def serve(copy_bytes: int) -> None:
    """The engine's process: prints its address, then times native pairs for each line of standard input."""
    import torch

    import memsaver_core as ms
    from memsaver_core import process
    from memsaver_server import attach
    from memsaver_server.engine.gate import Gate

    kept = None
    if copy_bytes:
        with ms.region("weights"):
            kept = torch.empty(copy_bytes // 4, dtype=torch.float32, device=ms.torch_device())
        ms.prepare_backup(wait=True)
    with attach(Gate("an engine without memory" if kept is None else "an engine with weights")) as server:
        where = f"{ms.driver_name()}: {ms.read_devices()[0].name}"
        print(json.dumps({"address": server.address, "device": where, "torch": torch.__version__}), flush=True)
        for line in sys.stdin:
            if line.strip() == "change":  # what is unchanged would not be copied
                assert kept is not None
                kept.uniform_()
                print(json.dumps(True), flush=True)
            elif line.strip() == "stall":
                process.saver().delay("copy_to_host", 3600)
                print(json.dumps(True), flush=True)
            elif line.strip() == "stalled":  # whether a copy stands still by now
                print(json.dumps("copy_to_host" in process.saver().counts()), flush=True)
            elif line.strip() == "go on":
                process.saver().heal()
                print(json.dumps(True), flush=True)
            else:
                print(json.dumps([_native_pair(ms) for _ in range(PAIRS)]), flush=True)


def _native_pair(ms: Any) -> float:
    start = time.perf_counter()
    ms.release()
    ms.resume()
    return time.perf_counter() - start


class Engine:
    """The client's end of an engine's process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        about = self.ask("")
        self.device, self.torch = about["device"], about["torch"]
        self.address: tuple[str, int] = tuple(about["address"])
        self.http = self.connection()

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=120)

    def ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        self.http.request(method, path, body)
        answer = self.http.getresponse()
        content = answer.read()
        if answer.status not in (200, 202):
            raise RuntimeError(f"{method} {path}: {answer.status} {content.decode()}")
        return content


@contextmanager
def engine(copy_bytes: int = 0, **environment: str) -> Iterator[Engine]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(copy_bytes)],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Engine(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure_operations(rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Time pairs of release and resume, native and over HTTP, and the lightest of requests beside them."""
    samples: dict[str, list[float]] = {"native pair": [], "HTTP pair": [], "/livez": [], "/metrics, idle": []}
    with engine() as served:

        def pair() -> None:
            served.call("POST", "/release_memory_occupation", b"{}")
            served.call("POST", "/resume_memory_occupation", b"{}")

        for number in range(WARM_UP_ROUNDS + rounds):
            taken = {
                "native pair": served.ask("native"),
                "HTTP pair": [seconds_of(pair) for _ in range(PAIRS)],
                "/livez": [seconds_of(lambda: served.call("GET", "/livez")) for _ in range(PAIRS)],
                "/metrics, idle": [seconds_of(lambda: served.call("GET", "/metrics")) for _ in range(PAIRS)],
            }
            if number >= WARM_UP_ROUNDS:
                for name, values in taken.items():
                    samples[name] += values
        return samples, {"device": served.device, "torch": served.torch}


def measure_scrapes(copy_bytes: int, copies: int) -> list[float]:
    """Time scrapes, one after the other, while a release copies weights; only those that saw it at work count."""
    samples = []
    with engine(copy_bytes) as served:
        for _ in range(copies):
            served.ask("change")
            location = json.loads(served.call("POST", "/release_memory_occupation", b'{"async": true}'))["location"]
            while json.loads(served.call("GET", location))["status"] in ("queued", "running"):
                start = time.perf_counter()
                text = served.call("GET", "/metrics")
                seconds = time.perf_counter() - start
                if b'memsaver_state{state="releasing"} 1.0' in text:
                    samples.append(seconds)
            served.call("POST", "/resume_memory_occupation")
    return samples


def measure_answers_in_a_stall(answers: int) -> dict[str, list[float]]:
    """Time requests, one after the other, while a release stands still in the middle of its first copy."""
    samples: dict[str, list[float]] = {"/metrics": [], "/memory_occupation": [], "/livez": []}
    sys.path.insert(0, str(ROOT))
    from tests.native import injection

    with engine(STALLED_BYTES, **injection.in_child()) as served:
        for path in samples:
            served.call("GET", path)  # the first requests of a process load what they need
        served.ask("change")  # zeros would not be copied
        served.ask("stall")
        location = json.loads(served.call("POST", "/release_memory_occupation", b'{"async": true}'))["location"]
        while not served.ask("stalled"):
            pass
        for _ in range(answers):
            for path, taken in samples.items():
                taken.append(seconds_of(functools.partial(served.call, "GET", path)))
        if json.loads(served.call("GET", location))["status"] != "running":
            raise RuntimeError("the release did not stand still")
        served.ask("go on")
        while json.loads(served.call("GET", location))["status"] == "running":
            pass
    return {f"{path}, while a copy stands still": taken for path, taken in samples.items()}


def row(name: str, samples: list[float]) -> dict[str, Any]:
    ordered = sorted(samples)
    return {
        "what": name,
        "median_ms": statistics.median(ordered) * 1e3,
        "p10_ms": ordered[len(ordered) // 10] * 1e3,
        "p90_ms": ordered[len(ordered) * 9 // 10] * 1e3,
        "min_ms": ordered[0] * 1e3,
        "max_ms": ordered[-1] * 1e3,
        "samples": len(ordered),
    }


def to_markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# What HTTP costs: {result['device']}",
        "",
        f"{result['date']}, `{result['command']}`. {result['machine']}; Python {result['python']}, torch "
        f"{result['torch']}. A pair is a release and a resume of an engine that holds no memory.",
        "",
        "| | median ms | 10 % | 90 % | min to max | n |",
        "|---|---|---|---|---|---|",
        *(
            f"| {row['what']} | {row['median_ms']:.2f} | {row['p10_ms']:.2f} | {row['p90_ms']:.2f} | "
            f"{row['min_ms']:.2f} to {row['max_ms']:.2f} | {row['samples']} |"
            for row in result["rows"]
        ),
        "",
        f"**HTTP pair beyond the native pair: {result['overhead_ms']:.2f} ms** (difference of the medians).",
        f"**Slowest answer while a copy stands still: {result['slowest_in_a_stall_ms']:.2f} ms.**",
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    cores = len(os.sched_getaffinity(0))
    return f"{models[0] if models else platform.machine()}, {cores} cores, {memory:.0f} GiB"


def main() -> None:
    from memsaver_server.cli.units import parse_size

    parser = new_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help=f"each of {PAIRS} pairs")
    parser.add_argument("--copy", default="1GiB", help="bytes that a release copies while it is scraped")
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    samples, about = measure_operations(options.rounds)
    samples["/metrics, while a release copies"] = measure_scrapes(parse_size(options.copy), options.copies)
    samples |= measure_answers_in_a_stall(options.rounds * PAIRS)
    rows = [row(name, values) for name, values in samples.items() if values]
    medians = {row["what"]: row["median_ms"] for row in rows}
    result = {
        **new_result("overhead.py"),
        "machine": machine(),
        "python": platform.python_version(),
        **about,
        "rows": rows,
        "overhead_ms": medians["HTTP pair"] - medians["native pair"],
        "slowest_in_a_stall_ms": max(row["max_ms"] for row in rows if "stands still" in row["what"]),
    }
    print(write("overhead", result, to_markdown, options.out))


if __name__ == "__main__":
    main()
