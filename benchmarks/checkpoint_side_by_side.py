"""Whether the driver checkpoints processes of several GPUs at the same time.

Each process has a context on a separate GPU and released memory, and nothing to do with the others. They are
checkpointed and restored side by side, and one after the other; processes that see all GPUs, as the ranks of an engine
do, and processes that see their own alone.

    python benchmarks/checkpoint_side_by_side.py
    python benchmarks/checkpoint_side_by_side.py --most 4 --rounds 3 --out /tmp
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import pynvml
import torch
from _record import new_parser, new_result, write

STEPS = ("lock", "checkpoint", "restore", "unlock")
PROGRAM = """
import sys, torch, memsaver_core as ms
from memsaver_core import hibernation

index = int(sys.argv[1])
torch.cuda.set_device(index)
with ms.region("weights", device=index):
    numbers = torch.ones(1 << 28, device="cuda")
(numbers[:1024].view(32, 32) @ numbers[:1024].view(32, 32)).sum().item()
ms.release()
print("ready", flush=True)
for line in sys.stdin:
    getattr(hibernation, line.strip())()
    print("done", flush=True)
"""


class Process:
    """A process with a separate GPU; ``alone``: it sees no other."""

    def __init__(self, gpu: int, *, alone: bool) -> None:
        visible = {"CUDA_VISIBLE_DEVICES": str(gpu)} if alone else {}
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "0" if alone else str(gpu)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **visible},
        )

    def say(self, step: str) -> None:
        assert self._process.stdin is not None
        print(step, file=self._process.stdin, flush=True)

    def wait(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise RuntimeError("a process has ended; its error is above")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def seconds(processes: list[Process], step: str, *, together: bool) -> float:
    start = time.perf_counter()
    for process in processes:
        process.say(step)
        if not together:
            process.wait()
    if together:
        for process in processes:
            process.wait()
    return time.perf_counter() - start


def measure(processes: list[Process], rounds: int) -> dict[str, dict[str, float]]:
    """Return medians in seconds, by way and step."""
    found: dict[str, dict[str, float]] = {}
    for way in ("side by side", "one after the other"):
        samples: dict[str, list[float]] = {step: [] for step in STEPS}
        for _ in range(rounds):
            for step in STEPS:
                samples[step].append(seconds(processes, step, together=way == "side by side"))
        found[way] = {step: statistics.median(values) for step, values in samples.items()}
    return found


def measured(most: int, rounds: int, *, alone: bool) -> dict[str, dict[str, dict[str, float]]]:
    """Return what ``measure`` finds for one process, two, four and so on."""
    found = {}
    with ExitStack() as stack:
        processes: list[Process] = []
        while (count := max(1, 2 * len(processes))) <= most:
            for gpu in range(len(processes), count):
                processes.append(Process(gpu, alone=alone))
                stack.callback(processes[-1].close)
            for process in processes[count // 2 :]:
                process.wait()
            found[str(count)] = measure(processes, rounds)
    return found


def to_markdown(result: dict[str, Any]) -> str:
    rows = [
        f"| {count} | {seen} | {way} | {' | '.join(f'{steps[step]:.3f}' for step in STEPS)} |"
        for seen, counts in result["seconds"].items()
        for count, ways in counts.items()
        for way, steps in ways.items()
    ]
    return "\n".join(
        [
            f"# Checkpoints of several processes: {result['machine']}",
            "",
            f"{result['date']}, `{result['command']}`. Seconds for all processes, medians of",
            f"{result['rounds']} rounds; each process with a context on a separate GPU and released memory.",
            "",
            f"| processes | each sees | | {' | '.join(STEPS)} |",
            f"|---|---|---|{'---|' * len(STEPS)}",
            *rows,
            "",
        ]
    )


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--most", type=int, default=0, metavar="PROCESSES", help="default: as many as there are GPUs")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    pynvml.nvmlInit()
    gpu = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    result: dict[str, Any] = {
        **new_result("checkpoint_side_by_side.py"),
        "machine": f"{gpu}, driver {pynvml.nvmlSystemGetDriverVersion()}",
        "rounds": options.rounds,
        "seconds": {
            seen: measured(options.most or torch.cuda.device_count(), options.rounds, alone=seen == "its own GPU")
            for seen in ("all GPUs", "its own GPU")
        },
    }
    print(write("checkpoint-side-by-side", result, to_markdown, options.out))


if __name__ == "__main__":
    main()
