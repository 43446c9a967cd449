"""Seconds for each token of real vLLM on several GPUs, with memsaver and without: all engines are loaded at once, and
decode one request in turns, so that the machine's state is the same for all.

Twice, because the engine that is loaded first may have an advantage: once in each order. In each round every engine has
a turn, and the next round takes them in the opposite order. The error is the standard error of the rounds' differences.

    python benchmarks/vllm_decoding.py                 # two GPUs; needs vLLM
    python benchmarks/vllm_decoding.py --rounds 3 --modes stock memsaver --out /tmp
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pynvml
from _checkpoint import CONFIG, write_checkpoint
from _machine import about_gpu
from _processes import end
from _record import new_parser, new_result, write
from vllm_ranks import MODES, Measured, environment_of, nccl_version

#: Marks the lines of a child that are answers; vLLM writes others.
ANSWER = "ANSWER "


def serve_turns(options: argparse.Namespace) -> None:
    """Load an engine, and decode once for each line on stdin."""
    engine = Measured(options.model, options.child, options.ranks, options.utilization)
    engine.seconds_per_token()
    print(ANSWER + "null", flush=True)
    for _ in sys.stdin:
        print(ANSWER + json.dumps(engine.seconds_per_token()), flush=True)


class Child:
    """An engine in a separate process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.answer()  # once it is loaded

    def answer(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError("an engine has ended; see the output above")

    def decode(self) -> float:
        """Return the seconds for each token."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        seconds: float = self.answer()
        return seconds


@contextmanager
def loaded(mode: str, model: str, options: argparse.Namespace) -> Iterator[Child]:
    arguments = ["--child", mode, "--model", model]
    for name in ("ranks", "utilization"):
        arguments += [f"--{name}", str(getattr(options, name))]
    process = subprocess.Popen(
        [sys.executable, __file__, *arguments],
        env=environment_of(mode),
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Child(process)
    finally:
        end(process)


def rounds_of(modes: list[str], model: str, options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Yield the seconds for each token of each mode, round by round. The engines are loaded in this order."""
    with ExitStack() as stack:
        children = {mode: stack.enter_context(loaded(mode, model, options)) for mode in modes}
        for number in range(options.rounds):
            order = modes if number % 2 == 0 else modes[::-1]
            yield {mode: children[mode].decode() for mode in order}


def to_markdown(result: dict[str, Any]) -> str:
    rounds = result["rounds"]
    base = result["modes"][0]

    def around(values: list[float]) -> str:
        error = statistics.stdev(values) / len(values) ** 0.5
        return f"{statistics.mean(values) * 1e3:.3f} ± {error * 1e3:.3f}"

    lines = [
        f"# Decoding on {result['ranks']} GPUs: {result['gpu']}, driver {result['driver']}, vLLM {result['vllm']}, "
        f"torch {result['torch']}, NCCL {result['nccl']}",
        "",
        f"{result['date']}, `{result['command']}`. One request; mean and standard error of {len(rounds)} rounds.",
        "",
        f"| | ms for each token | more than {base}, ms | % |",
        "|---|---|---|---|",
    ]
    mean = statistics.mean(each[base] for each in rounds)
    for mode in result["modes"]:
        more = [each[mode] - each[base] for each in rounds]
        cells = ("", "") if mode == base else (around(more), f"{100 * statistics.mean(more) / mean:+.2f}")
        lines.append(f"| {mode} | {around([each[mode] for each in rounds])} | {cells[0]} | {cells[1]} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the shape to serve")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, vLLM's tensor_parallel_size")
    parser.add_argument("--rounds", type=int, default=10, help="in each order of loading")
    parser.add_argument("--utilization", type=float, default=0.25, help="vLLM's gpu_memory_utilization, of each engine")
    parser.add_argument(
        "--modes", nargs="+", choices=list(MODES), default=list(MODES), help="the first is compared with"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    pynvml.nvmlInit()
    if options.child:
        serve_turns(options)
        return
    record: dict[str, Any] = {
        **new_result("vllm_decoding.py"),
        **about_gpu(),
        "ranks": options.ranks,
        "vllm": importlib.metadata.version("vllm"),
        "nccl": nccl_version(),
        "modes": options.modes,
        "rounds": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(options.config, Path(folder))
        for modes in (options.modes, options.modes[::-1]):
            for seconds in rounds_of(modes, folder, options):
                record["rounds"].append(seconds)
                print(seconds, file=sys.stderr, flush=True)
    print(write("vllm-decoding", record, to_markdown, options.out))


if __name__ == "__main__":
    main()
