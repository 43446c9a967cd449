"""vLLM's sleep mode, stock and by memsaver: the same script on the same model, each in a separate process.

Writes a checkpoint of seeded random weights, starts an engine once to fill vLLM's compile cache, and then measures
both: memory left asleep as nvidia-smi counts it, seconds of sleep and wake-up as the caller of ``LLM`` sees them,
tokens and checksums of the weights after each cycle, and who holds what is left.

    python benchmarks/vllm_sleep.py                     # Qwen2-1.5B's shape; needs vLLM and a GPU of 16 GiB or more
    python benchmarks/vllm_sleep.py --cycles 2 --out /tmp
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pynvml
import torch
from _checkpoint import CONFIG, PROMPTS, write_checkpoint
from _machine import MIB, about_gpu, touch_host_memory, used_mib
from _record import new_parser, new_result, write

MODES = ("stock", "memsaver")
WITHOUT_GRAPHS = "without graphs"
#: An engine has some time between its start and its first sleep, in which memsaver prepares host memory; and the driver
#: some while it sleeps, in which it cleans what it was given back. Seconds.
IDLE_S = 2.0


# -- run inside vLLM's worker ------------------------------------------------------------------------------------------


def weight_sums(worker: Any) -> list[int]:
    """A checksum of each parameter's bits."""
    return [
        int(tensor.detach().contiguous().view(torch.int16).to(torch.int64).sum())
        for _, tensor in sorted(worker.model_runner.model.named_parameters())
    ]


def held_by_torch(worker: Any) -> dict[str, float]:
    """MiB that torch holds of ordinary memory, by pool: its default one and those of CUDA graphs that nobody tagged."""
    from memsaver_core import process

    saver = process.existing_saver()
    held = {"default pool": 0.0, "other pools": 0.0}
    for segment in torch.cuda.memory_snapshot():
        if saver is not None and saver.owns(segment["address"]):
            continue
        if saver is None and tuple(segment["segment_pool_id"]) in _sleeping_pools():
            continue
        held["default pool" if tuple(segment["segment_pool_id"]) == (0, 0) else "other pools"] += segment["total_size"]
    return {name: size / MIB for name, size in held.items()}


def _sleeping_pools() -> set[tuple[int, int]]:
    from vllm.device_allocator.cumem import CuMemAllocator

    entries = CuMemAllocator.get_instance().allocator_and_pools.values()
    pairs = [pair for entry in entries for pair in (entry if isinstance(entry, list) else [entry])]
    return {tuple(pool.id) for pool, _ in pairs}


# -- one engine --------------------------------------------------------------------------------------------------------


def measure(model: str, mode: str, cycles: int, utilization: float) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    empty = used_mib()
    begin = time.monotonic()
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enable_sleep_mode=True,
        gpu_memory_utilization=utilization,
        max_model_len=2048,
        **({"compilation_config": {"cudagraph_mode": "NONE"}} if mode == WITHOUT_GRAPHS else {}),
    )
    started = time.monotonic() - begin

    def tokens() -> list[list[int]]:
        sampling = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, max_tokens=32)
        answers = []
        for prompt in PROMPTS:  # one at a time: batches are not reproducible from run to run, sleep or none
            llm.reset_prefix_cache()
            [output] = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
            answers.append(list(output.outputs[0].token_ids))
        return answers

    def timed(call: Callable[..., Any], *arguments: Any) -> float:
        start = time.perf_counter()
        call(*arguments)
        return time.perf_counter() - start

    first = tokens()
    if cycles == 0:
        llm.sleep(1)
        return {"outside_torch_mib": used_mib() - empty - sum(llm.collective_rpc(held_by_torch)[0].values())}
    sums = llm.collective_rpc(weight_sums)
    time.sleep(IDLE_S)
    result: dict[str, Any] = {
        "start_seconds": started,
        "distinct_tokens": len({token for answer in first for token in answer}),
        "loaded_mib": used_mib() - empty,
        "level_1": [],
        "level_1_rested": [],
        "level_2": [],
        "level_3": [],
    }

    def cycle(name: str, level: int, rest: float) -> None:
        row: dict[str, Any] = {"sleep": timed(llm.sleep, level), "left_mib": used_mib() - empty}
        row["held_by_torch"] = llm.collective_rpc(held_by_torch)[0]
        time.sleep(rest)
        if level == 1:
            row["wake"] = timed(llm.wake_up)
        else:
            row["wake_weights"] = timed(llm.wake_up, ["weights"])
            row["reload"] = timed(llm.collective_rpc, "reload_weights")
            row["wake_kv_cache"] = timed(llm.wake_up, ["kv_cache"])
        finish(name, row)

    def finish(name: str, row: dict[str, Any]) -> None:
        row["awake_mib"] = used_mib() - empty
        row["tokens_equal"] = tokens() == first
        row["weights_equal"] = llm.collective_rpc(weight_sums) == sums
        result[name].append(row)

    for _ in range(cycles):
        cycle("level_1", 1, 0)
    for _ in range(cycles):
        cycle("level_1_rested", 1, IDLE_S)
    for _ in range(cycles):
        cycle("level_2", 2, IDLE_S)
    if mode == "memsaver":
        from memsaver_core.ranks.protocol import REQUESTS, Introduce
        from memsaver_server.integrations.vllm.plugin import attach_to

        [answer] = llm.collective_rpc("memsaver", args=(REQUESTS.encode(Introduce()),))
        obstacles = answer["fields"]["introduction"]["obstacles"]
        result["tags"], result["blockers"] = answer["fields"]["status"]["tags"], obstacles
        with attach_to(llm) as server, httpx.Client(base_url=server.url, timeout=30) as client:

            def post(path: str) -> None:
                client.post(path).raise_for_status()

            try:
                for _ in range(0 if obstacles else cycles):
                    row = {"sleep": timed(post, "/sleep?level=3"), "left_mib": used_mib() - empty}
                    time.sleep(IDLE_S)
                    row["wake"] = timed(post, "/wake_up")
                    finish("level_3", row)
            except httpx.HTTPError as error:
                result["blockers"].append(str(error))
    return result


def context_mib() -> float:
    """What a process holds of the device that has done next to nothing there."""
    empty = used_mib()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return used_mib() - empty - torch.cuda.memory_reserved() / MIB


def logged_seconds(log: str, cycles: int) -> dict[str, list[float]]:
    """The seconds of level 1 by vLLM's own log: those of its executor, without the way from the caller and back."""
    slept, woke = (
        [float(seconds) for seconds in re.findall(rf"It took ([\d.]+) seconds to {what}", log)][: 2 * cycles]
        for what in ("fall asleep", "wake up")
    )
    return {"sleep": slept, "wake": woke[:cycles], "wake_rested": woke[cycles:]}


def run(mode: str, model: str, cycles: int, utilization: float) -> dict[str, Any]:
    """Measure one mode in a separate process."""
    environment = {
        **os.environ,
        "MEMSAVER_VLLM": "0" if mode == "stock" else "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    arguments = ["--child", mode, "--model", model, "--cycles", str(cycles), "--utilization", str(utilization)]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "result.json"
        log = Path(folder) / "log"
        with log.open("w") as output:
            command = [sys.executable, __file__, *arguments, "--answer", str(answer)]
            ended = subprocess.run(command, check=False, env=environment, timeout=600, stdout=output, stderr=output)
        print(log.read_text(), flush=True)
        ended.check_returncode()
        result: dict[str, Any] = json.loads(answer.read_text())
        result["logged"] = logged_seconds(log.read_text(), cycles)
    return result


def to_markdown(result: dict[str, Any]) -> str:
    engines = result["engines"]
    modes = list(engines)

    def median(name: str, key: str, scale: float = 1e3, skip: int = 0) -> list[str]:
        return [
            f"{statistics.median(row[key] for row in rows[skip:]) * scale:,.0f}"
            if (rows := engines[mode][name])
            else "-"
            for mode in modes
        ]

    def right(name: str) -> list[str]:
        return [
            f"{sum(row['tokens_equal'] and row['weights_equal'] for row in rows)} of {len(rows)}"
            if (rows := engines[mode][name])
            else "-"
            for mode in modes
        ]

    def logged(name: str, take: slice) -> list[str]:
        return [f"{statistics.median(engines[mode]['logged'][name][take]) * 1e3:,.0f}" for mode in modes]

    table = [
        ("loaded, MiB", [f"{engines[mode]['loaded_mib']:,.0f}" for mode in modes]),
        ("level 1: first sleep, ms", [f"{engines[mode]['level_1'][0]['sleep'] * 1e3:,.0f}" for mode in modes]),
        ("level 1: first sleep, ms, by vLLM's log", logged("sleep", slice(1))),
        ("level 1: later sleeps, ms", median("level_1", "sleep", skip=1)),
        ("level 1: later sleeps, ms, by vLLM's log", logged("sleep", slice(1, None))),
        ("level 1: wake-up at once, ms", median("level_1", "wake")),
        ("level 1: wake-up at once, ms, by vLLM's log", logged("wake", slice(None))),
        (f"level 1: wake-up after {IDLE_S:g} s asleep, ms", median("level_1_rested", "wake")),
        (f"level 1: wake-up after {IDLE_S:g} s asleep, ms, by vLLM's log", logged("wake_rested", slice(None))),
        ("level 1: left asleep, MiB", median("level_1", "left_mib", 1)),
        ("level 1: cycles with equal tokens and weights", right("level_1")),
        ("level 2: sleep, ms", median("level_2", "sleep")),
        ("level 2: wake-up of the weights, ms", median("level_2", "wake_weights")),
        ("level 2: reload, ms", median("level_2", "reload")),
        ("level 2: wake-up of the KV cache, ms", median("level_2", "wake_kv_cache")),
        ("level 2: left asleep, MiB", median("level_2", "left_mib", 1)),
        ("level 2: cycles with equal tokens and weights", right("level_2")),
        ("level 3 (hibernated): sleep, ms", median("level_3", "sleep")),
        (f"level 3: wake-up after {IDLE_S:g} s asleep, ms", median("level_3", "wake")),
        ("level 3: left asleep, MiB", median("level_3", "left_mib", 1)),
        ("level 3: cycles with equal tokens and weights", right("level_3")),
    ]
    lines = [
        f"# vLLM's sleep mode: {result['gpu']}, driver {result['driver']}, "
        f"vLLM {result['vllm']}, torch {result['torch']}",
        "",
        f"{result['date']}, `{result['command']}`. Device memory as nvidia-smi counts it; times as the caller of `LLM` "
        f"sees them, medians of {len(engines[modes[0]]['level_1'])} cycles. CUDA graphs on. The first sleep is "
        f"{IDLE_S:g} s after the engine's start, on a machine whose memory was touched before.",
        "",
        f"| | {' | '.join(modes)} |",
        f"|---|{'---|' * len(modes)}",
        *(f"| {name} | {' | '.join(cells)} |" for name, cells in table),
        "",
        "## What is left asleep, level 1, MiB",
        "",
        f"| | {' | '.join(modes)} |",
        f"|---|{'---|' * len(modes)}",
    ]
    last = [engines[mode]["level_1"][-1] for mode in modes]
    rows = [(f"torch, {name}", [row["held_by_torch"][name] for row in last]) for name in last[0]["held_by_torch"]]
    rows.append(("outside torch", [row["left_mib"] - sum(row["held_by_torch"].values()) for row in last]))
    lines += [f"| {name} | {' | '.join(f'{size:,.0f}' for size in sizes)} |" for name, sizes in rows]
    if parts := result["outside_torch"]:
        lines += [
            "",
            f"Of what is outside torch, a process that has run one kernel holds {parts['context_mib']:,.0f} MiB; with "
            f"the modules of the engine's kernels and what libraries hold it is {parts['ungraphed_mib']:,.0f} MiB (an "
            "engine without CUDA graphs, asleep by memsaver). The rest is what CUDA keeps for captured graphs.",
        ]
    if "memsaver" in engines:
        lines += ["", "## Tags", "", "| tag | comes back | MiB |", "|---|---|---|"]
        lines += [
            f"| {tag['tag']} | {tag['restore']} | {tag['bytes'] / MIB:,.0f} |" for tag in engines["memsaver"]["tags"]
        ]
        if engines["memsaver"]["blockers"]:
            lines += ["", f"Level 3 was not measured: {'; '.join(engines['memsaver']['blockers'])}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the shape to serve")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--utilization", type=float, default=0.5, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    pynvml.nvmlInit()
    if options.child:
        result = measure(options.model, options.child, options.cycles, options.utilization)
        options.answer.write_text(json.dumps(result))
        return
    touch_host_memory()
    engines: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(options.config, Path(folder))
        run("stock", folder, 0, options.utilization)
        for mode in options.modes:
            engines[mode] = run(mode, folder, options.cycles, options.utilization)
            write_all(options.out, engines, {})  # what is measured is measured, whatever becomes of the next
        ungraphed = run(WITHOUT_GRAPHS, folder, 0, options.utilization)["outside_torch_mib"]
        page = write_all(options.out, engines, {"context_mib": context_mib(), "ungraphed_mib": ungraphed})
    print(page)


def write_all(folder: Path, engines: dict[str, Any], outside_torch: dict[str, float]) -> str:
    record = {
        **new_result("vllm_sleep.py"),
        **about_gpu(),
        "vllm": importlib.metadata.version("vllm"),
        "engines": engines,
        "outside_torch": outside_torch,
    }
    return write("vllm", record, to_markdown, folder)


if __name__ == "__main__":
    main()
