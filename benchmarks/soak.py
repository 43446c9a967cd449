"""Many cycles of release and resume of a served engine, with load, a co-tenant and a scraper: does anything creep?

Starts the reference engine with its service and, beside it, a process that takes and gives memory of the same device.
Each cycle releases some tags, in one call or several, at times under other policies and with requests in flight, and
resumes them; then everything is looked at: checksums of the weights and of marks in each tag's memory, which must be
what the policy said. Tokens are compared in each cycle on the host driver, in each fiftieth on a GPU, where a batch's
company changes them, so that the load has to stand aside.

Resident, pinned and device memory, open files, threads and the latencies of cycles that release everything as the
policies say (without the drain and without waiting for the co-tenant) go into a linear fit of the second half, whose
growth is printed beside its start and the medians of each tenth of the whole run.

    python benchmarks/soak.py                   # 1,000 cycles; results for docs/reliability.md
    python benchmarks/soak.py --minutes 10      # as many as fit; on a GPU the results go to benchmarks/results
    MEMSAVER_SHARED_BACKUPS=soak python benchmarks/soak.py --cycles 1000 --out /tmp    # with a shared store, too
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import psutil
import torch
from _machine import device_bytes
from _record import RESULTS, ROOT, new_parser, new_result, write

from memsaver_server.client import Client, DeviceMemoryError, OperationAnswer

MIB = 1 << 20
HOST_CAPACITY = 512 * MIB
TAGS = ("weights", "kv_cache", "cuda_graph", "workspace", "disk")

#: Policies of single releases, and how often; what is not named keeps that of its tag. Files of gigabytes take seconds.
OVERRIDES: tuple[tuple[dict[str, str], int], ...] = (
    ({"kv_cache": "host"}, 8),
    ({"kv_cache": "discard"}, 8),
    ({"disk": "host", "workspace": "host"}, 8),
    ({"kv_cache": "file", "workspace": "discard"}, 1),
    ({"weights": "file", "disk": "host"}, 1),
)
DEFAULTS = {"weights": "host", "kv_cache": "zero", "cuda_graph": "host", "workspace": "zero", "disk": "file"}


def fit(values: Sequence[float]) -> dict[str, Any]:
    """A straight line through the second half: its start, its growth over that half; and the median of each tenth.

    What is bounded (histories, caches) fills in the first half, which the tenths show.
    """
    later = np.asarray(values[len(values) // 2 :])
    tenths = [round(float(np.median(part)), 4) for part in np.array_split(np.asarray(values), 10) if len(part)]
    slope, level = np.polyfit(np.arange(len(later)), later, 1) if len(later) > 1 else (0.0, later[0])
    return {"level": float(level), "growth": float(slope * len(later)), "by_tenth": tenths}


class Load:
    """Threads that ask for tokens all the time, and one that scrapes. Each counts its answers by status."""

    def __init__(self, url: str, users: int) -> None:
        self.counts: Counter[str] = Counter()
        self._url = url
        self._stop = threading.Event()
        self._turns = [threading.Lock() for _ in range(users)]
        self._threads = [threading.Thread(target=self._ask, args=(turn,)) for turn in self._turns]
        self._threads.append(threading.Thread(target=self._scrape))
        for thread in self._threads:
            thread.start()

    def aside(self) -> ExitStack:
        """Nobody asks for tokens inside of this block."""
        stack = ExitStack()
        for turn in self._turns:
            stack.enter_context(turn)
        return stack

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, turn: threading.Lock) -> None:
        choose = random.Random()
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._stop.is_set():
                parameters = {"max_new_tokens": choose.randrange(1, 9), "temperature": 0}
                with turn:
                    body = {"text": "load " * choose.randrange(1, 9), "sampling_params": parameters}
                    self._count("generate", http, "POST", "/generate", body)
                self._stop.wait(0.02)

    def _scrape(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60) as http:
            while not self._stop.is_set():
                for path in ("/metrics", "/memory_occupation", "/operations"):
                    self._count("scrape", http, "GET", path, None)
                self._stop.wait(0.1)

    def _count(self, what: str, http: httpx.Client, method: str, path: str, body: dict[str, Any] | None) -> None:
        try:
            self.counts[f"{what} {http.request(method, path, json=body).status_code}"] += 1
        except httpx.HTTPError as error:
            self.counts[f"{what} {type(error).__name__}"] += 1


class Engine:
    """`_soaked.py`: the engine's process and what it can be asked beside HTTP."""

    def __init__(self, config: str, kv_cache_bytes: int, mark_bytes: int, environment: dict[str, str]) -> None:
        program = Path(__file__).with_name("_soaked.py")
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, str(program), config, str(kv_cache_bytes), str(mark_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
        )
        self.url = self._line()

    def mark(self, seed: int) -> dict[str, Any]:
        return self._ask(f"mark {seed}")

    def look(self) -> dict[str, Any]:
        return self._ask("look")

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        code = self.process.wait(60)
        if code != 0:
            sys.exit(f"the engine ended with exit code {code}:\n{self.log()}")

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def _ask(self, order: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(order, file=self.process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._line())
        return answer

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if not line:
            sys.exit(f"the engine is gone:\n{self.log()}")
        return line


class Soak:
    def __init__(self, engine: Engine, client: Client, load: Load, seed: int, parity_every: int) -> None:
        self._engine = engine
        self._client = client
        self._load = load
        self._choose = random.Random(seed)
        self._parity_every = parity_every
        self._process = psutil.Process(engine.process.pid)
        self._series: dict[str, list[float]] = {}
        self.counts: Counter[str] = Counter(cycles=0, tokens_compared=0, resumes_repeated=0, other_policies=0)

    def run(self, cycles: int, minutes: float) -> dict[str, Any]:
        began = time.monotonic()
        expected = self._tokens()
        # Each tag once under `host`: what backups pin is at its bound from here on.
        self._client.release(restore=dict.fromkeys(TAGS, "host"))
        self._resume(None)
        first = self._engine.look()
        threads = {"at the start": self._threads(first)}
        while self.counts["cycles"] < cycles and time.monotonic() < began + minutes * 60:
            before = self._engine.mark(self._choose.randrange(1 << 30))
            due = self._cycle()
            after = self._engine.look()
            assert after["model"] == first["model"], f"the weights differ: {due}"
            self._check(due, before, after)
            self.counts["cycles"] += 1
            if self.counts["cycles"] % self._parity_every == 0:
                self._compare(expected)
            self._sample()
        self._compare(expected)
        threads["at the end"] = self._threads(self._engine.look())
        return {
            **self.counts,
            "threads": threads,
            "seconds": round(time.monotonic() - began, 1),
            "fits": {name: fit(values) for name, values in self._series.items()},
        }

    def _cycle(self) -> dict[str, str]:
        """Release and resume; returns the policy under which each released tag was."""
        choose, client = self._choose, self._client
        everything = choose.random() < 0.5
        tags = list(TAGS) if everything else choose.sample(TAGS, choose.randrange(1, len(TAGS)))
        restore: dict[str, str] = {}
        if choose.random() < 0.4:
            restore = choose.choices([policies for policies, _ in OVERRIDES], [often for _, often in OVERRIDES])[0]
        mode = choose.choice(("wait", "keep", "abort"))
        one_by_one = not everything and choose.random() < 0.5
        for group in [[tag] for tag in tags] if one_by_one else [None if everything else tags]:
            policies = {tag: policy for tag, policy in restore.items() if group is None or tag in group}
            answer = client.release(group, restore=policies, mode=mode)
        plain = everything and not restore
        if plain:
            self._note("release_s", seconds_of(answer))
        back = choose.sample(tags, len(tags))
        for group in [[tag] for tag in back] if one_by_one else [None]:
            answer = self._resume(group)
        if plain:
            self._note("resume_s", seconds_of(answer))
        self.counts["other_policies"] += bool(restore)
        return {tag: restore.get(tag, DEFAULTS[tag]) for tag in tags}

    def _resume(self, tags: list[str] | None) -> OperationAnswer:
        while True:
            try:
                return self._client.resume(tags, wait_for_memory_s=self._choose.choice((0, 30)))
            except DeviceMemoryError:
                self.counts["resumes_repeated"] += 1  # the co-tenant was faster

    def _check(self, due: dict[str, str], before: dict[str, Any], after: dict[str, Any]) -> None:
        for tag in TAGS:
            policy = due.get(tag, "resident")
            if policy == "zero":
                assert tag in after["zero"], f"{tag!r} is not zero: {due}"
            elif policy != "discard":
                assert after["sums"][tag] == before["sums"][tag], f"{tag!r} differs: {due}"
            self.counts[f"looks at what was {policy}"] += 1

    def _compare(self, expected: list[list[int]]) -> None:
        tokens = self._tokens()
        assert tokens == expected, f"the tokens differ: {tokens} instead of {expected}"
        self.counts["tokens_compared"] += 1

    def _tokens(self) -> list[list[int]]:
        lengths = (8, 32, 128) if torch.cuda.is_available() else (8,)
        with self._load.aside():
            answers = [
                self._client.generate("the same prompt", max_new_tokens=length, temperature=0.0, ignore_eos=True)
                for length in lengths
            ]
        return [[int(token) for token in answer["output_ids"]] for answer in answers]

    def _sample(self) -> None:
        with self._process.oneshot():
            self._note("resident_mib", self._process.memory_info().rss / MIB)
            self._note("files", self._process.num_fds())
            self._note("threads", self._process.num_threads())
        occupation = self._client.occupation()
        store = occupation.host_backup.shared_store
        pinned = occupation.host_backup.capacity_bytes + (store.total_bytes if store is not None else 0)
        self._note("pinned_mib", pinned / MIB)
        if torch.cuda.is_available():
            self._note("device_mib", device_bytes(occupation.devices[0].uuid, self._process.pid) / MIB)

    def _threads(self, look: dict[str, Any]) -> dict[str, Any]:
        """Whose they are: Python's by name; all by the name that the system has for them."""
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return {"python": look["threads"], "all": Counter((task / "comm").read_text().strip() for task in tasks)}

    def _note(self, name: str, value: float) -> None:
        self._series.setdefault(name, []).append(float(value))


def seconds_of(answer: OperationAnswer) -> float:
    """What an operation took, without waiting for requests and for the co-tenant."""
    return sum(phase.seconds for phase in answer.phases if phase.name not in ("drain", "wait_for_memory"))


def measure(cycles: int, minutes: float, seed: int) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    environment = dict(os.environ)
    if on_gpu:
        config, kv_cache_bytes, mark_bytes = str(ROOT / "tests" / "data" / "qwen2-1.5b" / "config.json"), 2 << 30, 64
        tenant_arguments = ["cuda"]
    else:
        config, kv_cache_bytes, mark_bytes = "", 0, 1
        device = f"soak-{uuid4().hex[:12]}"
        tenant_arguments = ["host", device, str(HOST_CAPACITY)]
        environment |= {
            "MEMSAVER_DRIVER": "host",
            "MEMSAVER_HOST_DEVICE": device,
            "MEMSAVER_HOST_CAPACITY": str(HOST_CAPACITY),
            "OMP_NUM_THREADS": "1",
        }
    engine = Engine(config, kv_cache_bytes, mark_bytes * MIB, environment)
    program = Path(__file__).with_name("_cotenant.py")
    tenant = subprocess.Popen([sys.executable, str(program), *tenant_arguments], stdout=subprocess.PIPE, text=True)
    load = Load(engine.url, users=4 if on_gpu else 1)
    try:
        with Client(engine.url) as client:
            soak = Soak(engine, client, load, seed, parity_every=50 if on_gpu else 1)
            try:
                figures = soak.run(cycles, minutes)
            except BaseException:
                print(f"in cycle {soak.counts['cycles']}:\n{engine.log()}", file=sys.stderr)
                raise
    finally:
        load.stop()
        tenant.terminate()
        tenants = tenant.communicate()[0]
        if sys.exc_info()[0] is not None:
            engine.process.kill()
    engine.end()
    return figures | {
        "requests": dict(load.counts),
        "co_tenant": json.loads(tenants),
        "device": torch.cuda.get_device_name() if on_gpu else "host",
        "seed": seed,
        **new_result("soak.py"),
    }


def to_markdown(figures: dict[str, Any]) -> str:
    def counted(counts: dict[str, int]) -> str:
        return ", ".join(f"{name}: {count:,}" for name, count in sorted(counts.items()))

    looks = {name.removeprefix("looks at what was "): n for name, n in figures.items() if name.startswith("looks at")}
    lines = [
        f"# Soak: {figures['device']}, torch {torch.__version__}",
        "",
        f"{figures['date']}, `{figures['command']}`, seed {figures['seed']}. {figures['cycles']:,} cycles in "
        f"{figures['seconds']:,.0f} s of the reference engine (Qwen2-1.5B's shape, CUDA graphs) with random tags, "
        f"policies and drain modes, under load, beside a co-tenant, scraped.",
        "",
        f"After every cycle: checksums of the weights equal, and the marks in each tag's memory what the policy says "
        f"({counted(looks)}). Tokens compared {figures['tokens_compared']:,} times, every one equal. Cycles with "
        f"other policies than the tags' own: {figures['other_policies']:,}. Resumes refused with 503 for want of "
        f"memory, and repeated: {figures['resumes_repeated']:,}.",
        "",
        f"Answers to the load and the scraper: {counted(figures['requests'])}. Co-tenant: "
        f"{counted(figures['co_tenant'])}.",
        "",
        "Threads at the start, by the system's name: "
        f"{counted(figures['threads']['at the start']['all'])}; at the end: "
        f"{counted(figures['threads']['at the end']['all'])}. Pinned memory is at its bound from the start: each tag "
        "has been backed up to host memory once.",
        "",
        "A linear fit of the second half, and the median of each tenth of the whole run:",
        "",
        "| what | at half time | growth to the end | by tenth |",
        "|---|---|---|---|",
        *(
            f"| {name} | {line['level']:.3f} | {line['growth']:+.3f} | {' '.join(f'{v:g}' for v in line['by_tenth'])} |"
            for name, line in figures["fits"].items()
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = new_parser(__doc__, RESULTS if on_gpu else Path("build/reliability"))
    parser.add_argument("--cycles", type=int, help="at most so many; 1,000 where no --minutes are given")
    parser.add_argument("--minutes", type=float, help="for so long")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    unlimited = 1 << 60
    cycles = arguments.cycles or (unlimited if arguments.minutes else 1000)
    figures = measure(cycles, arguments.minutes or unlimited, arguments.seed)
    name = f"soak-{figures['device'].split()[-1].lower()}" if on_gpu else "soak"
    write(name, figures, to_markdown if on_gpu else None, arguments.out)
    for what, line in figures["fits"].items():
        print(f"{what:14} {line['level']:10.3f} at half time, {line['growth']:+9.3f} to the end, {line['by_tenth']}")
    print({key: value for key, value in figures.items() if key != "fits"})
    odd = {what: count for what, count in figures["requests"].items() if what.split()[1] not in ("200", "503")}
    if odd:
        sys.exit(f"requests were answered by other than 200 and 503: {odd}")


if __name__ == "__main__":
    main()
