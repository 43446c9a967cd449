"""What NCCL holds between ranks of plain torch, and what is left when it is suspended and every rank is hibernated.

One process for each GPU, in one NCCL group, with a CUDA graph that has captured an all-reduce. Each step is taken on
all ranks side by side before the next; its time is that of the slowest rank. After each cycle the old graph is
replayed.

    python benchmarks/communicators.py                     # two GPUs, 20 cycles
    python benchmarks/communicators.py --ranks 4 --cycles 3 --out /tmp
    NCCL_BUFFSIZE=1048576 python benchmarks/communicators.py --out /tmp   # the default is 4 MiB for each buffer
"""

from __future__ import annotations

import ast
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import pynvml
from _machine import MIB, about_gpu, used_mib_of
from _record import ROOT, new_parser, new_result, write

sys.path.insert(0, str(ROOT))

from tests.gpu import plain_ranks
from tests.native.nccl import Ranks

STEPS = {
    "release": "ms.release()",
    "suspend communicators": "communicators.suspend()",
    "lock": "hibernation.lock()",
    "checkpoint": "hibernation.checkpoint()",
    "restore": "hibernation.restore()",
    "unlock": "hibernation.unlock()",
    "resume communicators": "communicators.resume()",
    "resume": "ms.resume()",
}
#: Sizes of the all-reduces that are timed, MiB.
RATED_MIB = (1, 16, 256)
COUNTED = "[(each.suspendable_bytes, each.persistent_bytes, each.obstacle) for each in communicators.found()]"


def cycle(pair: Ranks, ranks: int, number: int, empty: list[float]) -> dict[str, Any]:
    """Take every step on all ranks: its milliseconds, and MiB on the fullest GPU after it; at last check the sums."""
    row: dict[str, Any] = {"milliseconds": {}, "mib": {}}
    for name, call in STEPS.items():
        answers = pair.ask(f"seconds(lambda: {call})")
        if failed := [answer for answer in answers if "Error" in answer]:
            raise RuntimeError(f"{name}: {failed[0]}")
        row["milliseconds"][name] = max(map(float, answers)) * 1e3
        row["mib"][name] = max(now - before for now, before in zip(used_mib_of(ranks), empty, strict=True))
    expected = [str(plain_ranks.total_over(ranks, number))] * ranks
    row["right"] = pair.ask(f"replayed({number})") == expected == pair.ask(f"reduced({number})")
    return row


def measure(ranks: int, cycles: int) -> dict[str, Any]:
    empty = used_mib_of(ranks)
    with tempfile.TemporaryDirectory() as folder, plain_ranks.started(ranks, Path(folder)) as pair:
        pair.ask("replayed(0)")
        counted = [ast.literal_eval(answer) for answer in pair.ask(COUNTED)]
        if obstacles := [obstacle for _, _, obstacle in counted[0] if obstacle]:
            raise SystemExit(obstacles[0])
        awake = max(now - before for now, before in zip(used_mib_of(ranks), empty, strict=True))
        [version, *_] = pair.ask("loaded().version_text")
        rates = {size: min(map(float, pair.ask(f"rate({size << 20})"))) for size in RATED_MIB}
        rows = [cycle(pair, ranks, number, empty) for number in range(1, cycles + 1)]
    return {
        **new_result("communicators.py"),
        **about_gpu(),
        "nccl": ast.literal_eval(version),
        "ranks": ranks,
        "communicators": len(counted[0]),
        "suspendable_mib": sum(size for size, _, _ in counted[0]) / MIB,
        "persistent_mib": sum(size for _, size, _ in counted[0]) / MIB,
        "awake_mib": awake,
        "all_reduce_gb_s": rates,
        "settings": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
        "cycles": rows,
    }


def to_markdown(result: dict[str, Any]) -> str:
    rows = result["cycles"]
    lines = [
        f"# NCCL between ranks: {result['ranks']} x {result['gpu']}, driver {result['driver']}, torch "
        f"{result['torch']}, NCCL {result['nccl']}",
        "",
        f"{result['date']}, `{result['command']}`. Device memory of the fullest GPU as nvidia-smi counts it; each step "
        f"on all ranks side by side, {len(rows)} cycles. {result['communicators']} communicators: "
        f"{result['suspendable_mib']:,.0f} MiB can be suspended, {result['persistent_mib']:,.0f} MiB stay.",
        "",
        "| step | median ms | slowest ms | MiB left, most |",
        "|---|---|---|---|",
        f"| awake | | | {result['awake_mib']:,.0f} |",
    ]
    for name in STEPS:
        times = [row["milliseconds"][name] for row in rows]
        left = max(row["mib"][name] for row in rows)
        lines.append(f"| {name} | {statistics.median(times):,.1f} | {max(times):,.1f} | {left:,.0f} |")
    right = sum(row["right"] for row in rows)
    rates = ", ".join(f"{rate:,.0f} of {size} MiB" for size, rate in result["all_reduce_gb_s"].items())
    settings = " ".join(f"{name}={value}" for name, value in result["settings"].items())
    lines += ["", f"All-reduce, GB/s: {rates}. {settings or 'No setting of NCCL.'}"]
    return "\n".join([*lines, "", f"The graph's all-reduce and a new one were right after {right} of {len(rows)}.", ""])


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=20)
    options = parser.parse_args()
    pynvml.nvmlInit()
    result = measure(options.ranks, options.cycles)
    print(write("communicators", result, to_markdown, options.out))


if __name__ == "__main__":
    main()
