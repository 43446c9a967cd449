"""Release and resume, timed: memsaver, its peers where they are installed, and what driver and link allow.

One run measures all of them in turn on the same buffers, each in a separate process: medians of several repetitions
with the spread, as JSON, as a table and as a plot. The drop-in is memsaver in torch_memory_saver's place.

    python benchmarks/occupation.py                     # 40 GiB discarded, 32 GiB kept
    python benchmarks/occupation.py --discard 4GiB --host 4GiB --cycles 100 --out /tmp
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pynvml
from _machine import about_gpu, touch_host_memory
from _record import new_parser, new_result, write

from memsaver_server.cli.units import parse_size

GIB = 1 << 30
#: Libraries and cases in which pinned memory is prepared in the background before the first release.
PREPARED = (("memsaver", "host"), ("drop-in", "host-prepared"))
#: How long an engine serves before its first release in the latter case, seconds.
SERVES_S = 3.0
Row = dict[str, Any]


def work(library: str, case: str, count: int, nbytes: int, repeats: int, rest: float) -> dict[str, Any]:
    """Run one worker and return what it measured."""
    print(f"  {library}, {case}, {nbytes / GIB:g} GiB in {count} ...", file=sys.stderr, flush=True)
    command = [sys.executable, str(Path(__file__).with_name("_workers.py")), library, case]
    prepared = str(int((library, case) in PREPARED))
    process = subprocess.run(
        [*command, str(count), str(nbytes), str(repeats), str(rest)],
        capture_output=True,
        text=True,
        env={**os.environ, "MEMSAVER_PREPARE_BACKUP": prepared},
        check=False,
    )
    lines = [line for line in process.stdout.splitlines() if line.startswith("RESULT ")]
    if process.returncode != 0 or not lines:
        raise RuntimeError(f"{library} ({case}) failed:\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def rows_of(library: str, case: str, result: dict[str, Any]) -> list[Row]:
    rows = []
    for name, samples in result["samples"].items():
        row: Row = {
            "library": library,
            "case": case,
            "bytes": result["bytes"],
            "what": name,
            "median": statistics.median(samples),
            "min": min(samples),
            "max": max(samples),
            "samples": len(samples),
        }
        if name.endswith("GB/s"):
            row["unit"] = "GB/s"
        else:
            row["unit"] = "s"
            row["gigabytes_per_second"] = result["bytes"] / 1e9 / row["median"]
        if name in result.get("traffic", {}):
            row["copied_bytes"] = max(result["traffic"][name])
        rows.append(row)
    return rows


def find(rows: list[Row], library: str, case: str, what: str) -> float | None:
    """The median of one row, or None where it was not measured."""
    for row in rows:
        if (row["library"], row["case"], row["what"]) == (library, case, what):
            return float(row["median"])
    return None


def comparisons(rows: list[Row]) -> list[tuple[str, str]]:
    """The ratios that matter, each from figures of this run alone."""
    host_bytes = next((row["bytes"] for row in rows if (row["library"], row["case"]) == ("memsaver", "host")), 0)

    def ratio(a: float | None, b: float | None) -> str:
        return "not measured" if a is None or b is None else f"{a / b:.2f}x"

    def share(seconds: float | None, rate: float | None) -> str:
        if seconds is None or rate is None:
            return "not measured"
        return f"{100 * host_bytes / 1e9 / seconds / rate:.1f} %"

    ours = "memsaver"
    list_: list[tuple[str, str]] = []
    for peer in ("torch_memory_saver", "vllm"):
        if find(rows, peer, "discard", "release") is None:
            continue
        for what in ("release", "resume"):
            list_.append(
                (
                    f"discard, {what}: time of {peer} over ours",
                    ratio(find(rows, peer, "discard", what), find(rows, ours, "discard", what)),
                )
            )
            if (peers_time := find(rows, peer, "zero", what)) is not None:
                list_.append(
                    (
                        f"KV cache, {what}: time of {peer} over the drop-in's",
                        ratio(peers_time, find(rows, "drop-in", "zero", what)),
                    )
                )
        list_.append(
            (
                f"first release, pool not prepared: time of {peer} over ours",
                ratio(find(rows, peer, "host", "first release"), find(rows, ours, "host-first", "first release")),
            )
        )
    for what in ("release", "resume"):
        list_.append(
            (
                f"discard, {what}: our time over the driver calls alone",
                ratio(find(rows, ours, "discard", what), find(rows, "raw", "discard", f"driver calls, {what}")),
            )
        )
    list_ += [
        (
            "kept, all changed, release: share of the copy engine's rate",
            share(
                find(rows, ours, "host", "release, all changed"),
                find(rows, "raw", "discard", "copy to host, GB/s"),
            ),
        ),
        (
            "kept, all changed, resume: share of the copy engine's rate",
            share(
                find(rows, ours, "host", "resume, after all changed"),
                find(rows, "raw", "discard", "copy to device, GB/s"),
            ),
        ),
        (
            "kept, unchanged, release: our time over our discard release of the same memory",
            ratio(find(rows, ours, "host", "release, unchanged"), find(rows, ours, "host", "release, discarded")),
        ),
    ]
    for row in rows:
        if row["library"] == ours and row["what"] in ("release, unchanged", "release, 1 % changed"):
            list_.append((f"kept, {row['what']}: host traffic", f"{100 * row['copied_bytes'] / host_bytes:.2f} %"))
    first = find(rows, ours, "host", "release, all changed first 64 MiB")
    if first is not None:
        list_.append(("kept, all changed: first 64 MiB back after", f"{first * 1e3:.2f} ms"))
    return list_


def to_markdown(result: dict[str, Any]) -> str:
    lines = [
        f"# Release and resume: {result['gpu']}, driver {result['driver']}, torch {result['torch']}",
        "",
        f"{result['date']}, `{result['command']}`. Medians. In the discard case all libraries are called from Python,",
        "in the others memsaver is called through its HTTP endpoints, drain excluded.",
        "",
        "| library | case | what | median | min to max | n | GB/s | copied |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        scale, unit = (1, "GB/s") if row["unit"] == "GB/s" else (1e3, "ms")
        rate = f"{row['gigabytes_per_second']:,.1f}" if "gigabytes_per_second" in row else ""
        copied = f"{row['copied_bytes'] / GIB:,.2f} GiB" if "copied_bytes" in row else ""
        lines.append(
            f"| {row['library']} | {row['case']} | {row['what']} | {row['median'] * scale:,.2f} {unit} | "
            f"{row['min'] * scale:,.2f} to {row['max'] * scale:,.2f} | {row['samples']} | {rate} | {copied} |"
        )
    lines += ["", "| comparison | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in result["comparisons"]]
    lines += ["", *(f"Failed: {each}" for each in result["failed"])] if result["failed"] else []
    run = result.get("cycles")
    if run:
        lines += [
            "",
            f"{run['cycles']} cycles of {run['bytes'] / GIB:g} GiB in {run['seconds']:,.0f} s, {run['verified']} "
            "verified. First to last steady census, and slope per cycle:",
            "",
            "| | first | last | slope per cycle |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {name} | {run['first'][name]:,.1f} | {run['last'][name]:,.1f} | {slope:+.5f} |"
            for name, slope in run["slope_per_cycle"].items()
        ]
    return "\n".join(lines) + "\n"


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars of the medians, whiskers from the fastest to the slowest repetition."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in result["rows"] if row["unit"] == "s" and "64 MiB" not in row["what"]]
    figure, axes = pyplot.subplots(figsize=(10, 0.32 * len(shown) + 1.2))
    colours = {"memsaver": "#0b7285", "drop-in": "#1098ad", "raw": "#868e96"}
    colours |= {"torch_memory_saver": "#e8590c", "vllm": "#5f3dc4"}
    for at, row in enumerate(reversed(shown)):
        spread = [[(row["median"] - row["min"]) * 1e3], [(row["max"] - row["median"]) * 1e3]]
        axes.barh(at, row["median"] * 1e3, xerr=spread, color=colours[row["library"]], height=0.7)
        axes.text(row["max"] * 1e3 * 1.08, at, f"{row['median'] * 1e3:,.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(shown)))
    axes.set_yticklabels([f"{r['library']}: {r['case']}, {r['what']}" for r in reversed(shown)], fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds, median; whiskers from min to max")
    axes.set_title(f"{result['gpu']}, {result['date']}", fontsize=10)
    axes.margins(x=0.2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--discard", default="40GiB", help="bytes in the discard case")
    parser.add_argument("--host", default="32GiB", help="bytes in the kept cases")
    parser.add_argument("--count", type=int, default=400, help="tensors")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--first-releases", type=int, default=3, help="processes that measure a first release")
    parser.add_argument("--rest", type=float, default=0.3, help="seconds between operations")
    parser.add_argument("--cycles", type=int, default=1000, help="0 leaves the long run out")
    parser.add_argument("--cycle-bytes", default="4GiB")
    options = parser.parse_args()
    discard, host = parse_size(options.discard), parse_size(options.host)
    pynvml.nvmlInit()
    peers = [name for name in ("torch_memory_saver", "vllm") if importlib.util.find_spec(name)]
    touch_host_memory(2 * host)
    rows: list[Row] = []

    result: dict[str, Any] = {**new_result("occupation.py"), **about_gpu(), "rows": rows, "failed": [], "cycles": None}

    def record() -> str:
        """Write what is measured so far, whatever becomes of the next."""
        result["comparisons"] = comparisons(rows)
        return write("occupation", result, to_markdown, options.out)

    def run(library: str, case: str, nbytes: int, repeats: int = options.repeats, rest: float = options.rest) -> None:
        try:
            measured = work(library, case, options.count, nbytes, repeats, rest)
        except RuntimeError as error:
            if library not in peers:
                raise
            print(error, file=sys.stderr)
            result["failed"].append(f"{library}, {case}: {str(error).strip().splitlines()[-1][:200]}")
        else:
            rows.extend(rows_of(library, case, measured))
        record()

    run("raw", "discard", discard)
    for library in ("memsaver", "drop-in", *peers):
        run(library, "discard", discard)
    for library in ("drop-in", *(name for name in peers if name == "torch_memory_saver")):
        run(library, "zero", discard)
    run("memsaver", "host", host)
    firsts = [
        work("memsaver", "host-first", options.count, host, 1, options.rest) for _ in range(options.first_releases)
    ]
    merged = {name: [s for first in firsts for s in first["samples"][name]] for name in firsts[0]["samples"]}
    rows.extend(rows_of("memsaver", "host-first", {"bytes": firsts[0]["bytes"], "samples": merged}))
    for library in ("drop-in", *peers):
        run(library, "host", host, 2)
    run("drop-in", "host-prepared", host, 1, SERVES_S)
    if options.cycles:
        result["cycles"] = work("cycles", "host", 40, parse_size(options.cycle_bytes), options.cycles, 0)
    print(record())
    plot(result, options.out / "occupation.png")


if __name__ == "__main__":
    main()
