"""Packing: content of several kinds released and resumed over HTTP, kept packed and kept as it is.

Each kind and setting in a separate process: medians with the spread, what the backups take, and the rate of the link
by plain copies in the same processes. Every content is compared after each resume.

    python benchmarks/packing.py                        # 31 GiB of each kind
    python benchmarks/packing.py --bytes 4GiB --repeats 3 --out /tmp
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from _machine import about_gpu
from _record import new_parser, new_result, write
from _workers import MIB, IdleEngine, checksum

from memsaver_server.cli.units import parse_size

SCALES = (0.3, 0.1, 0.05, 0.02, 0.01)
TENSOR_BYTES = 64 * MIB


def normal(dtype: torch.dtype) -> Callable[[int, torch.device], torch.Tensor]:
    """Normal values, the scale by the number of the tensor."""

    def make(number: int, device: torch.device) -> torch.Tensor:
        size = TENSOR_BYTES // dtype.itemsize
        return torch.empty(size, dtype=dtype, device=device).normal_(0, SCALES[number % len(SCALES)])

    return make


def noise(_: int, device: torch.device) -> torch.Tensor:
    return torch.empty(TENSOR_BYTES, dtype=torch.uint8, device=device).random_(0, 256)


def fp8(number: int, device: torch.device) -> torch.Tensor:
    """As quantized weights are: scaled so that the largest value fits."""
    values = normal(torch.float32)(number, device).repeat(4)
    return (values / values.abs().max() * 448).to(torch.float8_e4m3fn)


KINDS = {
    "bfloat16": normal(torch.bfloat16),
    "float16": normal(torch.float16),
    "float32": normal(torch.float32),
    "float8_e4m3": fp8,
    "noise": noise,
}


def link_rates(nbytes: int, repeats: int) -> dict[str, list[float]]:
    """GB/s of plain copies between pinned memory and the device, each way."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    rates: dict[str, list[float]] = {"release": [], "resume": []}
    for _ in range(repeats):
        for way, to, source in (("release", host, device), ("resume", device, host)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates[way].append(nbytes / 1e9 / (time.perf_counter() - start))
    return rates


def work(kind: str, nbytes: int, repeats: int, rest: float) -> dict[str, Any]:
    import httpx

    import memsaver_core as ms
    from memsaver_server import attach

    device = ms.torch_device()
    link = link_rates(1 << 30, repeats) if device.type == "cuda" else {}
    torch.manual_seed(1)
    with ms.region("weights", restore="host"):
        tensors = [KINDS[kind](number, device) for number in range(nbytes // TENSOR_BYTES)]
    total = sum(tensor.nbytes for tensor in tensors)
    buffers = [tensor.view(torch.uint8) for tensor in tensors]
    ms.prepare_backup(wait=True)
    rates: dict[str, list[float]] = {"first release": [], "release": [], "resume": []}
    kept: dict[str, Any] = {}
    with attach(IdleEngine()) as server, httpx.Client(base_url=server.url, timeout=600) as client:

        def post(operation: str) -> tuple[float, dict[str, Any]]:
            time.sleep(rest)
            start = time.perf_counter()
            answer = client.post(f"/{operation}_memory_occupation", json={}).raise_for_status().json()
            return total / 1e9 / (time.perf_counter() - start), answer

        for number in range(repeats + 1):
            if number:
                for buffer in buffers:
                    buffer[0::2].bitwise_xor_(1)  # the lowest bit of each mantissa, or of its byte
            before = checksum(buffers)
            rate, answer = post("release")
            rates["release" if number else "first release"].append(rate)
            kept = next(tag for tag in answer["tags"] if tag["tag"] == "weights")
            rates["resume"].append(post("resume")[0])
            if checksum(buffers) != before:
                raise RuntimeError(f"{kind}: the content differs")
        pool = client.get("/memory_occupation").json()["host_backup"]
    return {"bytes": total, "GB/s": rates, "link GB/s": link, "kept_bytes": kept["kept_bytes"], "host_backup": pool}


def run(kind: str, pack: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure in a separate process."""
    print(f"  {kind}, {pack} ...", file=sys.stderr, flush=True)
    arguments = [str(parse_size(options.bytes)), str(options.repeats), str(options.rest)]
    environment = {**os.environ, "MEMSAVER_PACK": pack}
    process = subprocess.run(
        [sys.executable, __file__, "--worker", kind, *arguments], capture_output=True, text=True, env=environment
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    if process.returncode != 0 or not lines:
        raise RuntimeError(f"{kind} ({pack}) failed:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}")
    return {"kind": kind, "pack": pack, **json.loads(lines[-1].removeprefix("RESULT "))}


def rate_text(rates: list[float]) -> str:
    if not rates:
        return "-"
    return f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"


def to_markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# Packing: {result['device']}, torch {result['torch']}",
        "",
        f"{result['date']}, `{result['command']}`. GB/s of content over HTTP, median (slowest to fastest), changed "
        "before each release; the link by plain copies of pinned memory in the same processes.",
        "",
        "| content | packing | first release | release | resume | link out | link in | kept / content |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        figures = [row["GB/s"][what] for what in ("first release", "release", "resume")]
        figures += [row["link GB/s"].get(way, []) for way in ("release", "resume")]
        cells = [row["kind"], row["pack"], *map(rate_text, figures), f"{row['kept_bytes'] / row['bytes']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        kind, nbytes, repeats, rest = sys.argv[2:]
        print("RESULT " + json.dumps(work(kind, int(nbytes), int(repeats), float(rest))))
        return
    parser = new_parser(__doc__)
    parser.add_argument("--bytes", default="31GiB", help="of each kind of content")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rest", type=float, default=0.3, help="seconds between operations")
    options = parser.parse_args()
    result: dict[str, Any] = {
        **new_result("packing.py"),
        "device": about_gpu()["gpu"] if torch.cuda.is_available() else "host driver",
        "torch": torch.__version__,
        "rows": [],
    }
    for kind in options.kinds:
        for pack in ("auto", "off"):
            result["rows"].append(run(kind, pack, options))
            # What is measured is measured, whatever becomes of the next.
            write("packing", result, to_markdown, options.out)
    print(to_markdown(result))


if __name__ == "__main__":
    main()
