"""Real vLLM on several GPUs, asleep and hibernated: device memory left on each, seconds, tokens, weights.

Starts one engine after the other on the same checkpoint of seeded random weights: vLLM's own sleep mode, memsaver, and
memsaver without vLLM's custom all-reduce. memsaver is called over HTTP, as an orchestrator would.

    python benchmarks/vllm_ranks.py                    # Qwen2-1.5B's shape on two GPUs; needs vLLM and NCCL 2.29.7
    python benchmarks/vllm_ranks.py --ranks 4 --deep 5 --out /tmp
    python benchmarks/vllm_ranks.py --ranks 4 --config tests/data/qwen2.5-72b/config.json --load-format dummy
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pynvml
import torch
from _checkpoint import CONFIG, PROMPTS, write_checkpoint
from _machine import about_gpu, touch_host_memory, used_mib_of
from _processes import end
from _record import new_parser, new_result, write
from vllm_sleep import weight_sums

MODES = {
    "stock": {},
    "memsaver": {},
    "memsaver, --disable-custom-all-reduce": {"disable_custom_all_reduce": True},
}
#: What is asked of a release, by what the engine is then.
STATES: dict[str, dict[str, Any]] = {
    "asleep": {},
    "asleep, NCCL kept": {"communicators": "keep"},
    "hibernated": {"hibernate": True},
}
#: An engine has some time before its first sleep, and the driver some while it sleeps, seconds.
IDLE_S = 1.0
#: How long one mode may take, seconds.
LIMIT_S = 900.0


# -- run inside vLLM's workers -----------------------------------------------------------------------------------------


def count_captures(worker: Any) -> None:
    """Count from now on how many CUDA graphs are captured."""
    begin = torch.cuda.CUDAGraph.capture_begin
    worker.captures = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        worker.captures += 1
        return begin(*arguments, **options)

    torch.cuda.CUDAGraph.capture_begin = counted  # type: ignore[method-assign]


def captures(worker: Any) -> int:
    return int(worker.captures)


# -- one engine --------------------------------------------------------------------------------------------------------


class Measured:
    """An engine that goes to sleep and wakes up, and what it holds and answers meanwhile."""

    def __init__(self, model: str, mode: str, ranks: int, utilization: float, load_format: str = "auto") -> None:
        from vllm import LLM

        self.ranks = ranks
        self.empty = used_mib_of(ranks)
        self.llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            gpu_memory_utilization=utilization,
            max_model_len=2048,
            tensor_parallel_size=ranks,
            load_format=load_format,
            **MODES[mode],
        )
        self.first = self.tokens()
        self.sums = self.llm.collective_rpc(weight_sums)
        self.llm.collective_rpc(count_captures)

    def left(self) -> list[float]:
        return [now - before for now, before in zip(used_mib_of(self.ranks), self.empty, strict=True)]

    def tokens(self, number: int = 32) -> list[list[int]]:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=number)
        answers = []
        for prompt in PROMPTS if number > 1 else PROMPTS[:1]:  # one at a time: batches are not reproducible
            self.llm.reset_prefix_cache()
            [output] = self.llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
            answers.append(list(output.outputs[0].token_ids))
        return answers

    def cycle(self, sleep: Callable[[], Any], wake: Callable[[], Any]) -> dict[str, Any]:
        start = time.perf_counter()
        sleep()
        row: dict[str, Any] = {"sleep": time.perf_counter() - start, "left_mib": self.left()}
        time.sleep(IDLE_S)
        start = time.perf_counter()
        wake()
        row["wake"] = time.perf_counter() - start
        self.tokens(1)
        row["wake_to_first_token"] = time.perf_counter() - start
        row["tokens_equal"] = self.tokens() == self.first
        row["weights_equal"] = self.llm.collective_rpc(weight_sums) == self.sums
        return row

    def seconds_per_token(self) -> float:
        start = time.perf_counter()
        made = sum(map(len, self.tokens(64)))
        return (time.perf_counter() - start) / made


def measure(options: argparse.Namespace) -> None:
    """Measure one mode. What is measured is written at once, whatever becomes of the next cycle."""
    engine = Measured(options.model, options.child, options.ranks, options.utilization, options.load_format)
    result: dict[str, Any] = {
        "loaded_mib": engine.left(),
        "seconds_per_token": [engine.seconds_per_token() for _ in range(5)],
        **{state: [] for state in STATES},
        "obstacles": "",
        "captures": 0,
    }
    time.sleep(IDLE_S)

    def note(state: str, row: dict[str, Any]) -> None:
        result[state].append(row)
        result["captures"] = max(engine.llm.collective_rpc(captures))
        options.answer.write_text(json.dumps(result))
        print(state, row, flush=True)

    if options.child == "stock":
        for _ in range(options.cycles):
            note("asleep", engine.cycle(lambda: engine.llm.sleep(1), engine.llm.wake_up))
        return
    from memsaver_server.integrations.vllm.plugin import attach_to

    with attach_to(engine.llm) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        phases: dict[str, dict[str, float]] = {}

        def post(operation: str, **body: Any) -> None:
            response = client.post(f"/{operation}_memory_occupation", json=body)
            if response.is_error:
                raise RuntimeError(response.text)
            phases[operation] = {phase["name"]: phase["seconds"] for phase in response.json()["phases"]}

        for state, body in STATES.items():
            try:
                for _ in range(options.deep if state == "hibernated" else options.cycles):
                    row = engine.cycle(partial(post, "release", **body), partial(post, "resume"))
                    note(state, {**row, "phases": dict(phases)})
            except RuntimeError as error:
                result["obstacles"] = str(error)
                options.answer.write_text(json.dumps(result))


def environment_of(mode: str) -> dict[str, str]:
    return {
        **os.environ,
        "MEMSAVER_VLLM": "0" if mode == "stock" else "1",
        "NCCL_GRAPH_REGISTER": "0",
        "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }


def run(mode: str, model: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Measure one mode in a separate process; return None if it came to nothing."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "result.json"
        arguments = ["--child", mode, "--model", model, "--answer", str(answer)]
        for name in ("ranks", "cycles", "deep", "utilization", "load_format"):
            arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        command = [sys.executable, __file__, *arguments]
        process = subprocess.Popen(command, env=environment_of(mode), start_new_session=True)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(LIMIT_S)
        finally:
            end(process)
        # What it measured counts even if it failed later.
        result: dict[str, Any] | None = json.loads(answer.read_text()) if answer.exists() else None
        return result


def to_markdown(result: dict[str, Any]) -> str:
    engines = result["engines"]

    def cells(state: str, shown: Callable[[list[dict[str, Any]]], str]) -> list[str]:
        return [shown(rows) if (rows := engine[state]) else "-" for engine in engines.values()]

    def seconds(key: str, skip: int = 0) -> Callable[[list[dict[str, Any]]], str]:
        def shown(rows: list[dict[str, Any]]) -> str:
            values = [row[key] for row in rows[skip:] or rows]
            return f"{statistics.median(values):.2f} (at most {max(values):.2f})"

        return shown

    def left(rows: list[dict[str, Any]]) -> str:
        return ", ".join(f"{max(sizes):,.0f}" for sizes in zip(*(row["left_mib"] for row in rows), strict=True))

    def each_token(seconds: list[float]) -> str:
        error = statistics.stdev(seconds) / len(seconds) ** 0.5
        return f"{statistics.mean(seconds) * 1e3:.3f} ± {error * 1e3:.3f}"

    def equal(rows: list[dict[str, Any]]) -> str:
        return f"{sum(row['tokens_equal'] and row['weights_equal'] for row in rows)} of {len(rows)}"

    table = [
        ("loaded, MiB on each GPU", [", ".join(f"{each:,.0f}" for each in e["loaded_mib"]) for e in engines.values()]),
        ("ms for each token, one request", [each_token(e["seconds_per_token"]) for e in engines.values()]),
    ]
    for state in STATES:
        table += [
            (f"{state}: left on each GPU, MiB, at most", cells(state, left)),
            (f"{state}: sleep, s, median", cells(state, seconds("sleep", 1))),
            (f"{state}: first sleep, s", cells(state, lambda rows: f"{rows[0]['sleep']:.2f}")),
            (f"{state}: wake-up after {IDLE_S:g} s, s, median", cells(state, seconds("wake"))),
            (f"{state}: wake-up to the first token, s, median", cells(state, seconds("wake_to_first_token"))),
            (f"{state}: cycles with equal tokens and weights", cells(state, equal)),
        ]
    table.append(("graphs captured after the start", [str(engine["captures"]) for engine in engines.values()]))
    lines = [
        f"# vLLM on {result['ranks']} GPUs: {result['gpu']}, driver {result['driver']}, vLLM {result['vllm']}, "
        f"torch {result['torch']}, NCCL {result['nccl']}",
        "",
        f"{result['date']}, `{result['command']}`. Device memory as nvidia-smi counts it; times as the "
        "caller sees them. CUDA graphs on.",
        "",
        f"| | {' | '.join(engines)} |",
        f"|---|{'---|' * len(engines)}",
        *(f"| {name} | {' | '.join(row)} |" for name, row in table),
    ]
    lines += [f"\n{name}: {engine['obstacles']}" for name, engine in engines.items() if engine["obstacles"]]
    return "\n".join(lines) + "\n"


def nccl_version() -> str:
    from memsaver_core.communicators.nccl import loaded

    library = loaded()
    return library.version_text if library is not None else "unknown"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the shape to serve")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs, vLLM's tensor_parallel_size")
    parser.add_argument("--cycles", type=int, default=5, help="of sleep")
    parser.add_argument("--deep", type=int, default=20, help="cycles of hibernation")
    parser.add_argument("--utilization", type=float, default=0.5, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto", help="dummy: no checkpoint on disk")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    pynvml.nvmlInit()
    if options.child:
        measure(options)
        return
    touch_host_memory()
    record: dict[str, Any] = {
        **new_result("vllm_ranks.py"),
        **about_gpu(),
        "ranks": options.ranks,
        "vllm": importlib.metadata.version("vllm"),
        "nccl": nccl_version(),
        "engines": {},
    }
    name = "vllm-ranks" if options.ranks == 2 else f"vllm-{options.ranks}-ranks"
    with tempfile.TemporaryDirectory() as folder:
        if options.load_format == "dummy":
            shutil.copy(options.config, folder)
        else:
            write_checkpoint(options.config, Path(folder))
        for mode in options.modes:
            if (measured := run(mode, folder, options)) is None:
                print(f"{mode}: nothing was measured; see the output above", flush=True)
                continue
            record["engines"][mode] = measured
            # What is measured is measured, whatever becomes of the next.
            write(name, record, to_markdown, options.out)
    print(to_markdown(record))


if __name__ == "__main__":
    main()
