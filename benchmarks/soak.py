"""Many cycles of release and resume of a served engine, with load, a co-tenant and a scraper: does anything creep?

Starts `memsaver serve` and, beside it, a process that takes and gives memory of the same host device (on a GPU there
is none). Each cycle releases some tags, at times under another policy, and resumes; after it one prompt's tokens are
compared. Resident memory, open files, threads and the latencies of each cycle go into a linear fit of the second
half, whose growth is printed beside its start and the medians of each tenth of the whole run.

    python benchmarks/soak.py                                   # 1,000 cycles, or as many as --minutes allows
    python benchmarks/soak.py --cycles 200 --out docs/results
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch

from memsaver_server.client import Client, ClientError

CAPACITY = 512 << 20
TAGS = ("weights", "kv_cache")

TENANT = """
import random, sys, time
from memsaver_core import _native
saver = _native.Saver(driver="host", host_devices=[sys.argv[1]], host_capacity=int(sys.argv[2]))
while True:
    address = saver.allocate(0, "t", "discard", random.randrange(1, 64) << 20)
    time.sleep(random.random() / 20)
    saver.free(address)
    time.sleep(random.random() / 20)
"""


def fit(values: list[float]) -> dict[str, Any]:
    """A straight line through the second half: its start, its growth over that half; and the median of each tenth.

    What is bounded (histories, caches) fills in the first half, which the tenths show.
    """
    later = np.asarray(values[len(values) // 2 :])
    tenths = [round(float(np.median(part)), 4) for part in np.array_split(np.asarray(values), 10) if len(part)]
    slope, level = np.polyfit(np.arange(len(later)), later, 1)
    return {"level": float(level), "growth": float(slope * len(later)), "by_tenth": tenths}


def load(url: str, stop: threading.Event, counts: dict[str, int]) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        while not stop.is_set():
            try:
                body = {"text": "load", "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
                status = http.post("/generate", json=body).status_code
                counts[str(status)] = counts.get(str(status), 0) + 1
                counts["scrapes"] = counts.get("scrapes", 0) + (http.get("/metrics").status_code == 200)
            except httpx.HTTPError as error:
                counts[type(error).__name__] = counts.get(type(error).__name__, 0) + 1
            stop.wait(0.02)


def soak(url: str, process: psutil.Process, cycles: int, minutes: float, seed: int) -> dict[str, Any]:
    choose = random.Random(seed)
    series: dict[str, list[float]] = {
        name: [] for name in ("resident_mib", "files", "threads", "release_s", "resume_s")
    }
    refused = compared = 0
    ends = time.monotonic() + minutes * 60
    with Client(url) as client:

        def tokens() -> list[int]:
            answer = client.generate("the same prompt", max_new_tokens=8, temperature=0.0, ignore_eos=True)
            return [int(token) for token in answer["output_ids"]]

        expected = tokens()
        for _ in range(cycles):
            if time.monotonic() > ends:
                break
            tags = choose.choice([None, ["weights"], ["kv_cache"], list(TAGS)])
            restore = choose.choice([{}, {}, {"weights": "file"}, {"weights": "host"}])
            began = time.monotonic()
            client.release(
                tags, restore={tag: policy for tag, policy in restore.items() if tags is None or tag in tags}
            )
            released = time.monotonic()
            while True:
                try:
                    client.resume(tags, wait_for_memory_s=30)
                    break
                except ClientError:
                    refused += 1  # the co-tenant was faster, for long
            resumed = time.monotonic()
            assert tokens() == expected, "the tokens differ"
            compared += 1
            with process.oneshot():
                sample = (process.memory_info().rss / (1 << 20), process.num_fds(), process.num_threads())
            for name, value in zip(series, (*sample, released - began, resumed - released), strict=True):
                series[name].append(float(value))
    return {
        "cycles": compared,
        "tokens_compared": compared,
        "resumes_repeated": refused,
        "fits": {name: fit(values) for name, values in series.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/reliability"), help="folder for soak.json")
    arguments = parser.parse_args()
    device = f"soak-{uuid.uuid4().hex[:12]}"
    on_gpu = torch.cuda.is_available()
    environment = dict(os.environ)
    if not on_gpu:
        environment |= {
            "MEMSAVER_DRIVER": "host",
            "MEMSAVER_HOST_DEVICE": device,
            "MEMSAVER_HOST_CAPACITY": str(CAPACITY),
            "OMP_NUM_THREADS": "1",
        }
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [sys.executable, "-m", "memsaver_server.cli", "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
        tenant = None
        stop = threading.Event()
        counts: dict[str, int] = {}
        worker = None
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            found = re.search(r"https?://\S+", line)
            if found is None:
                log.seek(0)
                sys.exit(f"the engine did not start:\n{log.read()[-2000:]}")
            if not on_gpu:
                tenant = subprocess.Popen([sys.executable, "-c", TENANT, device, str(CAPACITY)])
            worker = threading.Thread(target=load, args=(found.group(), stop, counts))
            worker.start()
            began = time.monotonic()
            figures = soak(
                found.group(), psutil.Process(server.pid), arguments.cycles, arguments.minutes, arguments.seed
            )
            figures["seconds"] = round(time.monotonic() - began, 1)
        finally:
            stop.set()
            if worker is not None:
                worker.join()
            if tenant is not None:
                tenant.kill()
                tenant.wait()
            server.terminate()
            server.wait(60)
    figures |= {
        "requests": counts,
        "device": torch.cuda.get_device_name() if on_gpu else "host",
        "seed": arguments.seed,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "soak.json").write_text(json.dumps(figures, indent=2) + "\n")
    for name, line_ in figures["fits"].items():
        print(f"{name:14} {line_['level']:10.3f} at half time, {line_['growth']:+9.3f} to the end, {line_['by_tenth']}")
    print({key: value for key, value in figures.items() if key != "fits"})


if __name__ == "__main__":
    main()
