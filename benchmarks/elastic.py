"""Two engines on one GPU whose KV caches grow and shrink while they serve.

``trade``: memory goes from one cache to the other and back, many times, while both answer requests: how long that
takes, whether a request failed or got other tokens than before any resize, whether graphs were captured, and the
throughput of an engine before and after.
``burst``: requests per second while each cache is limited to half of the memory, and without that limit, when the
engines hand memory to each other by MEMSAVER_KV_CACHE. Prompts come again and again. Those of one engine fill 1.3 times
its half while the other has none; then those of each fill 0.7 times.
``kvcached``: the load of the burst on two vLLM engines with kvcached (https://github.com/ovg-project/kvcached). Each
may keep all prefixes of the load on one. The row is added to the result of a burst in ``--out``.

    python benchmarks/elastic.py                                  # two vLLM engines of Qwen2-1.5B's shape
    python benchmarks/elastic.py --engine reference --trades 5    # on the host driver, without a GPU
    python benchmarks/elastic.py --parts burst --requests 256
    python benchmarks/elastic.py --parts kvcached --kvcached DIR  # a folder into which pip has installed it
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, repeat
from pathlib import Path
from typing import Any

import httpx
from _checkpoint import CONFIG, write_checkpoint
from _http_engines import Kind, ask, started, vllm
from _machine import touch_host_memory
from _record import new_parser, new_result, write
from turns import about_engines

NAMES = ("alpha", "beta")
SMALL = 0.2
GIB = 1 << 30
#: What prompts fill of a fixed half: of one engine, and of each of two.
LOPSIDED, EVEN = 1.3, 0.7


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
    """A prompt that begins like no other, so that a cached prefix is of the same prompt."""
    ids = [
        number % 240 + 10,
        number // 240 + 10,
        *((7919 * (place + number)) % 240 + 10 for place in range(length - 2)),
    ]
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
    def __init__(self, client: httpx.Client, kind: Kind, name: str, folder: Path, options: argparse.Namespace) -> None:
        self.client, self.name = client, name
        self._kind, self._options, self._log = kind, options, folder / f"{name}.log"
        self._expected: dict[int, list[int]] = {}

    def resize(self, fraction: float) -> dict[str, Any]:
        answer = self.client.post("/kv_cache", json={"fraction": fraction, "timeout_s": 120})
        found: dict[str, Any] = answer.raise_for_status().json()
        return found

    def cache(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/kv_cache").raise_for_status().json()
        return found

    def captures(self) -> int:
        """How often the log speaks of capturing."""
        return self._log.read_text().lower().count("captur")

    @contextmanager
    def load(self, requests: int, prompts: int) -> Iterator[Load]:
        """So many requests at a time while the block runs, of so many prompts in turn. Those in flight at its end are
        waited for."""
        found, lock, ended, numbers = Load(), threading.Lock(), threading.Event(), count()

        def ask_on() -> None:
            with httpx.Client(base_url=self.client.base_url, timeout=300) as client:
                while not ended.is_set():
                    number = next(numbers) % prompts
                    body = with_prompt(self._kind, self.name, number, self._options.prompt)
                    try:
                        _, tokens = ask(client, self._kind.path, body)
                    except (RuntimeError, httpx.HTTPError, ValueError) as error:
                        with lock:
                            found.failed.append(str(error)[:200])
                        continue
                    with lock:
                        found.answered += 1
                        found.wrong += tokens != self._expected.setdefault(number, tokens)

        begin = time.perf_counter()
        with ThreadPoolExecutor(requests) as pool:
            running = [pool.submit(ask_on) for _ in range(requests)]
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
            both.append(Engine(client, kind, name, Path(folder), options))
            throughput(both[-1], options.requests, options, 1)  # the tokens of a cache that was never resized
            both[-1].resize(SMALL)  # makes room for the next one
        yield both


def throughput(engine: Engine, prompts: int, options: argparse.Namespace, seconds: float) -> float:
    with engine.load(options.requests, prompts) as load:
        time.sleep(seconds)
    return load.per_second


def seconds(answer: dict[str, Any], phase: str) -> float:
    return sum(each["seconds"] for each in answer["phases"] if each["name"] == phase)


def trade(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    large, half = 1.0 - SMALL, options.requests // 2
    kind = replace(kind, environment={**kind.environment, "VLLM_BATCH_INVARIANT": "1"})  # or tokens depend on the load
    with engines(kind, options) as (one, other):
        one.resize(large)
        captured = one.captures(), other.captures()
        before = throughput(one, options.requests, options, options.seconds)
        moved: list[dict[str, float]] = []
        with one.load(half, half) as first, other.load(half, half) as second:
            giver, taker = one, other
            for _ in range(options.trades):
                given, taken = giver.resize(SMALL), taker.resize(large)
                waited = seconds(given, "drain")
                row = {"bytes": given["released_bytes"], "waited": waited, "give": given["seconds"] - waited}
                row |= {"take": taken["seconds"], "unmap": seconds(given, "resize"), "map": seconds(taken, "resize")}
                moved.append(row)
                giver, taker = taker, giver
                time.sleep(options.pause)
        other.resize(SMALL)
        one.resize(large)
        after = throughput(one, options.requests, options, options.seconds)
        again = one.captures() - captured[0], other.captures() - captured[1]
    loads = {
        name: {"answered": load.answered, "failed": load.failed, "wrong": load.wrong, "captures": captures}
        for name, load, captures in zip(NAMES, (first, second), again, strict=True)
    }
    return {"moved": moved, "loads": loads, "before": before, "after": after}


def burst(kind: Kind, options: argparse.Namespace) -> dict[str, Any]:
    kind = replace(kind, environment={**kind.environment, "MEMSAVER_KV_CACHE": options.bounds})
    with engines(kind, options) as both:
        found: dict[str, Any] = {"half": (half := fixed_half(both)), "ways": {}}
        for way, fraction in (("fixed", half["fraction"]), ("balanced", 1.0)):
            for engine in both:
                engine.resize(fraction)  # 1.0 lifts the limit that a resize sets
            found["ways"][way] = bursts(both, half["tokens"], options, lambda engine: engine.cache()["bytes"])
            print(way, found["ways"][way], file=sys.stderr, flush=True)
    return found


def kvcached(kind: Kind, options: argparse.Namespace, tokens: float) -> dict[str, Any]:
    """As ``burst``; a fixed half holds ``tokens``."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        # kvcached patches vLLM from a .pth file, which Python reads only in its folders of packages.
        Path(folder, "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(options.kvcached)!r})\n")
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        environment = {"ENABLE_KVCACHED": "true", "KVCACHED_MAX_CACHED_TOKENS": str(int(LOPSIDED * tokens))}
        # With vLLM 0.26 it supports the first model runner only.
        environment |= {"MEMSAVER_VLLM": "0", "VLLM_USE_V2_MODEL_RUNNER": "0", "PYTHONPATH": path}
        command = tuple(part for part in kind.command if part != "--enable-sleep-mode")
        kind = replace(kind, command=command, environment={**kind.environment, **environment})
        both = [
            Engine(stack.enter_context(started(kind, name, Path(folder))), kind, name, Path(folder), options)
            for name in NAMES
        ]
        return bursts(both, tokens, options, lambda engine: None)


def bursts(
    both: list[Engine], half: float, options: argparse.Namespace, size: Callable[[Engine], int | None]
) -> dict[str, Any]:
    """Load on one, and then on both; a fixed half holds ``half`` tokens."""
    lopsided, even = (int(share * half / options.prompt) for share in (LOPSIDED, EVEN))
    throughput(both[0], lopsided, options, options.warm_up)
    with both[0].load(options.requests, lopsided) as alone:
        time.sleep(options.seconds)
    sizes = [size(engine) for engine in both]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(throughput, both, repeat(even), repeat(options), repeat(options.warm_up)))
    with both[0].load(options.requests, even) as first, both[1].load(options.requests, even) as second:
        time.sleep(options.seconds)
    sizes += [size(engine) for engine in both]
    failed = [load.failed for load in (alone, first, second)]
    rates = {"one": alone.per_second, "both": first.per_second + second.per_second}
    return {**rates, "sizes": sizes, "failed": sum(map(len, failed)), "why": [each[0] for each in failed if each]}


def fixed_half(both: list[Engine]) -> dict[str, float]:
    """The largest size that both caches can have at a time."""
    caches = [engine.cache() for engine in both]
    size = sum(each["bytes"] for each in caches) + min(each["largest_bytes"] - each["bytes"] for each in caches)
    one = caches[0]
    fraction = min(1.0, size / 2 / one["full_bytes"])
    return {"fraction": fraction, "tokens": fraction * one["full_bytes"] / one["page_bytes"] * one["page_tokens"]}


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
            "| wait for requests | give | of it, ranks | take | of it, ranks |",
            "|---|---|---|---|---|",
            "| " + " | ".join(map(milliseconds, ("waited", "give", "unmap", "take", "map"))) + " |",
            "",
            "| engine | answered | failed | other tokens | captures |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {load['answered']} | {len(load['failed'])} | {load['wrong']} | {load['captures']} |"
            for name, load in found["loads"].items()
        ]
        lines += ["", f"One engine alone: {found['before']:.2f} requests/s before, {found['after']:.2f} after.", ""]
    if found := result.get("burst"):
        lines += [
            f"A fixed half holds {found['half']['tokens']:,.0f} tokens. Sizes of the two caches at the end, GiB:",
            "",
        ]
        lines += ["| requests/s | load on one | sizes | load on both | sizes | failed |", "|---|---|---|---|---|---|"]
        for way, row in found["ways"].items():
            sizes = ["" if each is None else f"{each / GIB:.1f}" for each in row["sizes"]]
            lines += [
                f"| {way} | {row['one']:.2f} | {', '.join(sizes[:2])} | {row['both']:.2f} | {', '.join(sizes[2:])} "
                f"| {row['failed']} |"
            ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--engine", choices=["vllm", "reference"], default="vllm")
    parser.add_argument("--parts", nargs="+", choices=["trade", "burst", "kvcached"], default=["trade", "burst"])
    parser.add_argument("--kvcached", type=Path, help="a folder into which pip has installed kvcached")
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the shape that vLLM serves")
    parser.add_argument("--utilization", type=float, default=0.72, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--piece", default="32MiB", help="MEMSAVER_KV_CACHE_PIECE")
    parser.add_argument("--bounds", default="1GiB..200GiB", help="MEMSAVER_KV_CACHE of the burst")
    parser.add_argument("--trades", type=int, default=50)
    parser.add_argument("--requests", type=int, default=64, help="at a time")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each measurement of throughput")
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds before each measurement of the burst")
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
            if part == "trade":
                page = write("elastic", {**result, "trade": trade(kind, options)}, to_markdown, options.out)
            elif part == "burst":
                page = write("elastic-burst", {**result, "burst": burst(kind, options)}, to_markdown, options.out)
            else:
                found = json.loads((options.out / "elastic-burst.json").read_text())
                measured = kvcached(kind, options, found["burst"]["half"]["tokens"])
                found["burst"]["ways"]["kvcached"] = measured
                found["command"] += f"`, then `{result['command']}"
                page = write("elastic-burst", found, to_markdown, options.out)
            print(page)


if __name__ == "__main__":
    main()
