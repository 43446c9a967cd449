"""Two engines that share one GPU by turns: the time from a request to its first token, while the model sleeps and while
it is awake.

Either engine takes most of the GPU, so the first is released before the second is started. From then on the
application of `memsaver fleet serve`, in this process, passes requests on to the engine that they name. It moves memory
for them.

    python benchmarks/turns.py                          # two vLLM engines of Qwen2-1.5B's shape on the first GPU
    python benchmarks/turns.py --engine reference       # two reference engines on the host driver, without a GPU
    python benchmarks/turns.py --rounds 3 --out /tmp
"""

from __future__ import annotations

import importlib.metadata
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from _checkpoint import CONFIG, PROMPTS, write_checkpoint
from _http_engines import Kind, ask, started, vllm
from _machine import about_gpu, touch_host_memory
from _record import new_parser, new_result, write

from memsaver_server import Settings
from memsaver_server.app import create_fleet_app
from memsaver_server.attachment import serve_app
from memsaver_server.fleet import AsyncFleet, Member, StaticMembership
from memsaver_server.fleet.turns.options import ModelOptions, TurnOptions

MODELS = ("alpha", "beta")
TOKENS = 16
#: Before each measured request: the driver cleans what it was given back in the background. Seconds.
IDLE_S = 1.0

AWAKE, DIRECT = "awake", "awake, asked without the proxy"
ROOM, TURN, HIBERNATED = "asleep", "asleep, and the other has to make room", "hibernated"
CASES = (DIRECT, AWAKE, ROOM, TURN, HIBERNATED)


def reference() -> Kind:
    """It does not stream, so that the time to the first token is the one to the last."""
    arguments = ("-m", "memsaver_server.cli", "serve", "--port", "{port}")
    environment = {"OMP_NUM_THREADS": "1", "MEMSAVER_DRIVER": "host", "MEMSAVER_HOST_DEVICE": f"turns-{os.getpid()}"}
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    body = {"text": "the same prompt", "sampling_params": sampling}
    return Kind(arguments, {**environment, "MEMSAVER_HOST_CAPACITY": "160MiB"}, body=body)


class Bench:
    """A served fleet of two engines, of which one at a time fits."""

    def __init__(self, kind: Kind, engines: dict[str, httpx.Client], fleet: httpx.Client) -> None:
        self._kind = kind
        self._engines = engines
        self._fleet = fleet
        self._expected: dict[str, list[int]] = {}

    def ask(self, client: httpx.Client, model: str) -> tuple[float, bool]:
        """Return the seconds to the first token, and whether all tokens are those of the first answer."""
        begin = time.perf_counter()
        first, found = ask(client, self._kind.path, {**self._kind.body, "model": model})
        return first - begin, found == self._expected.setdefault(model, found)

    def measure(self, case: str, model: str) -> dict[str, Any]:
        self._set_up(case, model)
        time.sleep(IDLE_S)
        known = self._operations().keys()
        seconds, equal = self.ask(self._engines[model] if case == DIRECT else self._fleet, model)
        moves = {each["operation"]: each["seconds"] for key, each in self._operations().items() if key not in known}
        expected = {TURN: {"release", "resume"}, ROOM: {"resume"}, HIBERNATED: {"resume"}}.get(case, set())
        assert set(moves) == expected, f"{case}: {moves}"
        return {"model": model, "first_token": seconds, "tokens_equal": equal, **moves}

    def _set_up(self, case: str, model: str) -> None:
        if case in (AWAKE, DIRECT):
            self.ask(self._fleet, model)
            # An answer from cached prefixes is another computation.
            self._engines[model].post("/flush_cache").raise_for_status()
            return
        self.ask(self._fleet, model)
        if case == TURN:
            self.ask(self._fleet, next(each for each in MODELS if each != model))
        else:
            self.release(hibernate=case == HIBERNATED)

    def release(self, **options: object) -> None:
        """Release both engines until the next request.

        Raises:
            RuntimeError: they cannot be released so.
        """
        answer = self._fleet.post("/release_memory_occupation", json={"wake_on_request": True, **options})
        if answer.is_error:
            raise RuntimeError(answer.json()["message"])

    def _operations(self) -> dict[str, dict[str, Any]]:
        listed = self._fleet.get("/operations").raise_for_status().json()["operations"]
        return {each["operation_id"]: each for each in listed}


@contextmanager
def bench(kind: Kind, folder: Path) -> Iterator[Bench]:
    with ExitStack() as stack:
        engines = {}
        for model in MODELS:
            engines[model] = stack.enter_context(started(kind, model, folder))
            # Makes room for the next one.
            engines[model].post("/release_memory_occupation", json={}).raise_for_status()
        members = [Member(model, str(client.base_url), model=model) for model, client in engines.items()]
        options = TurnOptions({"*": ModelOptions(awake_s=0)})
        app = partial(
            create_fleet_app, AsyncFleet(StaticMembership(members)), Settings(), turns=options, engine_key=None
        )
        served = stack.enter_context(serve_app(app, Settings()))
        yield Bench(kind, engines, stack.enter_context(httpx.Client(base_url=served.url, timeout=120)))


def measured(kind: Kind, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield after each case the rows of all so far, and why a case was not measured."""
    cases: dict[str, list[dict[str, Any]]] = {}
    obstacles: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, bench(kind, Path(folder)) as both:
        for model in MODELS:
            both.measure(TURN, model)  # the first of everything
        for case in CASES:
            try:
                for number in range(2 * rounds):
                    cases.setdefault(case, []).append(both.measure(case, MODELS[number % 2]))
                    print(case, cases[case][-1], file=sys.stderr, flush=True)
            except RuntimeError as error:
                obstacles[case] = str(error)
            yield {"cases": cases, "obstacles": obstacles}


def to_markdown(result: dict[str, Any]) -> str:
    def milliseconds(rows: list[dict[str, Any]], key: str) -> str:
        values = [row[key] * 1e3 for row in rows if key in row]
        return f"{statistics.median(values):,.0f} ({max(values):,.0f})" if values else ""

    table = [
        f"| {case} | {milliseconds(rows, 'first_token')} | {milliseconds(rows, 'release')} "
        f"| {milliseconds(rows, 'resume')} | {sum(row['tokens_equal'] for row in rows)} of {len(rows)} |"
        for case, rows in result["cases"].items()
    ]
    lines = [
        f"# Two engines on one GPU by turns: {result['machine']}",
        "",
        f"{result['date']}, `{result['command']}`. {result['about']} Milliseconds as the client sees them, median",
        f"(slowest) of {result['rounds']} requests for each of the two models, each {IDLE_S:g} s after the one before.",
        "Release and resume are the operations of the fleet, prepared and committed.",
        "",
        "| the model is | to the first token | release of the other | resume | right tokens |",
        "|---|---|---|---|---|",
        *table,
    ]
    lines += [f"\nNot measured: {case}: {why}" for case, why in result["obstacles"].items()]
    return "\n".join(lines) + "\n"


def about_engines(utilization: float) -> dict[str, str]:
    found = about_gpu()
    versions = f"vLLM {importlib.metadata.version('vllm')}, torch {found['torch']}"
    return {
        "machine": f"{found['gpu']}, driver {found['driver']}, {versions}",
        "about": f"Each engine takes {utilization:.0%} of the GPU while it is awake; CUDA graphs on.",
    }


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--engine", choices=["vllm", "reference"], default="vllm")
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the shape that vLLM serves")
    parser.add_argument("--utilization", type=float, default=0.8, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--rounds", type=int, default=10, help="measured requests for each model and case")
    options = parser.parse_args()
    result: dict[str, Any] = {**new_result("turns.py"), "rounds": options.rounds}
    with tempfile.TemporaryDirectory() as folder:
        if options.engine == "vllm":
            touch_host_memory()
            write_checkpoint(options.config, Path(folder))
            result |= about_engines(options.utilization)
            kind = vllm(folder, options.utilization, PROMPTS[0], TOKENS)
        else:
            result |= {"machine": "host driver, no GPU", "about": "Reference engines, which do not stream."}
            kind = reference()
        for cases in measured(kind, options.rounds):
            result |= cases
            page = write("turns", result, to_markdown, options.out)
    print(page)


if __name__ == "__main__":
    main()
