"""The shared store: processes with equal content, each on a separate GPU, released and resumed at once.

Each with separate host memory, one after the other and all at once; then with one store, all at once, and one while
the others are idle. The rate of the links by plain copies in the same processes, and what the backups take. Content is
compared after each resume.

    python benchmarks/shared_store.py                        # 16 GiB on each GPU of the machine
    python benchmarks/shared_store.py --processes 2 --bytes 4GiB --repeats 3 --out /tmp
    MEMSAVER_DRIVER=host python benchmarks/shared_store.py --processes 3 --bytes 512MiB --repeats 1 --out /tmp
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any
from uuid import uuid4

import torch
from _record import new_parser, new_result, write
from _workers import checksum
from packing import SCALES, TENSOR_BYTES, link_rates

from memsaver_server.cli.units import parse_size

ON_GPU = torch.cuda.is_available() and os.environ.get("MEMSAVER_DRIVER") != "host"


class Worker:
    """One replica: seeded normal bfloat16 values of several scales, the same in each."""

    def __init__(self, rank: int, nbytes: int) -> None:
        import memsaver_core as ms

        self._ms = ms
        index = rank if ON_GPU else 0
        if ON_GPU:
            torch.cuda.set_device(index)
        torch.manual_seed(1)
        size, device = TENSOR_BYTES // 2, ms.torch_device(index)
        with ms.region("weights", restore="host", device=index):
            tensors = [torch.empty(size, dtype=torch.bfloat16, device=device) for _ in range(nbytes // TENSOR_BYTES)]
        for number, tensor in enumerate(tensors):
            tensor.normal_(0, SCALES[number % len(SCALES)])
        self._buffers = [tensor.view(torch.uint8) for tensor in tensors]
        self._sum = checksum(self._buffers)

    def link(self) -> dict[str, list[float]]:
        """GB/s of plain copies."""
        return link_rates(1 << 30, 5) if ON_GPU else {}

    def prepare(self) -> None:
        self._ms.prepare_backup(wait=True)

    def change(self) -> list[int]:
        """Change every block; return checksums of the content."""
        for buffer in self._buffers:
            buffer[0::2].bitwise_xor_(1)  # the lowest bit of each mantissa
        self._sum = checksum(self._buffers)
        return self._sum

    def release(self) -> dict[str, Any]:
        start = time.monotonic()
        report = self._ms.release()
        end = time.monotonic()
        (tag,) = (tag for tag in report.tags if tag.tag == "weights")
        return {"start": start, "end": end, "copied": tag.backed_up_bytes, "shared": tag.shared_bytes}

    def resume(self) -> dict[str, float]:
        start = time.monotonic()
        (phase,) = self._ms.resume().phases
        end = time.monotonic()
        if checksum(self._buffers) != self._sum:
            raise RuntimeError("the content differs")
        return {"start": start, "end": end, **phase.details}

    def host_bytes(self) -> dict[str, int]:
        """What backups take: of this process, or of the whole store."""
        backup = self._ms.status().host_backup
        if (store := backup.shared_store) is not None:
            return {"used": store.used_bytes, "total": store.total_bytes}
        return {"used": backup.bytes, "total": backup.capacity_bytes}


def work(rank: int, nbytes: int) -> None:
    worker = Worker(rank, nbytes)
    print("RESULT null", flush=True)
    for order in sys.stdin:
        print("RESULT " + json.dumps(getattr(worker, order.strip())()), flush=True)


class Replicas:
    """Processes of `Worker`, asked one after the other or all at once."""

    def __init__(self, store: str, options: argparse.Namespace) -> None:
        self._rest = options.rest
        self._processes = [self._started(rank, store, options) for rank in range(options.processes)]
        self._answers(self._processes)

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            if exception[0] is not None:
                process.kill()
            process.communicate()

    def one_by_one(self, order: str) -> list[Any]:
        return [self._ask([process], order)[0] for process in self._processes]

    def first(self, order: str) -> Any:
        return self._ask(self._processes[:1], order)[0]

    def at_once(self, order: str) -> list[Any]:
        return self._ask(self._processes, order)

    def _started(self, rank: int, store: str, options: argparse.Namespace) -> subprocess.Popen[str]:
        environment = {"MEMSAVER_SHARED_BACKUPS": store, "MEMSAVER_PACK": options.pack}
        if not ON_GPU:
            environment["MEMSAVER_HOST_DEVICE"] = f"shared-store-{os.getpid()}-{rank}"
        return subprocess.Popen(
            [sys.executable, __file__, "--worker", str(rank), str(parse_size(options.bytes))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )

    def _ask(self, processes: list[subprocess.Popen[str]], order: str) -> list[Any]:
        time.sleep(self._rest)
        for process in processes:
            assert process.stdin is not None
            print(order, file=process.stdin, flush=True)
        return self._answers(processes)

    def _answers(self, processes: list[subprocess.Popen[str]]) -> list[Any]:
        answers = []
        for process in processes:
            assert process.stdout is not None
            line = next((line for line in process.stdout if line.startswith("RESULT ")), None)
            if line is None:
                raise RuntimeError("a process ended; see its output above")
            answers.append(json.loads(line.removeprefix("RESULT ")))
        return answers


def changed(replicas: Replicas) -> None:
    sums = replicas.at_once("change")
    if any(each != sums[0] for each in sums):
        raise RuntimeError("the processes' contents differ")


def seconds_alone(answers: list[dict[str, float]]) -> list[float]:
    return [answer["end"] - answer["start"] for answer in answers]


def seconds_together(answers: list[dict[str, float]]) -> list[float]:
    """From the first one's start to the last one's end; the clock is the system's."""
    return [max(answer["end"] for answer in answers) - min(answer["start"] for answer in answers)]


def measure_own(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    alone: dict[str, Any] = {"backups": "each its own", "released": "one by one", "release": [], "resume": []}
    together: dict[str, Any] = {"backups": "each its own", "released": "all at once", "release": [], "resume": []}
    with Replicas("", options) as replicas:
        links = {"alone": replicas.one_by_one("link"), "at once": replicas.at_once("link")}
        replicas.one_by_one("prepare")
        replicas.at_once("release")
        replicas.at_once("resume")  # the first round pays for what is made once
        for _ in range(options.repeats):
            changed(replicas)
            alone["release"] += seconds_alone(replicas.one_by_one("release"))
            alone["resume"] += seconds_alone(replicas.one_by_one("resume"))
            changed(replicas)
            together["release"] += seconds_together(replicas.at_once("release"))
            kept = replicas.at_once("host_bytes")
            together["resume"] += seconds_together(replicas.at_once("resume"))
    for row in (alone, together):
        row["host_bytes"] = {kind: sum(each[kind] for each in kept) for kind in ("used", "total")}
    return [alone, together], links


def measure_store(options: argparse.Namespace) -> list[dict[str, Any]]:
    row: dict[str, Any] = {"backups": "one store", "released": "all at once", "release": [], "resume": []}
    with Replicas(f"benchmark-{uuid4().hex[:12]}", options) as replicas:
        replicas.at_once("prepare")
        row["first release"] = seconds_together(replicas.at_once("release"))
        replicas.at_once("resume")
        for _ in range(options.repeats):
            changed(replicas)
            reports = replicas.at_once("release")
            row["release"] += seconds_together(reports)
            row["copied"] = [report["copied"] for report in reports]
            row["host_bytes"] = replicas.at_once("host_bytes")[0]
            row["resume"] += seconds_together(replicas.at_once("resume"))
        alone: dict[str, Any] = {"backups": "one store", "released": "one, unchanged, the others idle"}
        alone |= {"release": [], "resume": []}
        replicas.at_once("release")
        for repeat in range(options.repeats + 1):
            time.sleep(3)  # the idle ones pin what others wrote
            resumed = replicas.first("resume")
            released = replicas.first("release")
            if repeat:  # the first round pays for what is made once
                alone["resume"] += seconds_alone([resumed])
                alone["release"] += seconds_alone([released])
                alone["details"] = resumed
        alone["host_bytes"] = row["host_bytes"]
    return [row, alone]


def measured_text(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def to_markdown(result: dict[str, Any]) -> str:
    copy, nbytes = result["packed_copy_bytes"], result["bytes"]
    lines = [
        f"# Shared store: {result['processes']} processes, {result['device']}, torch {result['torch']}",
        "",
        f"{result['date']}, `{result['command']}`. {nbytes / 1e9:.1f} GB of equal bfloat16 content in each process, "
        f"changed before each release; packing {result['pack']}. Seconds until the last one has answered, median "
        "(fastest to slowest); GB/s of content of each process; host memory of all backups, in use and in all, divided "
        f"by one process's backup of {copy / 1e9:.2f} GB.",
        "",
        "| backups | operations | release, s | resume, s | release, GB/s | resume, GB/s | in use | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        rates = {way: [nbytes / 1e9 / seconds for seconds in row[way]] for way in ("release", "resume")}
        cells = [row["backups"], row["released"], *(measured_text(row[way], 3) for way in ("release", "resume"))]
        cells += [measured_text(rates[way], 1) for way in ("release", "resume")]
        cells += [f"{row['host_bytes'][kind] / copy:.3f}" for kind in ("used", "total")]
        lines.append(f"| {' | '.join(cells)} |")
    medians = [statistics.median(row["release"]) for row in result["rows"]]
    lines += [
        "",
        f"All at once with the store, a release is {medians[0] / medians[2]:.2f} times as fast as one process alone, "
        f"which copies everything, and {medians[1] / medians[2]:.2f} times as fast as all at once without it.",
    ]
    linked = result["rows"][3]["details"].get("linked_bytes", 0)
    lines += ["", f"With the others idle, {linked / 1e9:.1f} GB came over their links, as stored."]
    for how, rates in result["link GB/s"].items():
        if any(rates):
            out, back = ([rate for each in rates for rate in each[way]] for way in ("release", "resume"))
            lines += ["", f"Links, plain copies, {how}: {measured_text(out, 1)} out, {measured_text(back, 1)} in."]
    return "\n".join([*lines, ""])


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]), int(sys.argv[3]))
        return
    parser = new_parser(__doc__)
    parser.add_argument("--processes", type=int, default=torch.cuda.device_count() if ON_GPU else 2)
    parser.add_argument("--bytes", default="16GiB", help="of each process")
    parser.add_argument("--pack", choices=["auto", "off"], default="auto")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rest", type=float, default=0.3, help="seconds between operations")
    options = parser.parse_args()
    own, links = measure_own(options)
    rows = own + measure_store(options)
    result = {
        **new_result("shared_store.py"),
        "device": torch.cuda.get_device_name(0) if ON_GPU else "host driver",
        "torch": torch.__version__,
        "processes": options.processes,
        "bytes": parse_size(options.bytes) // TENSOR_BYTES * TENSOR_BYTES,
        "pack": options.pack,
        "packed_copy_bytes": own[0]["host_bytes"]["used"] // options.processes,
        "link GB/s": links,
        "rows": rows,
    }
    print(write("shared-store", result, to_markdown, options.out))


if __name__ == "__main__":
    main()
