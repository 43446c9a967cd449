"""A worker of real vLLM on two GPUs is killed: how long until probes and callers are told.

One server for each state in which rank 1 gets SIGKILL. The probes are asked again and again, one after the other, from
the kill on. An operation that is to be under way is held up by stopping that rank first (SIGSTOP).

    python benchmarks/rank_deaths.py                                    # needs vLLM and two GPUs
    python benchmarks/rank_deaths.py --states released --repeats 1 --out /tmp
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from _checkpoint import CONFIG, PROMPTS, write_checkpoint
from _http_engines import Kind, started, vllm
from _machine import about_gpu, touch_host_memory, used_mib_of
from _record import new_parser, new_result, write

RANKS = 2
STATES = ("resident", "releasing", "released", "hibernated", "resuming")
PROBES = ("/livez", "/readyz", "/health")
UNDER_WAY = {"releasing": "/release_memory_occupation", "resuming": "/resume_memory_occupation"}
#: What is not told by then is an error, seconds.
LIMIT_S = 30.0


def look(client: httpx.Client) -> dict[str, Any]:
    occupation: dict[str, Any] = client.get("/memory_occupation").raise_for_status().json()
    return occupation


def bring(client: httpx.Client, state: str) -> None:
    """Bring an engine that is resident to where ``state`` begins."""
    if state in ("released", "hibernated", "resuming"):
        body = {"hibernate": state == "hibernated"}
        client.post("/release_memory_occupation", json=body).raise_for_status()


def kill(client: httpx.Client, state: str) -> dict[str, Any]:
    """Kill rank 1; return the milliseconds until each was told, and what they were told."""
    pid = look(client)["ranks"][1]["pid"]
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
        told: dict[str, float] = {}
        while len(told) < len(PROBES):
            for path in PROBES:
                answer = client.get(path)
                # /readyz is 503 during an operation, too.
                if answer.status_code == 503 and f"rank 1 (process {pid})" in answer.text:
                    told.setdefault(path, (time.perf_counter() - killed) * 1e3)
            if time.perf_counter() - killed > LIMIT_S:
                raise RuntimeError(f"{state}: not told within {LIMIT_S:g} s: {set(PROBES) - told.keys()}")
        row: dict[str, Any] = {"state": state, "told_ms": told}
        if waiting is not None:
            answered, status = waiting.result(LIMIT_S)
            row |= {"caller_ms": (answered - killed) * 1e3, "caller_status": status}
    answered, status = timed_post(client, "/resume_memory_occupation")
    return {**row, "refused_status": status}


def timed_post(client: httpx.Client, path: str) -> tuple[float, int]:
    """Return when the answer came, by ``time.perf_counter``, and its status."""
    status = client.post(path, json={}).status_code
    return time.perf_counter(), status


def measure(kind: Kind, state: str, folder: Path) -> dict[str, Any]:
    empty = used_mib_of(RANKS)
    with started(kind, "m", folder, end_s=0) as client:
        bring(client, state)
        row = kill(client, state)
        # The memory of the others goes back although the server still answers.
        deadline = time.monotonic() + LIMIT_S
        while (left := left_of(empty)) and max(left) > 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        return {**row, "left_mib": left}


def left_of(empty: list[float]) -> list[float]:
    return [now - before for now, before in zip(used_mib_of(RANKS), empty, strict=True)]


def to_markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# A rank of vLLM is killed: {result['gpu']}, driver {result['driver']}, vLLM {result['vllm']}, "
        f"torch {result['torch']}",
        "",
        f"{result['date']}, `{result['command']}`. {RANKS} GPUs. Milliseconds from SIGKILL of rank 1 until each probe "
        "answered 503 and named the rank, slowest of all times; device memory afterwards by nvidia-smi.",
        "",
        f"| killed while | times | {' | '.join(PROBES)} | the call that waited | a later resume | MiB left on each |",
        f"|---|---|{'---|' * len(PROBES)}---|---|---|",
    ]
    for state in dict.fromkeys(row["state"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["state"] == state]
        told = " | ".join(f"{max(row['told_ms'][path] for row in rows):.0f}" for path in PROBES)
        waited = [f"{row['caller_status']} after {row['caller_ms']:.0f} ms" for row in rows if "caller_ms" in row]
        refused = ", ".join(sorted({str(row["refused_status"]) for row in rows}))
        left = ", ".join(f"{max(sizes):.0f}" for sizes in zip(*(row["left_mib"] for row in rows), strict=True))
        lines.append(f"| {state} | {len(rows)} | {told} | {'; '.join(waited) or '-'} | {refused} | {left} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the shape to serve")
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--repeats", type=int, default=1, help="servers for each state")
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
        more = ("--tensor-parallel-size", str(RANKS), "--enforce-eager")
        kind = vllm(str(folder), 0.3, PROMPTS[0], 1, *more)
        kind.environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(RANKS)))
        for _ in range(options.repeats):
            for state in options.states:
                record["rows"].append(measure(kind, state, folder))
                print(record["rows"][-1], flush=True)
                write("rank-deaths", record, to_markdown, options.out)
    print(to_markdown(record))


if __name__ == "__main__":
    main()
