"""A SGLang server seen from outside: its own release and resume, and memsaver's service where that is attached.

Starts one server, measures, and prints a table in Markdown. Run it for each set-up in the environment that has it:

    python benchmarks/sglang_sleep.py stock --model DIR      # torch_memory_saver installed
    python benchmarks/sglang_sleep.py drop-in --model DIR    # memsaver-torch-memory-saver installed in its place
    python benchmarks/sglang_sleep.py service --model DIR    # the same, and memsaver's service
    ... -- --attention-backend triton                        # more arguments for SGLang; --quick for a few cycles

Tokens are compared after ``/flush_cache``, as a cached prefix is another computation. With ``stock`` no release is
asked for while requests run: it would end the server.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

ALL: dict[str, Any] = {}
SERVER = ["--skip-tokenizer-init", "--grammar-backend", "none", "--enable-memory-saver", "--enable-weights-cpu-backup"]
#: How long a server may take to start, seconds.
START_S = 300.0


def used_mib() -> str:
    """What nvidia-smi counts on the first device, MiB."""
    try:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except OSError:
        return "no GPU"


class Engine:
    """The server's endpoints; ``own`` are SGLang's, ``service`` memsaver's. Calls return milliseconds."""

    def __init__(self, port: int, service_port: int, lengths: tuple[int, ...], tokens: int) -> None:
        self._own, self._service = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{service_port}"
        self._http = httpx.Client(timeout=180)
        drawn = random.Random(3)
        self._prompts = [[drawn.randrange(10, 1000) for _ in range(length)] for length in lengths]
        self._tokens = tokens

    def _call(self, url: str, body: dict[str, Any], status: int) -> float:
        begun = time.perf_counter()
        answer = self._http.post(url, json=body)
        took = time.perf_counter() - begun
        assert answer.status_code == status, f"{url}: {answer.status_code} {answer.text[:300]}"
        return took * 1e3

    def own(self, path: str, body: dict[str, Any] = ALL, status: int = 200) -> float:
        return self._call(self._own + path, body, status)

    def service(self, path: str, body: dict[str, Any] = ALL, status: int = 200) -> float:
        return self._call(self._service + path, body, status)

    def generate(self, prompt: list[int], count: int) -> list[int]:
        parameters = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": parameters}
        answer = self._http.post(self._own + "/generate", json=body)
        return list(answer.json().get("output_ids") or []) if answer.status_code == 200 else []

    def tokens(self) -> list[list[int]]:
        self.own("/flush_cache")
        return [self.generate(prompt, self._tokens) for prompt in self._prompts]

    def is_up(self) -> bool:
        try:
            return self._http.get(self._own + "/health_generate").status_code == 200
        except httpx.HTTPError:
            return False

    def probe_ms(self) -> float:
        begun = time.perf_counter()
        assert self._http.get(self._service + "/livez").status_code == 200
        return (time.perf_counter() - begun) * 1e3


Call = Callable[..., float]


@contextmanager
def running(arguments: argparse.Namespace) -> Iterator[Engine]:
    environment = dict(os.environ)
    if arguments.setup == "service":
        environment["MEMSAVER_SGLANG"] = f"127.0.0.1:{arguments.service_port}"
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(arguments.model), "--host"]
    command += ["127.0.0.1", "--port", str(arguments.port), *SERVER, *arguments.sglang]
    with tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False) as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    engine = Engine(arguments.port, arguments.service_port, (7, 300, 1500), 16 if arguments.quick else 48)
    try:
        begun = time.monotonic()
        while "fired up and ready" not in Path(log.name).read_text(errors="replace"):
            if server.poll() is not None or time.monotonic() > begun + START_S:
                raise SystemExit(f"the server did not start; see {log.name}")
            time.sleep(0.5)
        yield engine
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def row(*cells: object) -> None:
    print("|", " | ".join(str(each) for each in cells), "|", flush=True)


def cycles(engine: Engine, name: str, call: Call, count: int, body: dict[str, Any]) -> None:
    """Release and resume ``count`` times: first and median milliseconds, memory left, tokens."""
    expected = engine.tokens()
    released, resumed, left, equal = [], [], "", True
    for _ in range(count):
        released.append(call("/release_memory_occupation", body))
        left = used_mib()
        resumed.append(call("/resume_memory_occupation", {"tags": body["tags"]} if "tags" in body else {}))
        equal = equal and engine.tokens() == expected
    later = [f"{each[0]:.0f} / {statistics.median(each[1:] or each):.0f}" for each in (released, resumed)]
    row(name, count, *later, left, "equal" if equal else "NOT EQUAL")


def in_flight(engine: Engine, name: str, call: Call, body: dict[str, Any], requests: int, status: int = 200) -> None:
    """Release while requests run: what they are answered."""
    prompts = [[*range(20, 30), 40 + number] for number in range(requests)]
    length = 400
    expected = [engine.generate(prompt, length) for prompt in prompts]
    with ThreadPoolExecutor(requests) as pool:
        running: list[Future[list[int]]] = [pool.submit(engine.generate, prompt, length) for prompt in prompts]
        time.sleep(0.3)
        released = call("/release_memory_occupation", body, status)
        left = used_mib()
        resumed = call("/resume_memory_occupation", {})
        got = [each.result() for each in running]
    whole = sum(one == other for one, other in zip(got, expected, strict=True))
    begun = sum(one == other[: len(one)] and len(one) < len(other) for one, other in zip(got, expected, strict=True))
    answers = f"{whole} of {requests} in full and equal, {begun} cut off"
    row(name, 1, f"{released:.0f}", f"{resumed:.0f}", left, answers)


def measure(engine: Engine, arguments: argparse.Namespace) -> None:
    count = 3 if arguments.quick else 10
    row("what", "cycles", "release, first / later ms", "resume, first / later ms", "MiB left", "tokens")
    row(*["---"] * 6)
    row("loaded", "", "", "", used_mib(), "repeatable" if engine.tokens() == engine.tokens() else "NOT REPEATABLE")
    cycles(engine, "SGLang's own call", engine.own, count, {})
    for tag in ("kv_cache", "weights", "cuda_graph"):
        cycles(engine, f"its own call, {tag} alone", engine.own, count, {"tags": [tag]})
    if arguments.setup != "stock":
        in_flight(engine, "its own call, 20 requests in flight", engine.own, {}, 20)
    if arguments.setup == "service":
        cycles(engine, "service", engine.service, count, {})
        cycles(engine, "service, hibernated", engine.service, count, {"hibernate": True})
        for mode in ("wait", "abort", "keep"):
            in_flight(engine, f"service, {mode}, 20 requests in flight", engine.service, {"mode": mode}, 20)
        in_flight(engine, "service, no time to drain", engine.service, {"timeout_s": 0}, 4, 504)
        probes = sorted(engine.probe_ms() for _ in range(200))
        row(
            "service, probe beside an idle scheduler, median / longest ms", 200, f"{probes[100]:.1f} / {probes[-1]:.1f}"
        )
    cycles(engine, "endurance, SGLang's own call", engine.own, 5 if arguments.quick else 50, {})
    row("server afterwards", "", "", "", used_mib(), "alive" if engine.is_up() else "DEAD")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setup", choices=("stock", "drop-in", "service"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--service-port", type=int, default=30100)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("sglang", nargs="*", help="after --: arguments for SGLang")
    arguments = parser.parse_args()
    with running(arguments) as engine:
        measure(engine, arguments)


if __name__ == "__main__":
    main()
