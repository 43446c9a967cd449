"""A worker of real vLLM is killed: how long until probes report it and calls fail.

One server for each state in which its last rank gets SIGKILL; all are started at once, and take turns. An engine has
two ranks if there are two GPUs, otherwise one; each is a separate process. The probes are asked again and again, one
after the other, from the kill on. If the rank is to die during an operation, it is stopped before the operation
(SIGSTOP), which then cannot end.

    python benchmarks/rank_deaths.py                                    # needs vLLM and a GPU
    python benchmarks/rank_deaths.py --states released hibernated --out /tmp
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch
from _checkpoint import CONFIG, PROMPTS, write_checkpoint
from _http_engines import started, vllm
from _machine import MIB, about_gpu, device_bytes, touch_host_memory
from _record import new_parser, new_result, write

RANKS = min(2, torch.cuda.device_count())
STATES = ("resident", "releasing", "released", "hibernated", "resuming")
PROBES = ("/livez", "/readyz", "/health")
UNDER_WAY = {"releasing": "/release_memory_occupation", "resuming": "/resume_memory_occupation"}
#: A probe that does not report it by then is an error, seconds.
LIMIT_S = 30.0


def look(client: httpx.Client) -> dict[str, Any]:
    occupation: dict[str, Any] = client.get("/memory_occupation").raise_for_status().json()
    return occupation


def bring(client: httpx.Client, state: str) -> None:
    """Bring an engine that is resident to where ``state`` begins."""
    if state in ("released", "hibernated", "resuming"):
        body = {"hibernate": state == "hibernated"}
        client.post("/release_memory_occupation", json=body).raise_for_status()


def kill(client: httpx.Client, state: str, pid: int) -> dict[str, Any]:
    """Kill the process of the last rank; return the milliseconds until each probe reported it, and how calls failed."""
    with ThreadPoolExecutor(1) as pool:
        waiting = None
        if path := UNDER_WAY.get(state):
            os.kill(pid, signal.SIGSTOP)
            # httpx clients may be used by several threads.
            waiting = pool.submit(timed_post, client, path)
            while look(client)["state"] != state:
                time.sleep(0.01)
        killed = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        reported: dict[str, float] = {}
        while len(reported) < len(PROBES):
            for path in PROBES:
                answer = client.get(path)
                # /readyz is 503 during an operation, too.
                if answer.status_code == 503 and f"rank {RANKS - 1} (process {pid})" in answer.text:
                    reported.setdefault(path, (time.perf_counter() - killed) * 1e3)
            if time.perf_counter() - killed > LIMIT_S:
                raise RuntimeError(f"{state}: not reported within {LIMIT_S:g} s: {set(PROBES) - reported.keys()}")
        row: dict[str, Any] = {"state": state, "reported_ms": reported}
        if waiting is not None:
            answered, status = waiting.result(LIMIT_S)
            row |= {"caller_ms": (answered - killed) * 1e3, "caller_status": status}
    answered, status = timed_post(client, "/resume_memory_occupation")
    return {**row, "refused_status": status}


def timed_post(client: httpx.Client, path: str) -> tuple[float, int]:
    """Return when the answer came, by ``time.perf_counter``, and its status."""
    status = client.post(path, json={}).status_code
    return time.perf_counter(), status


def measure(client: httpx.Client, state: str) -> dict[str, Any]:
    seen = look(client)
    pids = [rank["pid"] for rank in seen["ranks"]]
    gpus = [device["uuid"] for device in seen["devices"]]
    bring(client, state)
    row = kill(client, state, pids[-1])

    def left() -> list[float]:
        return [sum(device_bytes(gpu, pid) for pid in pids) / MIB for gpu in gpus]

    # The memory of the others goes back although the server still answers.
    deadline = time.monotonic() + LIMIT_S
    while any(left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return {**row, "left_mib": left()}


def to_markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# A rank of vLLM is killed: {result['gpu']}, driver {result['driver']}, vLLM {result['vllm']}, "
        f"torch {result['torch']}",
        "",
        f"{result['date']}, `{result['command']}`. Ranks: {RANKS}, each on a separate GPU. Milliseconds from SIGKILL "
        "of the last rank until each probe answered 503 and named the rank; device memory that the ranks hold "
        "afterwards, as nvidia-smi counts it.",
        "",
        f"| killed while | {' | '.join(PROBES)} | the call that waited | a later resume | MiB left on each GPU |",
        f"|---|{'---|' * len(PROBES)}---|---|---|",
    ]
    for row in result["rows"]:
        reported = " | ".join(f"{row['reported_ms'][path]:.0f}" for path in PROBES)
        waited = f"{row['caller_status']} after {row['caller_ms']:.0f} ms" if "caller_ms" in row else "-"
        left = ", ".join(f"{size:.0f}" for size in row["left_mib"])
        lines.append(f"| {row['state']} | {reported} | {waited} | {row['refused_status']} | {left} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the shape to serve")
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    options = parser.parse_args()
    touch_host_memory()
    record: dict[str, Any] = {
        **new_result("rank_deaths.py"),
        **about_gpu(),
        "vllm": importlib.metadata.version("vllm"),
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_checkpoint(options.config, folder)
        # Engines that profile memory at the same time would disturb each other.
        more = ("--tensor-parallel-size", str(RANKS), "--distributed-executor-backend", "mp", "--enforce-eager")
        more += ("--kv-cache-memory-bytes", str(4 << 30))
        kind = vllm(str(folder), 0.1, PROMPTS[0], 1, *more)
        kind.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(RANKS)))
        with ExitStack() as servers, ThreadPoolExecutor(len(options.states)) as pool:

            def start(state: str) -> tuple[ExitStack, httpx.Client]:
                server = servers.enter_context(ExitStack())
                return server, server.enter_context(started(kind, state, folder, end_s=0))

            for state, (server, client) in zip(options.states, list(pool.map(start, options.states)), strict=True):
                record["rows"].append(measure(client, state))
                print(record["rows"][-1], flush=True)
                write(f"rank-deaths-{RANKS}", record, to_markdown, options.out)
                server.close()
    print(to_markdown(record))


if __name__ == "__main__":
    main()
