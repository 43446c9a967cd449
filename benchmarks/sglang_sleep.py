"""SGLang seen from outside: release and resume by torch_memory_saver, by memsaver in its place, and by its service.

Writes a checkpoint of seeded random weights, starts one server after the other, and last all three at once, of which
each in turn answers the same requests.

    python benchmarks/sglang_sleep.py --stock DIR   # a folder with torch_memory_saver; needs SGLang and a GPU
    python benchmarks/sglang_sleep.py --parts drop-in --cycles 3 --out /tmp
    python benchmarks/sglang_sleep.py --parts --out DIR                     # only the page, of the results in DIR
    ... --sglang "--attention-backend triton --enable-deterministic-inference"

Each part has a separate file, written after each row; the page is made of all of them in the folder. So parts can be
measured one by one, or at the same time on several GPUs.

Tokens are compared after ``/flush_cache``, as a cached prefix is another computation. Requests in flight are compared
with the same ones undisturbed; their batches differ, so all are equal only if SGLang computes deterministically.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import shlex
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path
from typing import Any

from _checkpoint import CONFIG, write_checkpoint
from _machine import about_gpu, touch_host_memory, used_mib
from _record import new_parser, new_result, write
from _sglang_server import Answer, Server, prompts, started

MODES = ("stock", "drop-in", "service")
LOAD = "load"
PARTS = (*MODES, LOAD)
COLUMNS = ("what", "cycles", "release, ms", "resume, ms", "first token after it, ms", "MiB left", "outcome")
#: Requests in flight at a release, and their tokens.
REQUESTS, LENGTH = 20, 400
#: Requests that load a server, and their tokens: a turn takes seconds.
LOAD_REQUESTS, LOAD_TOKENS = 64, 1000
#: Memory for the load alone, so that three servers find room.
LOAD_ARGUMENTS = ("--max-total-tokens", "131072")

Call = Callable[..., Answer]


class Table:
    """The rows of one part. Writes its file whenever one is added: what is measured is measured."""

    def __init__(self, about: dict[str, Any], part: str, out: Path) -> None:
        self._record, self._out = {**about, "part": part, "rows": []}, out

    def add(self, *cells: str) -> None:
        self._record["rows"].append([cell.replace("|", "/") for cell in cells])
        print("|", " | ".join(cells), "|", flush=True)
        write(f"sglang-{self._record['part']}", self._record, None, self._out)


def first_and_later(values: list[float]) -> str:
    later = values[1:] or values
    return f"{values[0]:.0f}; {statistics.median(later):.0f} (at most {max(later):.0f})"


class Measured:
    """One server, its table, and the tokens that it must answer."""

    def __init__(self, engine: Server, table: Table, quick: bool) -> None:
        self.engine, self.table = engine, table
        self._prompts = prompts(7, 300, 1500)
        self._tokens = 8 if quick else 24
        self._in_flight = prompts(*[12] * REQUESTS)
        self._length = 100 if quick else LENGTH
        self._undisturbed: list[list[int]] = []
        self.expected = self.tokens()
        distinct = len({token for each in self.expected for token in each})
        same = "repeatable" if self.tokens() == self.expected else "NOT REPEATABLE"
        table.add("loaded", "", "", "", "", f"{used_mib():,.0f}", f"tokens {same}, {distinct} distinct ones")

    def tokens(self) -> list[list[int]]:
        self.engine.flush()
        return [self.engine.generate(prompt, self._tokens) for prompt in self._prompts]

    def cycles(self, name: str, call: Call, count: int, body: dict[str, Any]) -> None:
        """Release and resume ``count`` times: first, median and longest time, the longest wait for a token."""
        released, resumed, to_token, left, equal = [], [], [], [], 0
        phases: dict[str, list[float]] = {}
        for _ in range(count):
            self.engine.flush()  # just after an answer a step may still run, at which SGLang alone ends
            answers = [call("/release_memory_occupation", body)]
            left.append(used_mib())
            begun = time.perf_counter()
            answers.append(call("/resume_memory_occupation", {"tags": body["tags"]} if "tags" in body else {}))
            self.engine.generate(self._prompts[0], 1)
            to_token.append((time.perf_counter() - begun) * 1e3)
            released.append(answers[0].ms)
            resumed.append(answers[1].ms)
            for answer, step in zip(answers, ("release", "resume"), strict=True):
                for phase in (answer.body or {}).get("phases", []):
                    phases.setdefault(f"{step} {phase['name']}", []).append(phase["seconds"] * 1e3)
            equal += self.tokens() == self.expected
        times = [first_and_later(each) for each in (released, resumed, to_token)]
        self.table.add(name, str(count), *times, f"{max(left):,.0f}", f"tokens equal after {equal} of {count}")
        if phases:
            text = ", ".join(f"{phase} {statistics.median(each):.1f}" for phase, each in phases.items())
            self.table.add(f"{name}: phases, median ms", "", "", "", "", "", text)

    def in_flight(
        self, name: str, call: Call, body: dict[str, Any], status: int = 200,
        paths: tuple[str, str] = ("/release_memory_occupation", "/resume_memory_occupation"),
    ) -> None:  # fmt: skip
        """Release while requests run: what they are answered."""
        self._undisturbed = self._undisturbed or [each.whole.result() for each in self._start()]
        running = self._start()
        had = [list(each.tokens) for each in running]
        released = call(paths[0], body, status)
        left = used_mib()
        resumed = call(paths[1])
        got = [each.whole.result() for each in running]
        whole = sum(len(each) == self._length for each in got)
        continued = sum(one[: len(begun)] == begun for one, begun in zip(got, had, strict=True))
        equal = sum(one == other for one, other in zip(got, self._undisturbed, strict=True))
        outcome = (
            f"{whole} of {len(got)} answered in full, {equal} as undisturbed; {continued} begin with what they had "
            f"({min(map(len, had))} tokens or more)"
        )
        self.table.add(name, "1", f"{released.ms:.0f}", f"{resumed.ms:.0f}", "", f"{left:,.0f}", outcome)

    def _start(self) -> Any:
        self.engine.flush()
        return self.engine.start(self._in_flight, self._length)

    def new_weights(self, model: Path) -> None:
        """Discard the weights; SGLang's update writes them."""
        engine = self.engine
        released = engine.service("/release_memory_occupation", {"restore": {"weights": "discard"}})
        left = used_mib()
        resumed = engine.service("/resume_memory_occupation")
        engine.own("/generate", {"input_ids": [20], "sampling_params": {"max_new_tokens": 1}}, 503)
        update = engine.own("/update_weights_from_disk", {"model_path": str(model)})
        equal = "equal" if self.tokens() == self.expected else "NOT EQUAL"
        outcome = f"refused until the update ({update.ms:.0f} ms), then tokens {equal}"
        self.table.add(
            "service, weights discarded and updated", "1", f"{released.ms:.0f}", f"{resumed.ms:.0f}", "",
            f"{left:,.0f}", outcome,
        )  # fmt: skip

    def probes(self) -> None:
        for state, running in (("at rest", []), ("under load", self._start())):
            for path in ("/livez", "/metrics"):
                times = [self.engine.probe_ms(path) for _ in range(50)]
                text = f"median {statistics.median(times):.1f}, at most {max(times):.1f} ms"
                self.table.add(f"service, GET {path} of an engine {state}", "50", "", "", "", "", text)
            for each in running:
                each.whole.result()

    def unsafe_release(self) -> None:
        """What SGLang's own call does to running requests without memsaver."""
        running = self._start()
        try:
            outcome = f"answered after {self.engine.own('/release_memory_occupation').ms:.0f} ms"
        except Exception as error:
            outcome = f"no answer ({type(error).__name__})"
        whole = sum(each.whole.exception() is None and len(each.tokens) == self._length for each in running)
        up = "alive" if self.engine.is_up() else "the server has ended"
        outcome += f"; {whole} of {len(running)} requests answered in full; {up}"
        self.table.add(f"SGLang's own call, {REQUESTS} requests in flight", "1", "", "", "", "", outcome)


def measure(mode: str, engine: Server, table: Table, options: argparse.Namespace, model: Path) -> None:
    measured = Measured(engine, table, options.cycles < 5)
    endurance = 10 * options.cycles if mode == "drop-in" else options.cycles
    measured.cycles("SGLang's own call", engine.own, endurance, {})
    for tag in ("kv_cache", "weights", "cuda_graph") if mode != "service" else ():
        measured.cycles(f"SGLang's own call, {tag} alone", engine.own, options.cycles, {"tags": [tag]})
    if mode == "stock":
        # Without a release: what it is to requests to be computed again from their tokens.
        name, paths = "pause_generation (retract)", ("/pause_generation", "/continue_generation")
        measured.in_flight(f"{name}, {REQUESTS} requests in flight", engine.own, {"mode": "retract"}, paths=paths)
        measured.unsafe_release()
        return
    measured.in_flight(f"SGLang's own call, {REQUESTS} requests in flight", engine.own, {})
    if mode == "service":
        measured.cycles("service", engine.service, 2 * options.cycles, {})
        measured.cycles("service, kv_cache alone", engine.service, options.cycles, {"tags": ["kv_cache"]})
        measured.cycles("service, hibernated", engine.service, options.cycles, {"hibernate": True})
        for drain in ("wait", "abort", "keep"):
            name = f"service, {drain}, {REQUESTS} requests in flight"
            measured.in_flight(name, engine.service, {"mode": drain})
        deadline = f"service, 0.1 s to drain {REQUESTS} requests: 504"
        measured.in_flight(deadline, engine.service, {"timeout_s": 0.1}, 504)
        measured.new_weights(model)
        measured.probes()
    up = "alive" if engine.is_up() else "THE SERVER HAS ENDED"
    equal = "equal" if measured.tokens() == measured.expected else "NOT EQUAL"
    table.add("afterwards", "", "", "", "", f"{used_mib():,.0f}", f"{up}, tokens {equal}")


def load(engines: dict[str, Server], table: Table, turns: int, requests: int) -> None:
    """Tokens per second of each server while nothing is released: each in every turn, in changing order."""
    asked = prompts(*[64] * requests)
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(turns + 1):
        for name in engines if turn % 2 else reversed(engines):
            engines[name].flush()
            begun = time.perf_counter()
            made = engines[name].count_tokens(asked, LOAD_TOKENS)
            if turn:  # the first one compiles
                rates[name].append(made / (time.perf_counter() - begun))
    what = f"{requests} requests of {LOAD_TOKENS:,} tokens at once"
    for name, values in rates.items():
        text = f"{statistics.median(values):,.0f} tokens/s ({min(values):,.0f} to {max(values):,.0f})"
        table.add(f"{name}, {what}", str(turns), "", "", "", "", text)
    for other, name in combinations(rates, 2):
        ratios = [100 * (one / two - 1) for one, two in zip(rates[name], rates[other], strict=True)]
        error = statistics.stdev(ratios) / math.sqrt(turns)
        text = f"{statistics.mean(ratios):+.2f} % tokens/s, standard error {error:.2f} % "
        text += f"({min(ratios):+.2f} to {max(ratios):+.2f} % in a turn)"
        table.add(f"{name} beside {other}", str(turns), "", "", "", "", text)


def run(part: str, model: Path, table: Table, options: argparse.Namespace) -> None:
    arguments = shlex.split(options.sglang)
    modes = [part]
    if part == LOAD:
        modes, arguments = list(MODES), [*arguments, *LOAD_ARGUMENTS]
    begun = time.monotonic()
    with ExitStack() as stack:
        engines = {
            mode: stack.enter_context(
                started(mode, model, options.stock, arguments, options.port and options.port + 10 * place)
            )
            for place, mode in enumerate(modes)
        }
        for engine in engines.values():
            engine.wait_until_up()
        table.add(f"start, {time.monotonic() - begun:.0f} s", *[""] * 6)
        if part == LOAD:
            quick = options.cycles < 5
            load(engines, table, 2 if quick else options.turns, 8 if quick else LOAD_REQUESTS)
        else:
            measure(part, engines[part], table, options, model)


def to_markdown(parts: list[dict[str, Any]]) -> str:
    lines = [
        "# SGLang from outside",
        "",
        "Device memory as nvidia-smi counts it; times as the caller sees them: the first; the median and the longest "
        "of the others. CUDA graphs on.",
    ]
    for part in parts:
        lines += [
            "",
            f"## {part['part']}",
            "",
            f"SGLang {part['sglang']}, {part['gpu']}, driver {part['driver']}, torch {part['torch']}; {part['date']}, "
            f"`{part['command']}`.",
            "",
            f"| {' | '.join(COLUMNS)} |",
            f"|{'---|' * len(COLUMNS)}",
        ]
        lines += [f"| {' | '.join(row)} |" for row in part["rows"]]
    return "\n".join(lines) + "\n"


def write_page(folder: Path) -> str:
    parts = [json.loads(path.read_text()) for path in folder.glob("sglang-*.json")]
    page = to_markdown(sorted(parts, key=lambda part: PARTS.index(part["part"])))
    (folder / "sglang.md").write_text(page)
    return page


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--config", type=Path, default=CONFIG, help="config.json of the shape to serve")
    parser.add_argument("--stock", type=Path, help="a folder with torch_memory_saver")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cycles", type=int, default=5, help="of each kind; ten times as many of the drop-in's")
    parser.add_argument("--turns", type=int, default=12, help="of the load, in which each server has one")
    parser.add_argument("--port", type=int, help="SGLang's, and the next one is the service's; by default free ones")
    parser.add_argument("--sglang", default="", help="more arguments for SGLang, in one string")
    options = parser.parse_args()
    if options.parts:
        measure_parts(options)
    print(write_page(options.out))


def measure_parts(options: argparse.Namespace) -> None:
    about = {**new_result("sglang_sleep.py"), **about_gpu(), "sglang": importlib.metadata.version("sglang")}
    touch_host_memory()
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(options.config, Path(folder))
        for part in options.parts:
            table = Table(about, part, options.out)
            try:
                run(part, Path(folder), table, options)
            except Exception:
                text = traceback.format_exc()
                print(text, flush=True)
                table.add("FAILED", *[""] * 5, text.strip().splitlines()[-1][:300])


if __name__ == "__main__":
    main()
