"""Two engines on one GPU whose KV caches grow and shrink while they serve.

``trade``: memory goes from one cache to the other and back, many times, while both answer requests: how long that
takes, whether a request failed or got other tokens, and the throughput of an engine before and after.
``burst``: requests per second with a fixed half for each engine, and with MEMSAVER_KV_CACHE, by which the engines hand
memory to each other; load on one of them, and on both.

    python benchmarks/elastic.py                                  # two vLLM engines of Qwen2-1.5B's shape
    python benchmarks/elastic.py --engine reference --trades 5    # on the host driver, without a GPU
    python benchmarks/elastic.py --parts burst --requests 256
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from _checkpoint import CONFIG, write_checkpoint
from _http_engines import Kind, ask, started, vllm
from _machine import touch_host_memory
from _record import new_parser, new_result, write
from turns import about_engines

NAMES = ("alpha", "beta")
SMALL = 0.25
GIB = 1 << 30


def reference(options: argparse.Namespace) -> Kind:
    arguments = (
        "-m",
        "memsaver_server.cli",
        "serve",
        "--port",
        "{port}",
        "--kv-cache-bytes",
        "48MiB",
        "--max-len",
        "512",
    )
    environment = {"OMP_NUM_THREADS": "1", "MEMSAVER_DRIVER": "host", "MEMSAVER_HOST_DEVICE": f"elastic-{os.getpid()}"}
    sampling = {"max_new_tokens": options.tokens, "temperature": 0, "ignore_eos": True}
    return Kind(arguments, {**environment, "MEMSAVER_HOST_CAPACITY": "180MiB"}, body={"sampling_params": sampling})


def with_prompt(kind: Kind, model: str, number: int, length: int) -> dict[str, Any]:
    """A prompt that is like no other, so that a cached prefix shortens few."""
    ids = [(7919 * (place + 3) * (number + 1)) % 240 + 10 for place in range(length)]
    return {**kind.body, "model": model, "prompt" if "prompt" in kind.body else "input_ids": ids}


@dataclass
class Load:
    """What was answered while it was on."""

    answered: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: int = 0  # answers with other tokens than the first one to the same prompt
    seconds: float = 0.0

    @property
    def per_second(self) -> float:
        return self.answered / self.seconds


class Engine:
    def __init__(self, client: httpx.Client, kind: Kind, name: str, options: argparse.Namespace) -> None:
        self.client, self.name = client, name
        self._kind, self._options = kind, options
        self._expected: dict[int, list[int]] = {}

    def resize(self, fraction: float) -> dict[str, Any]:
        answer = self.client.post("/kv_cache", json={"fraction": fraction, "timeout_s": 120})
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    @contextmanager
    def load(self, requests: int) -> Iterator[Load]:
        """So many requests at a time while the block runs; those in flight at its end are waited for."""
        found, lock, ended = Load(), threading.Lock(), threading.Event()

        def repeat(first: int) -> None:
            with httpx.Client(base_url=self.client.base_url, timeout=300) as client:
                while not ended.is_set():
                    body = with_prompt(self._kind, self.name, first, self._options.prompt)
                    try:
                        _, tokens = ask(client, self._kind.path, body)
                    except (RuntimeError, httpx.HTTPError, ValueError) as error:
                        with lock:
                            found.failed.append(str(error)[:200])
                        continue
                    with lock:
                        found.answered += 1
                        found.wrong += tokens != self._expected.setdefault(first, tokens)

        begin = time.perf_counter()
        with ThreadPoolExecutor(requests) as pool:
            running = [pool.submit(repeat, number) for number in range(requests)]
            try:
                yield found
            finally:
                ended.set()
            for each in running:
                each.result()
        found.seconds = time.perf_counter() - begin


@contextmanager
def engines(kind: Kind, options: argparse.Namespace) -> Iterator[list[Engine]]:
    """Two engines; each has a small cache."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        both = []
        for name in NAMES:
            client = stack.enter_context(started(kind, name, Path(folder)))
            both.append(Engine(client, kind, name, options))
            both[-1].resize(SMALL)  # makes room for the next one
        yield both


def throughput(engine: Engine, options: argparse.Namespace) -> float:
    with engine.load(options.requests) as load:
        time.sleep(options.seconds)
    return load.per_second


def trade(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    large = 1.0 - SMALL
    with engines(kind, options) as (one, other):
        one.resize(large)
        before = throughput(one, options)
        moved: list[dict[str, float]] = []
        with one.load(options.requests // 2) as first, other.load(options.requests // 2) as second:
            giver, taker = one, other
            for _ in range(options.trades):
                given, taken = giver.resize(SMALL), taker.resize(large)
                waited = sum(each["seconds"] for each in given["phases"] if each["name"] == "drain")
                row = {"bytes": given["released_bytes"], "waited": waited, "give": given["seconds"] - waited}
                moved.append({**row, "take": taken["seconds"]})
                giver, taker = taker, giver
                time.sleep(options.pause)
        (other if giver is other else one).resize(SMALL)
        one.resize(large)
        after = throughput(one, options)
    loads = {
        name: {"answered": load.answered, "failed": load.failed, "wrong": load.wrong}
        for name, load in zip(NAMES, (first, second), strict=True)
    }
    return {"moved": moved, "loads": loads, "before": before, "after": after}


def burst(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in ("fixed", "balanced"):
        bounds = {"MEMSAVER_KV_CACHE": options.bounds} if way == "balanced" else {}
        with engines(replace(kind, environment={**kind.environment, **bounds}), options) as both:
            for engine in both:
                engine.resize(0.5)
            with both[0].load(options.requests) as alone:
                time.sleep(options.seconds)
            with both[0].load(options.requests) as first, both[1].load(options.requests) as second:
                time.sleep(options.seconds)
            found[way] = {"one": alone.per_second, "both": first.per_second + second.per_second}
            found[way]["failed"] = len(alone.failed) + len(first.failed) + len(second.failed)
        print(way, found[way], file=sys.stderr, flush=True)
    return found


def to_markdown(result: dict[str, Any]) -> str:
    lines = [f"# KV caches that grow and shrink: {result['machine']}", "", f"{result['date']}, `{result['command']}`."]
    lines += [result["about"], f"{result['requests']} requests at a time, prompts of {result['prompt']} tokens.", ""]
    if found := result.get("trade"):
        moved = found["moved"]

        def milliseconds(key: str) -> str:
            values = [1e3 * each[key] for each in moved]
            return f"{statistics.median(values):,.0f} ({max(values):,.0f})"

        lines += [
            f"{len(moved)} trades of {moved[0]['bytes'] / GIB:.2f} GiB under load, ms, median (slowest):",
            "",
            "| wait for requests | give | take |",
            "|---|---|---|",
            f"| {milliseconds('waited')} | {milliseconds('give')} | {milliseconds('take')} |",
            "",
            "| engine | answered | failed | other tokens |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {load['answered']} | {len(load['failed'])} | {load['wrong']} |"
            for name, load in found["loads"].items()
        ]
        lines += ["", f"One engine alone: {found['before']:.2f} requests/s before, {found['after']:.2f} after.", ""]
    if found := result.get("burst"):
        lines += ["| requests/s | load on one | load on both | failed |", "|---|---|---|---|"]
        lines += [f"| {way} | {row['one']:.2f} | {row['both']:.2f} | {row['failed']} |" for way, row in found.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--engine", choices=["vllm", "reference"], default="vllm")
    parser.add_argument("--parts", nargs="+", choices=["trade", "burst"], default=["trade", "burst"])
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the shape that vLLM serves")
    parser.add_argument("--utilization", type=float, default=0.55, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--piece", default="32MiB", help="MEMSAVER_KV_CACHE_PIECE")
    parser.add_argument("--bounds", default="1GiB..200GiB", help="MEMSAVER_KV_CACHE of the burst")
    parser.add_argument("--trades", type=int, default=50)
    parser.add_argument("--requests", type=int, default=64, help="at a time")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each measurement of throughput")
    parser.add_argument("--pause", type=float, default=0.2, help="between two trades, seconds")
    options = parser.parse_args()
    result: dict[str, Any] = {**new_result("elastic.py"), "requests": options.requests, "prompt": options.prompt}
    with tempfile.TemporaryDirectory() as folder:
        if options.engine == "vllm":
            touch_host_memory()
            write_checkpoint(options.config, Path(folder))
            result |= about_engines(options.utilization)
            kind = vllm(folder, options.utilization, [], options.tokens)
            kind = replace(kind, environment={**kind.environment, "MEMSAVER_KV_CACHE_PIECE": options.piece})
        else:
            result |= {"machine": "host driver, no GPU", "about": "Reference engines."}
            kind = reference(options)
        for part in options.parts:
            result[part] = {"trade": trade, "burst": burst}[part](kind, options)
            page = write("elastic", result, to_markdown, options.out)
    print(page)


if __name__ == "__main__":
    main()
