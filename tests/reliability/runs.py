"""Which feature ran with which engine and device, from the results of the benchmarks; see document.py."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

Result = dict[str, Any]


def equal(cycles: list[Result]) -> str:
    return f"tokens equal after {sum(each['tokens_equal'] for each in cycles)} of {len(cycles)} cycles"


def footprint(result: Result) -> str:
    left = max(cycle["released_mib"] for cycle in result["cycles"])
    hibernated = max(cycle["left_mib"] for cycle in result["hibernation"]["cycles"])
    return f"{left:,.0f} MiB left of {result['cycles'][0]['loaded_mib']:,.0f}, {hibernated:.0f} hibernated; " + equal(
        [*result["cycles"], *result["hibernation"]["cycles"]]
    )


def sleep_levels(result: Result) -> str:
    engine = result["engines"]["memsaver"]
    cycles = [*engine["level_1"], *engine["level_1_rested"], *engine["level_2"], *engine["level_3"]]
    left = {name: max(cycle["left_mib"] for cycle in engine[name]) for name in ("level_1", "level_2", "level_3")}
    levels = ", ".join(f"{mib:,.0f} at level {name[-1]}" for name, mib in left.items())
    return f"MiB left: {levels}; {equal(cycles)}"


def ranks(result: Result) -> str:
    engine = result["engines"]["memsaver"]
    asleep, hibernated = (
        max((max(cycle["left_mib"]) for cycle in engine[name]), default=None) for name in ("asleep", "hibernated")
    )
    deep = "hibernation refused" if hibernated is None else f"{hibernated:.0f} hibernated"
    cycles = [*engine["asleep"], *engine["hibernated"]]
    return f"NCCL {result['nccl']}: {asleep:,.0f} MiB left on each, {deep}; {equal(cycles)}"


def row(name: str, left: bool = True) -> Callable[[Result], str]:
    """Return a function that returns what a row of SGLang's table says, without what it has behind a semicolon."""

    def figure(result: Result) -> str:
        (found,) = (cells for cells in result["rows"] if cells[0] == name)
        said = found[-1].partition(";")[0]
        return f"{found[-2]} MiB left; {said}" if left else said

    return figure


def trainer(result: Result) -> str:
    ours, theirs = (
        median(sum(step.values()) for step in result["modes"][mode]["steps"]) for mode in ("memsaver", "stock")
    )
    return f"a step takes {ours:.2f} s, with torch_memory_saver {theirs:.2f} s"


def turns(result: Result) -> str:
    asleep = result["cases"]["asleep"]
    seconds = median(each["first_token"] for each in asleep)
    return f"first token of a sleeping model after {seconds:.2f} s; {equal(asleep)}"


def deaths(result: Result) -> str:
    slowest = max(ms for each in result["rows"] for ms in each["reported_ms"].values())
    return f"reported within {slowest:.0f} ms in {len(result['rows'])} states"


def wake_up(result: Result) -> str:
    seconds = median(cycle["first_token"] for cycle in result["cycles"])
    left = max(cycle["left_mib"] for cycle in result["cycles"])
    return f"first token after {seconds * 1000:.0f} ms, {left:,.0f} MiB left while asleep"


def packing(result: Result) -> str:
    (packed,) = (each for each in result["rows"] if (each["kind"], each["pack"]) == ("bfloat16", "auto"))
    release, resume = (median(packed["GB/s"][name]) for name in ("release", "resume"))
    kept = packed["kept_bytes"] / packed["bytes"]
    return f"bfloat16: {release:.1f} / {resume:.1f} GB/s released / resumed, {kept:.3f} of it in host memory"


def store(result: Result) -> str:
    copies = result["rows"][-1]["host_bytes"]["total"] / result["packed_copy_bytes"]
    return f"{result['processes']} processes: {copies:.2f} packed copies in host memory"


def memory(result: Result) -> str:
    over = dict(result["comparisons"])
    release, resume = (over[f"discard, {name}: our time over the driver calls alone"] for name in ("release", "resume"))
    return f"discarded: release {release}, resume {resume} of the time of the driver calls alone"


def trades(result: Result) -> str:
    moved, loads = result["trade"]["moved"], result["trade"]["loads"].values()
    give, take = (1000 * median(each[name] for each in moved) for name in ("give", "take"))
    wrong = sum(len(each["failed"]) + each["wrong"] for each in loads)
    size, answers = moved[0]["bytes"] / (1 << 30), sum(each["answered"] for each in loads)
    times = f"{len(moved)} times {size:.0f} GiB given in {give:.0f} ms, taken in {take:.0f}, under load"
    return f"{times}; {answers - wrong:,} of {answers:,} answers whole and equal"


def bursts(result: Result) -> str:
    fixed, balanced = (result["burst"]["ways"][way] for way in ("fixed", "balanced"))
    rates = (f"{balanced[load]:.1f} instead of {fixed[load]:.1f}" for load in ("one", "both"))
    return "requests/s beside fixed halves: {} with load on one engine, {} on both".format(*rates)


def warm_start(result: Result) -> str:
    ours, file = (median(result["seconds"][way]) for way in ("the shared store", "safetensors in the page cache"))
    return f"{result['bytes'] / 1e9:.1f} GB on the device in {ours:.2f} s, from safetensors in page cache {file:.2f}"


def warm_engine(result: Result) -> str:
    ours, file, none = (median(result["seconds"][f"{way}: loading the model"]) for way in ("memsaver", "auto", "dummy"))
    return f"model loaded in {ours:.2f} s, from safetensors in page cache {file:.2f}, with nothing to load {none:.2f}"


#: Name of a result, the engine if the result names none, the feature, and the result's figure.
RUNS: tuple[tuple[str, str, str, Callable[[Result], str]], ...] = (
    ("vllm", "", "sleep mode", sleep_levels),
    ("vllm-ranks", "", "sleep mode, tensor parallel", ranks),
    ("vllm-4-ranks-nccl-2.28", "", "sleep mode, tensor parallel, NCCL that cannot suspend", ranks),
    ("wake-up-vllm-memsaver", "", "wake-up, shape of Qwen3-8B", wake_up),
    ("rank-deaths-1", "", "the worker is killed", deaths),
    ("rank-deaths-2", "", "one of two workers is killed", deaths),
    ("turns", "", "models take turns", turns),
    ("elastic", "", "a KV cache that grows and shrinks", trades),
    ("elastic-burst", "", "KV caches that balance themselves", bursts),
    ("warm-start-vllm", "", "warm start, shape of Qwen3-8B", warm_engine),
    ("sglang-drop-in", "", "SGLang's own calls", row("SGLang's own call")),
    ("sglang-service", "", "the service", row("service")),
    ("sglang-service", "", "hibernation", row("service, hibernated")),
    ("sglang-service", "", "release, requests in flight", row("service, wait, 20 requests in flight", left=False)),
    ("sglang-service", "", "weights discarded", row("service, weights discarded and updated", left=False)),
    ("wake-up-sglang-memsaver", "", "wake-up, shape of Qwen3-8B", wake_up),
    ("warm-start-sglang", "", "warm start, shape of Qwen3-8B", warm_engine),
    ("trainer-turns", "", "trainer and engine in turns", trainer),
    ("footprint", "reference", "release, resume, hibernation", footprint),
    ("wake-up-reference-memsaver", "", "wake-up, shape of Qwen3-8B", wake_up),
    ("occupation", "none", "release and resume of memory alone", memory),
    ("packing", "none", "packed backups", packing),
    ("shared-store", "none", "shared store", store),
    ("warm-start", "none", "warm start, shape of Qwen3-8B", warm_start),
    ("store-soak-h200", "none", "shared store, soak", lambda each: f"{each['cycles']:,} cycles"),
    ("overhead", "reference", "HTTP", lambda each: f"{each['overhead_ms']:.2f} ms for a release and a resume"),
)


def engine_of(result: Result, otherwise: str) -> str:
    for key, name in {"vllm": "vLLM", "sglang": "SGLang"}.items():
        if key in result:
            return f"{name} {result[key]}"
    version = str(result.get("version", otherwise)).replace("vllm", "vLLM").replace("sglang", "SGLang")
    return f"reference, {version}" if result.get("engine") == "reference" else version


def runs() -> list[tuple[str, ...]]:
    """Return engine, feature, torch, device, date and figure of the newest result of each engine on each device."""
    found = []
    for name, otherwise, feature, figure in RUNS:
        newest: dict[tuple[str, str], Result] = {}
        for path in sorted(RESULTS.rglob(f"{name}.json")):
            result = json.loads(path.read_text())
            if "machine" in result and "device" not in result:  # "NVIDIA H200, driver ..., vLLM ..., torch ..."
                parts = result["machine"].split(", ")
                result |= {"gpu": parts[0], **dict(part.lower().split(" ", 1) for part in parts[1:])}
            device = str(result.get("gpu") or result["device"]).partition(":")[0]
            ranks = str(result.get("ranks", "")) or "".join(re.findall(r"--tp (\d+)", result.get("command", "")))
            device = f"{ranks} {device}".lstrip()
            where = (device, engine_of(result, otherwise))
            if where not in newest or newest[where]["date"] < result["date"]:
                newest[where] = result
        for (device, engine), result in sorted(newest.items()):
            found.append((engine, feature, result.get("torch", ""), device, result["date"], figure(result)))
    return found


def tests_run() -> list[tuple[str, ...]]:
    """Return rows for the tests with engines and on GPUs, see ``tests.engine_runs``: one for each file and device."""
    newest: dict[tuple[str, ...], tuple[str, ...]] = {}
    recorded = [json.loads(path.read_text()) for path in RESULTS.rglob("tests-*.json")]
    for run in sorted(recorded, key=lambda run: str(run["date"])):
        outcomes: dict[str, list[bool]] = {}
        for test, outcome in run["tests"].items():
            outcomes.setdefault(test.partition("::")[0], []).append(outcome == "passed")
        for file, passed in outcomes.items():
            about = (f"{run['engine']} {run['version']}", f"`{file}`", run["torch"], run["device"])
            newest[about] = (*about, run["date"], f"{sum(passed)} of {len(passed)} tests passed")
    return sorted(newest.values())
