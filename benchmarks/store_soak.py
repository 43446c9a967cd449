"""Many cycles of processes that share a store of packed backups: does anything creep?

Each process holds weights in bfloat16, which are the same in all, and separate bytes. A cycle writes a third of them
anew, at times in one process alone until the next cycle, and releases and resumes all processes at once, or two of
them; then everything is looked at: checksums of all content, by torch's arithmetic.

separate Memory, open files and threads of all processes together, the device's memory, and the store's if all have
released the same weights, go into a linear fit of the second half, as in `soak.py`. It fails if one of them grows.

    python benchmarks/store_soak.py                                       # 1,000 cycles, on a GPU
    MEMSAVER_DRIVER=host python benchmarks/store_soak.py --weights 512MiB --out /tmp
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from typing import Any
from uuid import uuid4

import psutil
import torch
from _machine import device_bytes
from _record import new_parser, new_result, write
from soak import fit

import memsaver_core as ms
from memsaver_server.cli.units import parse_size

MIB = 1 << 20
ON_GPU = torch.cuda.is_available() and os.environ.get("MEMSAVER_DRIVER") != "host"

#: What may be more at the end of the second half than at its start: of each quantity's level, and besides.
GROWTH = {
    "files": (0, 0.5),
    "threads": (0, 1),
    "own_mib": (0.01, 0),
    "store_mib": (0.15, 0),  # its slabs are large, and are given back in the background
    "store_used_mib": (0.01, 0),
    "device_mib": (0, 1),
}


class Worker:
    """A process of the store. Answers each line of standard input by a line of JSON."""

    def __init__(self, number: int, weights_bytes: int) -> None:
        device = ms.torch_device()
        self._number = number
        with ms.region("weights", restore="host"):
            self._weights = torch.zeros(weights_bytes // 2, dtype=torch.bfloat16, device=device)
        with ms.region("own", restore="host"):
            self._own = torch.zeros(weights_bytes // 8, dtype=torch.uint8, device=device)
        self._generator = torch.Generator(device=device)

    def write(self, seed: int) -> list[int]:
        """A third of the weights by this seed, and some bytes that no other process has."""
        self._generator.manual_seed(seed)
        self._weights.chunk(3)[seed % 3].normal_(0, 0.02, generator=self._generator)
        self._generator.manual_seed(seed * 100 + self._number)
        self._own.chunk(3)[seed % 3].random_(0, 256, generator=self._generator)
        return self.look()

    def release(self, _: int) -> dict[str, int]:
        counts: Counter[str] = Counter()
        for tag in ms.release().tags:
            for name in ("backed_up_bytes", "kept_bytes", "shared_bytes", "unchanged_bytes"):
                counts[name] += getattr(tag, name)
        return dict(counts)

    def resume(self, _: int) -> None:
        ms.resume()

    def look(self, _: int = 0) -> list[int]:
        """Checksums: each word counts as often as its place in its row says, so that swapped words are seen."""
        sums = []
        for tensor in (self._weights, self._own):
            words = tensor.view(torch.int64).split(1 << 20)
            sums += [int((part * torch.arange(1, len(part) + 1, device=part.device)).sum()) for part in words]
        return sums

    def store(self, _: int) -> dict[str, int]:
        store = ms.status().host_backup.shared_store
        assert store is not None
        return {"total": store.total_bytes, "used": store.used_bytes, "processes": store.processes}

    def run(self) -> None:
        print(json.dumps(ms.read_devices()[0].uuid), flush=True)
        for line in sys.stdin:
            order, argument = line.split()
            print(json.dumps(getattr(self, order)(int(argument))), flush=True)


class Process:
    """A worker's process, as the parent sees it."""

    def __init__(self, number: int, weights_bytes: int, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(number), "--weights", str(weights_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.seen = psutil.Process(self.process.pid)
        self.sums: list[int] = []

    def send(self, order: str, argument: int) -> None:
        assert self.process.stdin is not None
        print(order, argument, file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"process {self.process.pid} of the store is gone: exit code {self.process.wait()}")
        return json.loads(line)


class Soak:
    def __init__(self, processes: list[Process], uuid: str, seed: int) -> None:
        self._all = processes
        self._uuid = uuid
        self._choose = random.Random(seed)
        self._part = 0  # of the weights: the third that was written last
        self._alone: Process | None = None  # wrote it alone
        self.series: dict[str, list[float]] = {}
        self.counts: Counter[str] = Counter()

    def run(self, cycles: int) -> None:
        for _ in range(cycles):
            self._write()
            these = self._all if self._choose.random() < 0.7 else self._choose.sample(self._all, 2)
            for report in self._ask(these, "release"):
                self.counts.update(report)
            self._ask(these, "resume")
            for process, sums in zip(self._all, self._ask(self._all, "look"), strict=True):
                assert sums == process.sums, f"content of process {process.process.pid} differs"
            self._sample(equal=self._alone is None and these == self._all)
            self.counts["cycles"] += 1

    def _write(self) -> None:
        if self._alone is None:
            self._part = self._choose.randrange(3)
        seed = self._choose.randrange(1 << 20) * 3 + self._part
        alone = self._alone is None and self.counts["cycles"] > 0 and self._choose.random() < 0.3
        self._alone = self._choose.choice(self._all) if alone else None
        self.counts["written by one alone"] += alone
        these = [self._alone] if self._alone else self._all
        for process, sums in zip(these, self._ask(these, "write", seed), strict=True):
            process.sums = sums

    def _ask(self, these: list[Process], order: str, argument: int = 0) -> list[Any]:
        """All at once."""
        for process in these:
            process.send(order, argument)
        return [process.answer() for process in these]

    def _sample(self, *, equal: bool) -> None:
        seen = [process.seen for process in self._all]
        (store,) = self._ask(self._all[:1], "store")
        assert store["processes"] == len(self._all)
        values = {
            "own_mib": sum(each.rss - each.shared for each in (process.memory_info() for process in seen)) / MIB,
            "files": sum(each.num_fds() for each in seen),
            "threads": sum(each.num_threads() for each in seen),
        }
        if equal:
            values |= {"store_mib": store["total"] / MIB, "store_used_mib": store["used"] / MIB}
        if ON_GPU:
            values["device_mib"] = sum(device_bytes(self._uuid, each.pid) for each in seen) / MIB
        for name, value in values.items():
            self.series.setdefault(name, []).append(float(value))


def measure(cycles: int, processes: int, weights_bytes: int, seed: int) -> dict[str, Any]:
    environment = os.environ | {
        "MEMSAVER_SHARED_BACKUPS": f"soak-{uuid4().hex[:12]}",
        "MEMSAVER_PACK": "auto",
        "MEMSAVER_VERIFY": "full",
        "OMP_NUM_THREADS": "1",
    }
    all_of_them = [Process(number, weights_bytes, environment) for number in range(processes)]
    try:
        uuids = [process.answer() for process in all_of_them]
        began = time.monotonic()
        soak = Soak(all_of_them, uuids[0], seed)
        soak.run(cycles)
        return {
            **soak.counts,
            "processes": processes,
            "weights_bytes": weights_bytes,
            "seconds": round(time.monotonic() - began, 1),
            "fits": {name: fit(values) for name, values in soak.series.items()},
            "device": torch.cuda.get_device_name() if ON_GPU else "host",
            "seed": seed,
            **new_result("store_soak.py"),
        }
    finally:
        for process in all_of_them:
            process.process.kill()
            process.process.wait()


def grown(fits: dict[str, dict[str, Any]]) -> list[str]:
    """The quantities that were more at the end than they may be."""
    return [name for name, line in fits.items() if line["growth"] > GROWTH[name][0] * line["level"] + GROWTH[name][1]]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--weights", type=parse_size, default=1 << 30, metavar="BYTES", help="of each process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        Worker(arguments.worker, arguments.weights).run()
        return
    figures = measure(arguments.cycles, arguments.processes, arguments.weights, arguments.seed)
    write(f"store-soak-{figures['device'].split()[-1].lower()}", figures, None, arguments.out)
    for what, line in figures["fits"].items():
        print(f"{what:14} {line['level']:10.3f} at half time, {line['growth']:+9.3f} to the end, {line['by_tenth']}")
    print({key: value for key, value in figures.items() if key != "fits"})
    if figures["kept_bytes"] == figures["backed_up_bytes"]:
        sys.exit("nothing was packed; give more --weights")
    if grown(figures["fits"]):
        sys.exit(f"it grows: {', '.join(grown(figures['fits']))}")


if __name__ == "__main__":
    main()
