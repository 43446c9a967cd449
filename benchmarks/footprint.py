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
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pynvml
import torch
from _checkpoint import CONFIG
from _machine import MIB, about_gpu, used_mib
from _probing import PATHS, Timeline, percentiles, probing, slowest
from _record import new_parser, new_result, write

from memsaver_server.cli.units import parse_size

#: The one published table of this kind: an engine with a model of this size on one H100, without CUDA graphs, released
#: by its framework's own means. MiB and milliseconds.
PUBLISHED = {"loaded": 40804, "given_back": 39846, "resume": 18}
#: How long the probes are to look at a hibernated process, seconds.
HIBERNATED_S = 0.2


def bare_process(config: Path) -> None:
    """Run the engine's kernels (one layer of them), give every tensor and graph up, and print what is left, MiB."""
    os.environ["MEMSAVER_ENABLED"] = "0"
    from memsaver_server.reference.engine import TransformersEngine

    before = used_mib()
    shape = json.loads(config.read_text())
    shape["num_hidden_layers"] = 1
    with tempfile.TemporaryDirectory() as folder:
        small = Path(folder) / "config.json"
        small.write_text(json.dumps(shape))
        engine = TransformersEngine(random_weights=small, device="cuda", kv_cache_bytes=512 * MIB)
    for answer in [engine.submit(request) for request in requests(64)]:
        answer.result()
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


def sources(client: httpx.Client) -> list[dict[str, Any]]:
    """What holds the device now, largest first, as the service explains it; the sum is checked against its count."""
    [device] = client.get("/memory_occupation").raise_for_status().json()["devices"]
    if sum(source["bytes"] for source in device["sources"]) != device["used_bytes"]:
        raise RuntimeError(f"the sources do not add up to {device['used_bytes']} bytes: {device['sources']}")
    found = [{"name": each["name"], "kind": each["kind"], "mib": each["bytes"] / MIB} for each in device["sources"]]
    return sorted((each for each in found if each["mib"] > 0), key=lambda each: -each["mib"])


def seconds_of(answer: dict[str, Any], name: str) -> float:
    return float(sum(phase["seconds"] for phase in answer["phases"] if phase["name"].startswith(name)))


def hibernate(url: str, client: httpx.Client, cycles: int, empty: float, expected: list[list[int]]) -> dict[str, Any]:
    """Release with hibernation, wake and resume, again and again, with the probes asked all the while."""
    rows = []
    answer: dict[str, Any] = {}
    asleep: list[dict[str, Any]] = []
    timeline = Timeline()
    with probing(url) as probes:
        for cycle in range(cycles):
            with timeline.operation("releasing", "hibernating", "hibernate", last=True) as done:
                answer = client.post("/release_memory_occupation", json={"hibernate": True}).raise_for_status().json()
                done(answer)
            left = used_mib() - empty
            with timeline.span("hibernated"):
                asleep = sources(client)
                time.sleep(HIBERNATED_S)
            with timeline.operation("resuming", "waking", "wake", last=False) as done:
                resumed = client.post("/resume_memory_occupation").raise_for_status().json()
                done(resumed)
            crowd = 0 if cycle % 10 else 64
            with timeline.span("generating, 64 at once" if crowd else "generating, 1 at once"):
                tokens = generate(client, crowd)
            rows.append(
                {
                    "left_mib": left,
                    "hibernate_seconds": seconds_of(answer, "hibernate"),
                    "wake_seconds": seconds_of(resumed, "wake"),
                    "trim_seconds": seconds_of(answer, "trim"),
                    "tokens_equal": tokens == expected,
                }
            )
    return {
        "cycles": rows,
        "sources": asleep,
        "last_release_phases": phase_rows(answer),
        "last_resume_phases": phase_rows(resumed),
        "probes": percentiles(probes.answers, timeline),
        "slowest_probes": slowest(probes.answers, timeline),
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
        held = {"loaded": sources(client)}
        rows = []
        for cycle in range(cycles):
            loaded = used_mib() - empty
            released = client.post("/release_memory_occupation").raise_for_status().json()
            left = used_mib() - empty
            status = client.get("/memory_occupation").json()
            held["released"] = sources(client)
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
                    "kv_cache_milliseconds": kv["seconds"] * 1e3,
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
        **new_result("footprint.py"),
        **about_gpu(),
        "engine_start_seconds": start_seconds,
        "tags_after_load": health["tags"],
        "bare_process_mib": bare["mib"],
        "device_empty_mib": empty,
        "sources": held,
        "cycles": rows,
        "hibernation": hibernation,
    }


def beside_the_published(result: dict[str, Any]) -> list[str]:
    """The published table's figures, and ours."""
    rows, away = result["cycles"], result["hibernation"]
    last = rows[-1]
    left = PUBLISHED["loaded"] - PUBLISHED["given_back"]
    lines = [
        "## Beside the published table",
        "",
        "Published: one H100, a 1.5B model, no CUDA graphs. Ours: "
        f"{result['gpu']}, a model of that size, CUDA graphs for batches of 1 to 64.",
        "",
        "| | published | memsaver |",
        "|---|---|---|",
        f"| footprint, MiB | {PUBLISHED['loaded']:,} | {last['loaded_mib']:,.0f} |",
        f"| given back by a release | {PUBLISHED['given_back']:,} MiB, "
        f"{100 * PUBLISHED['given_back'] / PUBLISHED['loaded']:.1f} % | "
        f"{last['loaded_mib'] - last['released_mib']:,.0f} MiB, {last['given_back_percent']:.1f} % |",
        f"| left after a release, MiB | {left:,} | {last['released_mib']:,.0f} |",
    ]
    if away:
        worst = max(row["left_mib"] for row in away["cycles"])
        lines.append(f"| left after a release that hibernates, MiB | | {worst:,.0f} |")
    mapping = statistics.median(row["kv_cache_milliseconds"] for row in rows)
    everything = statistics.median(row["resume_milliseconds"] for row in rows)
    release = statistics.median(row["release_milliseconds"] for row in rows)
    lines += [
        f"| release | | {release:,.0f} ms |",
        f"| resume | {PUBLISHED['resume']} ms | KV cache {mapping:,.0f} ms, with weights and graphs that were kept "
        f"{everything:,.0f} ms |",
    ]
    if away:
        slept, woke = (
            statistics.median(row[key] for row in away["cycles"]) for key in ("hibernate_seconds", "wake_seconds")
        )
        lines.append(f"| hibernating adds | | {slept:,.2f} s to a release, {woke:,.2f} s to a resume |")
    return [*lines, ""]


def probe_table(probes: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """How long the probes took, by what the process did meanwhile."""
    lines = [
        "The probes' answers meanwhile, asked for by a separate process; ms, median / 99th percentile / slowest:",
        "",
        "| while | answers | " + " | ".join(f"`{path}`" for path in PATHS) + " |",
        "|---|---|" + "---|" * len(PATHS),
    ]
    for phase, by_path in probes.items():
        cells = [
            "{median:.1f} / {p99:.1f} / {max:.1f}".format(**by_path[path]) if path in by_path else "" for path in PATHS
        ]
        count = sum(int(each["count"]) for each in by_path.values())
        lines.append(f"| {phase} | {count:,} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def source_table(held: dict[str, list[dict[str, Any]]]) -> list[str]:
    names = list(dict.fromkeys(each["name"] for found in held.values() for each in found))
    sizes = {when: {each["name"]: each["mib"] for each in found} for when, found in held.items()}
    lines = [
        "## What is on the device, by who holds it, MiB",
        "",
        "| | " + " | ".join(held) + " |",
        "|---|" + "---|" * len(held),
    ]
    lines += [f"| {name} | " + " | ".join(f"{sizes[when].get(name, 0):,.0f}" for when in held) + " |" for name in names]
    return [*lines, ""]


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
        *beside_the_published(result),
    ]
    away = result["hibernation"]
    if away:
        rows = away["cycles"]
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
            f"Tokens equal in {sum(row['tokens_equal'] for row in rows)} of {len(rows)} cycles.",
            "",
            *probe_table(away["probes"]),
            "The slowest: "
            + "; ".join(
                "`{path}` {ms:.1f} ms, {after_ms:.0f} ms into {while} of cycle {time}".format(**each)
                for each in away["slowest_probes"]
            )
            + ".",
            "",
        ]
    lines += source_table({**result["sources"], **({"hibernated": away["sources"]} if away else {})})
    tables = [
        ("Release", last["release_phases"]),
        ("Resume of kv_cache", last["resume_kv_cache_phases"]),
        ("Resume of the rest", last["resume_rest_phases"]),
    ]
    if away:
        tables += [
            ("Release that hibernates", away["last_release_phases"]),
            ("Resume that wakes", away["last_resume_phases"]),
        ]
    for title, phases in tables:
        lines += [
            f"## {title}, last cycle",
            "",
            "| phase | ms | before MiB | after MiB | delta MiB |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['phase']} | {row['milliseconds']:,.2f} | {row['before_mib']:,.0f} | {row['after_mib']:,.0f} | "
            f"{row['delta_mib']:+,.0f} |"
            for row in phases
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
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the shape to serve")
    parser.add_argument("--kv-cache-bytes", default="36GiB")
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--hibernations", type=int, default=50, help="cycles with hibernation; 0 for none")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    pynvml.nvmlInit()
    if options.bare:
        bare_process(options.config)
        return
    parse_size(options.kv_cache_bytes)
    result = measure(options.config, options.kv_cache_bytes, options.cycles, options.hibernations)
    print(write("footprint", result, to_markdown, options.out))


if __name__ == "__main__":
    main()
