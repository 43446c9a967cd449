"""SGLang and a trainer on one GPU that release their memory in turns: the time of a step, stock and by memsaver.

Starts a SGLang server and, in a separate process, a trainer with optimizer state. A step is slime's: rollout, the
server's own release, the trainer's resume, training, its pause, the server's resume. Both sides use torch_memory_saver
(stock), or memsaver in its place.

    python benchmarks/trainer_turns.py --stock DIR   # a folder with torch_memory_saver; needs SGLang and a GPU
    python benchmarks/trainer_turns.py --modes memsaver --steps 2 --out /tmp --sglang "--attention-backend triton"

Weights are not sent from trainer to server, which takes the same time in both: tokens must stay equal.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from _checkpoint import CONFIG, write_checkpoint
from _machine import about_gpu, touch_host_memory, used_mib
from _record import failed, new_parser, new_result, write
from _sglang_server import Server, prompts, started

from memsaver_core import compat

MODES = ("stock", "memsaver")
PARTS = ("rollout", "engine releases", "trainer resumes", "training", "trainer pauses", "engine resumes")
#: A step's rollout: requests and their tokens.
REQUESTS, TOKENS = 32, 128
#: A step's training: sequences of so many tokens, one backward pass for each.
SEQUENCES, LENGTH = 4, 256

#: How a line of the trainer's begins that answers: torch_memory_saver and torch print, too.
ANSWER = "ANSWER "

# -- the trainer, in a separate process: a command on each line of its input, an answer on each line of its output ---


def train(model: Path) -> None:
    from torch_memory_saver import torch_memory_saver
    from transformers import AutoConfig, AutoModelForCausalLM

    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    with torch_memory_saver.region("trainer", enable_cpu_backup=True):
        with place:
            policy = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5, foreach=False)
        for parameter in policy.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # it allocates its state
        optimizer.zero_grad()
    ids = torch.randint(10, 1000, (SEQUENCES, LENGTH), device=place)

    def step() -> None:
        for each in ids:
            policy(each[None], labels=each[None]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def pause() -> None:
        torch.cuda.empty_cache()
        torch_memory_saver.pause("trainer")

    calls: dict[str, Callable[[], None]] = {
        "train": step,
        "pause": pause,
        "resume": lambda: torch_memory_saver.resume("trainer"),
        "sum": lambda: None,
    }
    print(ANSWER, flush=True)
    for line in sys.stdin:
        begun = time.perf_counter()
        calls[line.strip()]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        checksum = sum(float(each.detach().double().sum()) for each in policy.parameters()) if "sum" in line else 0.0
        print(ANSWER + json.dumps([seconds, checksum]), flush=True)


class Trainer:
    def __init__(self, stack: ExitStack, mode: str, model: Path, stock: Path | None) -> None:
        first = [str(stock)] if mode == "stock" and stock else [str(compat.PATH)] if mode == "memsaver" else []
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*first, os.environ.get("PYTHONPATH", "")]),
        }
        if mode == "stock":
            find = "from torch_memory_saver.utils import get_binary_path_from_package as f; "
            find += "print(f('torch_memory_saver_hook_mode_preload'))"
            found = subprocess.run(
                [sys.executable, "-c", find], env=environment, capture_output=True, text=True, check=True
            )
            environment["LD_PRELOAD"] = found.stdout.strip()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--trainer", str(model)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(self._process.wait)
        stack.callback(self._process.kill)
        self._read(ANSWER)

    def call(self, name: str) -> tuple[float, float]:
        """Return seconds, and for ``sum`` the sum of all parameters."""
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        seconds, checksum = json.loads(self._read(ANSWER).removeprefix(ANSWER))
        return seconds, checksum

    def _read(self, start: str) -> str:
        """Return the next line that begins so."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(start):
                return line
        raise RuntimeError("the trainer has ended")


# -- a step ------------------------------------------------------------------------------------------------------------


def measure(mode: str, model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of each part of each step, and what was held meanwhile."""
    with ExitStack() as stack:
        server = "stock" if mode == "stock" else "drop-in"
        arguments = shlex.split(options.sglang)
        engine: Server = stack.enter_context(started(server, model, options.stock, arguments, options.port))
        engine.wait_until_up()
        asked = prompts(*[16] * REQUESTS)
        expected = engine.generate(asked[0], 32)
        engine.flush()
        engine.own("/release_memory_occupation")
        trainer = Trainer(stack, mode, model, options.stock)
        trainer.call("train")
        trainer.call("pause")
        engine.own("/resume_memory_occupation")
        rows: list[dict[str, float]] = []
        mib: dict[str, float] = {}
        equal = True
        checksum = None
        for _ in range(options.steps):
            row = dict.fromkeys(PARTS, 0.0)
            begun = time.perf_counter()
            for each in engine.start(asked, TOKENS):
                each.whole.result()
            row["rollout"] = time.perf_counter() - begun
            engine.flush()
            row["engine releases"] = engine.own("/release_memory_occupation").ms / 1e3
            mib["both released"] = used_mib()
            row["trainer resumes"], _ = trainer.call("resume")
            equal = equal and checksum in (None, trainer.call("sum")[1])
            row["training"], _ = trainer.call("train")
            checksum = trainer.call("sum")[1]
            mib["training"] = used_mib()
            row["trainer pauses"], _ = trainer.call("pause")
            row["engine resumes"] = engine.own("/resume_memory_occupation").ms / 1e3
            mib["rollout"] = used_mib()
            equal = equal and engine.generate(asked[0], 32) == expected
            rows.append(row)
            print(mode, {part: round(seconds, 3) for part, seconds in row.items()}, flush=True)
        return {"steps": rows, "mib": mib, "equal": equal}


def to_markdown(record: dict[str, Any]) -> str:
    modes = record["modes"]

    def cells(shown: Callable[[dict[str, Any]], str]) -> str:
        return " | ".join(f"FAILED: {each['failed']}" if "failed" in each else shown(each) for each in modes.values())

    def seconds(part: str) -> str:
        return cells(lambda each: f"{statistics.median(row[part] for row in each['steps']):.3f}")

    moves = PARTS[1:3] + PARTS[4:]
    lines = [
        f"# A trainer and SGLang {record['sglang']} in turns: {record['gpu']}, driver {record['driver']}, "
        f"torch {record['torch']}",
        "",
        f"{record['date']}, `{record['command']}`. Medians of {record['steps']} steps, seconds; device memory as "
        "nvidia-smi counts it, MiB.",
        "",
        f"| | {' | '.join(modes)} |",
        f"|---|{'---|' * len(modes)}",
        *(f"| {part} | {seconds(part)} |" for part in PARTS),
        "| memory given and taken, of a step | "
        + cells(lambda each: f"{statistics.median(sum(row[part] for part in moves) for row in each['steps']):.3f}")
        + " |",
        "| the whole step | "
        + cells(lambda each: f"{statistics.median(sum(row.values()) for row in each['steps']):.3f}")
        + " |",
    ]
    for state in ("rollout", "both released", "training"):
        cell = cells(lambda each, state=state: f"{each['mib'][state]:,.0f}")  # type: ignore[misc]
        lines.append(f"| in use: {state}, MiB | {cell} |")
    lines.append("| tokens and parameters equal | " + cells(lambda each: "yes" if each["equal"] else "NO") + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the shape of both")
    parser.add_argument("--stock", type=Path, help="a folder with torch_memory_saver")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--port", type=int, help="SGLang's; by default a free one")
    parser.add_argument("--sglang", default="", help="more arguments for SGLang, in one string")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer:
        train(options.trainer)
        return
    record: dict[str, Any] = {
        **new_result("trainer_turns.py"),
        **about_gpu(),
        "sglang": importlib.metadata.version("sglang"),
        "steps": options.steps,
        "modes": {},
    }
    touch_host_memory()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(options.config, Path(folder))
        for mode in options.modes:
            try:
                record["modes"][mode] = measure(mode, Path(folder), options)
            except Exception as error:
                record["modes"][mode] = failed(error)
            # What is measured is measured, whatever becomes of the next.
            page = write("trainer-turns", record, to_markdown, options.out)
    print(page)


if __name__ == "__main__":
    main()
