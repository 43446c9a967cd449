"""From the call that wakes an engine up to its first token: vLLM, SGLang and the reference engine by the same client.

Writes a checkpoint of seeded random weights and starts one engine after the other: with its own sleep mode (stock), and
with memsaver. In each cycle the engine is released, stays so for a while, is woken up, and asked for tokens at once.
These must be those from before.

    python benchmarks/wake_up.py                                      # vLLM and the reference engine; Qwen3-8B's shape
    python benchmarks/wake_up.py --engines sglang --stock DIR           # DIR has torch_memory_saver
    python benchmarks/wake_up.py --engines reference --model builtin --cycles 3 --out /tmp              # without a GPU
    python benchmarks/wake_up.py --engines --out DIR                    # only the page, of the results in DIR

Each engine and mode has a separate file, written after each cycle; the page is made of all of them in the folder. So
they can be measured one by one, or at the same time on several GPUs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _sglang_server
import httpx
import torch
from _checkpoint import PROMPTS, write_checkpoint
from _http_engines import Kind, ask, started, vllm
from _machine import MIB, about_gpu, touch_host_memory, used_mib, visible_gpu
from _record import ROOT, new_parser, new_result, write
from _wake_up_page import ENGINES, MODES, to_markdown

BUILTIN = Path("builtin")
ON_GPU = torch.cuda.is_available()
TOKENS = 16
#: Between an engine's start and its first release: memsaver prepares host memory meanwhile. Seconds.
IDLE_S = 3.0
#: Requests of an engine that is awake.
AWAKE = 5
#: How long an engine may refuse to flush its cache after an answer, seconds.
FLUSH_S = 10.0


@dataclass(frozen=True)
class Engine:
    """An engine that is served.

    Attributes:
        client: of the engine's own address.
        memory: of the address at which it is released.
        first: the request for the first token alone, of an engine that does not stream.
        service: memsaver's service is at the address of ``memory``.
    """

    kind: Kind
    client: httpx.Client
    memory: httpx.Client
    first: dict[str, Any] | None
    service: bool

    def release(self) -> dict[str, Any]:
        return self._post(self.kind.release)

    def wake(self) -> dict[str, Any]:
        return self._post(self.kind.wake)

    def flush(self) -> None:
        """Forget cached prefixes: an answer from them is another computation."""
        deadline = time.monotonic() + FLUSH_S
        while self.client.post(self.kind.flush).status_code != 200:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.kind.flush} is refused")
            time.sleep(0.05)

    def ask(self) -> tuple[float, list[int]]:
        """Return when the first token came, and all tokens."""
        if self.first is None:
            return ask(self.client, self.kind.path, self.kind.body)
        at, begun = ask(self.client, self.kind.path, self.first)
        self.flush()
        _, tokens = ask(self.client, self.kind.path, self.kind.body)
        return at, tokens if begun == tokens[:1] else begun

    def used_mib(self) -> float | None:
        """Device memory in use by all processes, MiB; without a GPU that of memsaver's host driver, if it is there."""
        if ON_GPU:
            return used_mib()
        return sum(each["used_bytes"] for each in self._status()["devices"]) / MIB if self.service else None

    def kept(self) -> dict[str, int]:
        """Return the bytes of the weights' content, and what their backup takes of host memory."""
        tags = self._status()["tags"] if self.service else []
        weights = next((tag for tag in tags if tag["tag"] == "weights"), {})
        return {key: weights[key] for key in ("backed_up_bytes", "kept_bytes") if key in weights}

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.memory.get("/memory_occupation").raise_for_status().json()
        return status

    def _post(self, path: str) -> dict[str, Any]:
        answer = self.memory.post(path, json={})
        if answer.is_error:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text[:300]}")
        content = answer.json() if "json" in answer.headers.get("content-type", "") else None
        return content if isinstance(content, dict) else {}


# -- the engines -------------------------------------------------------------------------------------------------------


@contextmanager
def serve_vllm(mode: str, folder: Path, prompt: list[int], options: argparse.Namespace) -> Iterator[Engine]:
    more = shlex.split(options.vllm)
    kind = vllm(str(folder), options.utilization, prompt, TOKENS, *more, stock=mode == "stock")
    kind.body["model"] = f"vllm-{mode}"
    with started(kind, kind.body["model"], new_folder()) as client:
        yield Engine(kind, client, client, None, service=mode == "memsaver")


@contextmanager
def serve_sglang(mode: str, folder: Path, prompt: list[int], options: argparse.Namespace) -> Iterator[Engine]:
    """Stock by SGLang's own calls; with memsaver by its service."""
    kind = Kind(body={"input_ids": prompt, "sampling_params": greedy(TOKENS), "stream": True})
    server_mode = "service" if mode == "memsaver" else mode
    with ExitStack() as stack:
        arguments = shlex.split(options.sglang)
        server = stack.enter_context(
            _sglang_server.started(server_mode, folder, options.stock, arguments, options.port)
        )
        server.wait_until_up()
        client, service = (
            stack.enter_context(httpx.Client(base_url=url, timeout=120)) for url in (server.own_url, server.service_url)
        )
        memory = service if mode == "memsaver" else client
        yield Engine(kind, client, memory, None, service=mode == "memsaver")


@contextmanager
def serve_reference(_mode: str, folder: Path, prompt: list[int], _options: argparse.Namespace) -> Iterator[Engine]:
    arguments = ["-m", "memsaver_server.cli", "serve", "--model", str(folder), "--port", "{port}"]
    environment = {"CUDA_VISIBLE_DEVICES": visible_gpu()} if ON_GPU else {"MEMSAVER_DRIVER": "host"}
    if ON_GPU:
        arguments += ["--kv-cache-bytes", "40GiB"]
    body: dict[str, Any] = {"input_ids": prompt, "sampling_params": greedy(TOKENS)}
    kind = Kind(tuple(arguments), environment, body=body)
    with started(kind, "reference", new_folder()) as client:
        yield Engine(kind, client, client, {**body, "sampling_params": greedy(1)}, service=True)


def new_folder() -> Path:
    """For a log that stays."""
    return Path(tempfile.mkdtemp(prefix="wake-up-"))


SERVE = {"vllm": serve_vllm, "sglang": serve_sglang, "reference": serve_reference}


def greedy(count: int) -> dict[str, Any]:
    return {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}


# -- what is measured --------------------------------------------------------------------------------------------------


def measure(engine: Engine, empty: float, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what was measured so far, after each cycle."""
    result: dict[str, Any] = {"awake": [], "cycles": []}
    engine.ask()  # the first of everything
    answers = []
    for _ in range(AWAKE):
        engine.flush()
        begin = time.perf_counter()
        at, tokens = engine.ask()
        result["awake"].append(at - begin)
        answers.append(tokens)
    if len(answers[0]) != TOKENS:
        raise RuntimeError(f"{len(answers[0])} tokens instead of {TOKENS}")
    result["repeatable"] = all(tokens == answers[0] for tokens in answers)
    result["distinct_tokens"] = len(set(answers[0]))
    time.sleep(IDLE_S)
    for _ in range(options.cycles):
        result["cycles"].append(cycle(engine, empty, answers[0], options.asleep))
        yield result


def cycle(engine: Engine, empty: float, expected: list[int], asleep: float) -> dict[str, Any]:
    engine.flush()
    begin = time.perf_counter()
    released = engine.release()
    row: dict[str, Any] = {"release": time.perf_counter() - begin}
    used = engine.used_mib()
    row["left_mib"] = None if used is None else used - empty
    row |= engine.kept()
    time.sleep(asleep)
    begin = time.perf_counter()
    woken = engine.wake()
    row["wake"] = time.perf_counter() - begin
    at, tokens = engine.ask()
    row["first_token"] = at - begin
    row["right"] = tokens == expected
    row["phases"] = {key: answer.get("phases", []) for key, answer in (("release", released), ("wake", woken))}
    return row


def run(engine: str, mode: str, folder: Path, prompt: list[int], options: argparse.Namespace) -> None:
    """Measure one engine, and write it after each cycle: what is measured is measured, whatever becomes of the next."""
    name = f"wake-up-{engine}-{mode}"
    part = {**new_result("wake_up.py"), "engine": engine, "mode": mode, **about(engine)}
    part |= {"shape": options.model.name, "asleep": options.asleep, "awake": [], "cycles": []}
    try:
        empty = used_mib() if ON_GPU else 0.0
        begin = time.monotonic()
        with SERVE[engine](mode, folder, prompt, options) as served:
            part["start"] = time.monotonic() - begin
            for measured in measure(served, empty, options):
                part |= measured
                write(name, part, None, options.out)
                print(name, {key: value for key, value in part["cycles"][-1].items() if key != "phases"}, flush=True)
    except Exception as error:
        print(f"{name} failed: {error}", flush=True)
        write(name, part | {"failed": str(error)[-300:]}, None, options.out)


def about(engine: str) -> dict[str, Any]:
    package = {"vllm": "vllm", "sglang": "sglang", "reference": "transformers"}[engine]
    machine = about_gpu() if ON_GPU else {"gpu": "host driver, no GPU", "driver": "", "torch": torch.__version__}
    return {**machine, "version": f"{package} {importlib.metadata.version(package)}"}


def parts_in(folder: Path) -> list[dict[str, Any]]:
    parts = [json.loads(path.read_text()) for path in folder.glob("wake-up-*.json")]
    return sorted(parts, key=lambda part: (ENGINES.index(part["engine"]), MODES.index(part["mode"])))


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=["vllm", "reference"])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    shape = ROOT / "tests" / "data" / "qwen3-8b"
    parser.add_argument("--model", type=Path, default=shape, help="folder with a config.json, or builtin: a tiny one")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--asleep", type=float, default=2.0, help="seconds between release and wake-up")
    parser.add_argument("--utilization", type=float, default=0.5, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--vllm", default="", help="more arguments for vLLM, in one string")
    parser.add_argument("--sglang", default="", help="more arguments for SGLang, in one string")
    parser.add_argument("--stock", type=Path, help="a folder with torch_memory_saver")
    parser.add_argument("--port", type=int, help="SGLang's, and the next one is the service's; by default free ones")
    options = parser.parse_args()
    if options.model == BUILTIN:
        from memsaver_server.reference.builtin_model import small_checkpoint

        options.model = small_checkpoint()
    with tempfile.TemporaryDirectory() as folder:
        if options.engines:
            touch_host_memory()
            write_checkpoint(options.model / "config.json", Path(folder))
            vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
            prompt = [token % vocabulary for token in PROMPTS[0]]
        for engine in options.engines:
            for mode in options.modes:
                if (engine, mode) != ("reference", "stock"):  # it has no separate sleep
                    run(engine, mode, Path(folder), prompt, options)
    page = to_markdown(parts_in(options.out))
    (options.out / "wake-up.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
