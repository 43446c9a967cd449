"""The footprint of an engine, as nvidia-smi counts it: after load, after release, after resume, phase by phase.

Starts `memsaver serve` with CUDA graphs on, talks to it over HTTP, and compares what a release leaves with
a bare process: one that ran the same kernels and then gave every tensor and graph up, so that it holds a CUDA context
and its modules alone.

    python benchmarks/footprint.py                        # Qwen2-1.5B's shape, about 40,800 MiB
    python benchmarks/footprint.py --kv-cache-bytes 4GiB --cycles 3 --out /tmp
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pynvml
import torch
from _record import command

from memsaver_server.cli.units import parse_size

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "tests" / "data" / "qwen2-1.5b" / "config.json"


def used_mib(index: int = 0) -> float:
    """Device memory in use by all processes, MiB, as nvidia-smi shows it."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    return float(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used) / MIB


def bare_process(config: Path) -> None:
    """Run the engine's kernels (one layer of them), give every tensor and graph up, and print what is left, MiB."""
    os.environ["MEMSAVER_ENABLED"] = "0"
    from memsaver_server.engines.transformers import TransformersEngine

    before = used_mib()
    shape = json.loads(config.read_text())
    shape["num_hidden_layers"] = 1
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "config.json"
        small.write_text(json.dumps(shape))
        engine = TransformersEngine(random_weights=small, device="cuda", kv_cache_bytes=512 * MIB)
    with ThreadPoolExecutor(64) as pool:
        list(pool.map(engine.generate_sync, requests(64)))
    engine.close()
    del engine
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    print(json.dumps({"mib": used_mib() - before, "torch_reserved_mib": torch.cuda.memory_reserved() / MIB}))


def requests(count: int, tokens: int = 24) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": [(37 * i + 11 * j) % 30000 + 10 for j in range(16 + i % 48)],
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0},
        }
        for i in range(count)
    ]


@contextmanager
def server(arguments: list[str]) -> Iterator[str]:
    """`memsaver serve`, until the block ends; gives its address."""
    command = [sys.executable, "-m", "memsaver_server.cli", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " on " not in line:
            raise RuntimeError(f"the server did not start: {line!r}")
        yield line.rsplit(" on ", 1)[1].strip()
    finally:
        process.terminate()
        process.wait(60)


def generate(client: httpx.Client, count: int) -> list[list[int]]:
    """Greedy tokens: first each prompt alone (batch size 1), so that they are reproducible, then all at once."""
    alone = [client.post("/generate", json=body).raise_for_status().json()["output_ids"] for body in requests(8)]
    if count == 0:
        return alone
    with ThreadPoolExecutor(count) as pool:  # fills the large batches; not compared, their sums depend on the company
        list(pool.map(lambda body: client.post("/generate", json=body).raise_for_status(), requests(count)))
    return alone


def phase_rows(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "phase": phase["name"],
            "milliseconds": phase["seconds"] * 1e3,
            "before_mib": phase["devices"][0]["used_before_bytes"] / MIB,
            "after_mib": phase["devices"][0]["used_after_bytes"] / MIB,
            "delta_mib": phase["devices"][0]["delta_bytes"] / MIB,
            "details": phase.get("details", {}),
        }
        for phase in answer["phases"]
        if phase["devices"]
    ]


class Poller:
    """Asks the probes of a server all the time, and keeps the slowest answer of each, seconds."""

    PATHS = ("/livez", "/memory_occupation", "/metrics")

    def __init__(self, url: str) -> None:
        self.slowest = dict.fromkeys(self.PATHS, 0.0)
        self.answers = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,))
        self._thread.start()

    def _run(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=30) as client:
            while not self._stop.is_set():
                for path in self.PATHS:
                    start = time.perf_counter()
                    client.get(path).raise_for_status()
                    self.slowest[path] = max(self.slowest[path], time.perf_counter() - start)
                    self.answers += 1

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def hibernate(url: str, client: httpx.Client, cycles: int, empty: float, expected: list[list[int]]) -> dict[str, Any]:
    """Release with hibernation, wake and resume, again and again, with the probes asked all the while."""

    def seconds(answer: dict[str, Any], name: str) -> float:
        return float(sum(phase["seconds"] for phase in answer["phases"] if phase["name"] == name))

    poller = Poller(url)
    rows = []
    answer: dict[str, Any] = {}
    for cycle in range(cycles):
        answer = client.post("/release_memory_occupation", json={"hibernate": True}).raise_for_status().json()
        left = used_mib() - empty
        resumed = client.post("/resume_memory_occupation").raise_for_status().json()
        tokens = generate(client, 0 if cycle % 10 else 64)
        rows.append(
            {
                "left_mib": left,
                "hibernate_seconds": seconds(answer, "hibernate"),
                "wake_seconds": seconds(resumed, "wake"),
                "trim_seconds": seconds(answer, "trim"),
                "tokens_equal": tokens == expected,
            }
        )
    poller.stop()
    return {
        "cycles": rows,
        "last_release_phases": phase_rows(answer),
        "slowest_probe_seconds": poller.slowest,
        "probe_answers": poller.answers,
    }


def measure(config: Path, kv_cache_bytes: str, cycles: int, hibernations: int) -> dict[str, Any]:
    bare = json.loads(
        subprocess.run(
            [sys.executable, __file__, "--bare", "--config", str(config)], check=True, capture_output=True, text=True
        ).stdout.splitlines()[-1]
    )
    empty = used_mib()
    begin = time.monotonic()
    with (
        server(["--random-weights", str(config), "--kv-cache-bytes", kv_cache_bytes]) as url,
        httpx.Client(base_url=url, timeout=120) as client,
    ):
        start_seconds = time.monotonic() - begin
        expected = generate(client, 64)
        health = client.get("/memory_occupation").json()
        rows = []
        for cycle in range(cycles):
            loaded = used_mib() - empty
            released = client.post("/release_memory_occupation").raise_for_status().json()
            left = used_mib() - empty
            status = client.get("/memory_occupation").json()
            kv = client.post("/resume_memory_occupation", json={"tags": ["kv_cache"]}).raise_for_status().json()
            rest = client.post("/resume_memory_occupation").raise_for_status().json()
            resumed = used_mib() - empty
            tokens = generate(client, 64)
            rows.append(
                {
                    "cycle": cycle,
                    "loaded_mib": loaded,
                    "released_mib": left,
                    "resumed_mib": resumed,
                    "given_back_percent": 100 * (loaded - left) / loaded,
                    "region_bytes_left": sum(tag["resident_bytes"] for tag in status["tags"]),
                    "tokens_equal": tokens == expected,
                    "release_milliseconds": released["seconds"] * 1e3,
                    "resume_milliseconds": (kv["seconds"] + rest["seconds"]) * 1e3,
                    "kv_cache_mapping_milliseconds": 1e3
                    * next(p for p in kv["phases"] if p["name"] == "restore")["details"]["driver_seconds"],
                    "release_phases": phase_rows(released),
                    "resume_kv_cache_phases": phase_rows(kv),
                    "resume_rest_phases": phase_rows(rest),
                    "tags": released["tags"],
                }
            )
        hibernation = hibernate(url, client, hibernations, empty, expected) if hibernations else None
    return {
        "date": time.strftime("%Y-%m-%d"),
        "command": command("footprint.py"),
        "gpu": torch.cuda.get_device_name(0),
        "driver": pynvml.nvmlSystemGetDriverVersion(),
        "torch": torch.__version__,
        "engine_start_seconds": start_seconds,
        "tags_after_load": health["tags"],
        "bare_process_mib": bare["mib"],
        "device_empty_mib": empty,
        "cycles": rows,
        "hibernation": hibernation,
    }


def to_markdown(result: dict[str, Any]) -> str:
    last = result["cycles"][-1]
    lines = [
        f"# Footprint of an engine: {result['gpu']}, driver {result['driver']}, torch {result['torch']}",
        "",
        f"{result['date']}, `{result['command']}`. Device memory as nvidia-smi counts it, CUDA graphs on.",
        "",
        "| cycle | loaded MiB | after release | given back | after resume | release ms | resume ms | tokens equal |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['cycle']} | {row['loaded_mib']:,.0f} | {row['released_mib']:,.0f} | "
            f"{row['given_back_percent']:.2f} % | {row['resumed_mib']:,.0f} | {row['release_milliseconds']:,.1f} | "
            f"{row['resume_milliseconds']:,.1f} | {'yes' if row['tokens_equal'] else 'NO'} |"
            for row in result["cycles"]
        ),
        "",
        f"Left after release: {last['released_mib']:,.0f} MiB; a bare process with the same kernels loaded holds "
        f"{result['bare_process_mib']:,.0f} MiB. Bytes of regions left: {last['region_bytes_left']}.",
        f"Mapping the KV cache alone (tag `kv_cache`, restore `zero`): "
        f"{statistics.median(row['kv_cache_mapping_milliseconds'] for row in result['cycles']):.2f} ms (median).",
        "",
    ]
    away = result["hibernation"]
    if away:
        rows = away["cycles"]
        probes = ", ".join(
            f"`{path}` {1e3 * slowest:,.0f} ms" for path, slowest in away["slowest_probe_seconds"].items()
        )
        lines += [
            f"## Hibernated, {len(rows)} cycles",
            "",
            "| | median | max |",
            "|---|---|---|",
            *(
                f"| {name} | {statistics.median(row[key] for row in rows) * scale:,.{digits}f} | "
                f"{max(row[key] for row in rows) * scale:,.{digits}f} |"
                for name, key, scale, digits in (
                    ("left on the device, MiB", "left_mib", 1, 0),
                    ("beyond the release: hibernate, ms", "hibernate_seconds", 1e3, 0),
                    ("beyond the release: trim, ms", "trim_seconds", 1e3, 0),
                    ("beyond the resume: wake, ms", "wake_seconds", 1e3, 0),
                )
            ),
            "",
            f"Tokens equal in {sum(row['tokens_equal'] for row in rows)} of {len(rows)} cycles. Slowest answer of "
            f"{away['probe_answers']:,} probes meanwhile: {probes}.",
            "",
        ]
    for title, key in (
        ("Release", "release_phases"),
        ("Resume of kv_cache", "resume_kv_cache_phases"),
        ("Resume of the rest", "resume_rest_phases"),
    ):
        lines += [
            f"## {title}, last cycle",
            "",
            "| phase | ms | before MiB | after MiB | delta MiB |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['phase']} | {row['milliseconds']:,.2f} | {row['before_mib']:,.0f} | {row['after_mib']:,.0f} | "
            f"{row['delta_mib']:+,.0f} |"
            for row in last[key]
        ]
        lines.append("")
    lines += ["## Tags, last release", "", "| tag | restore | released MiB | copied MiB | unchanged MiB |"]
    lines.append("|---|---|---|---|---|")
    lines += [
        f"| {tag['tag']} | {tag['restore']} | {tag['released_bytes'] / MIB:,.0f} | "
        f"{tag['backed_up_bytes'] / MIB:,.0f} | {tag['unchanged_bytes'] / MIB:,.0f} |"
        for tag in last["tags"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the shape to serve")
    parser.add_argument("--kv-cache-bytes", default="36GiB")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--hibernations", type=int, default=50, help="cycles with hibernation; 0 for none")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    pynvml.nvmlInit()
    if options.bare:
        bare_process(options.config)
        return
    parse_size(options.kv_cache_bytes)
    result = measure(options.config, options.kv_cache_bytes, options.cycles, options.hibernations)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "footprint.json").write_text(json.dumps(result, indent=1) + "\n")
    (options.out / "footprint.md").write_text(to_markdown(result))
    print(to_markdown(result))


if __name__ == "__main__":
    main()
