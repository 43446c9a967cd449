"""The page of wake_up.py."""

from __future__ import annotations

import statistics
from typing import Any

from _machine import MIB

ENGINES, MODES = ("vllm", "sglang", "reference"), ("memsaver", "stock")
HEAD = (
    "engine", "first token after the wake-up call, ms: median; 99th percentile; slowest", "the call alone, ms",
    "first token while awake, ms", "release, ms: first; later", "MiB left", "the weights' backup", "right tokens",
)  # fmt: skip


def to_markdown(parts: list[dict[str, Any]]) -> str:
    lines = [
        "# From the wake-up call to the first token",
        "",
        "Random weights in bfloat16. Released, left alone, woken up and asked for tokens at once, by one client over "
        "HTTP. Medians unless it says otherwise; device memory as nvidia-smi counts it, without what others use. vLLM "
        "and SGLang stream; the reference engine is asked for one token alone. Tokens are right if they equal those "
        "from before the first release.",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{'---|' * len(HEAD)}",
        *(f"| {' | '.join(cells(part))} |" for part in parts if part["cycles"]),
        "",
    ]
    for part in parts:
        lines.append(
            f"- {name_of(part)}: {part['version']}, {part['gpu']}, driver {part['driver']}, torch {part['torch']}; "
            f"{part['date']}, `{part['command']}`; {part['asleep']:g} s asleep, {len(part['cycles'])} cycles"
        )
        if phases := median_phases(part):
            lines.append(f"  - phases of the wake-up, ms: {phases}")
        if not part.get("repeatable", True):
            lines.append("  - TOKENS ARE NOT REPEATABLE even while it is awake")
        if why := part.get("failed"):
            lines.append(f"  - ended early: {' '.join(why.split())}")
    return "\n".join(lines) + "\n"


def name_of(part: dict[str, Any]) -> str:
    return f"{part['engine']}, {part['shape']}, {part['mode']}"


def cells(part: dict[str, Any]) -> list[str]:
    rows = part["cycles"]
    first, woken, released = ([row[key] * 1e3 for row in rows] for key in ("first_token", "wake", "release"))
    left = [row["left_mib"] for row in rows if row["left_mib"] is not None]
    return [
        name_of(part),
        f"{statistics.median(first):,.0f}; {percentile_99(first):,.0f}; {max(first):,.0f}",
        f"{statistics.median(woken):,.0f}",
        f"{statistics.median(part['awake']) * 1e3:,.0f}",
        f"{released[0]:,.0f}; {statistics.median(released[1:] or released):,.0f}",
        f"{max(left):,.0f}" if left else "",
        backup_of(rows[-1]),
        f"{sum(row['right'] for row in rows)} of {len(rows)}",
    ]


def percentile_99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def backup_of(row: dict[str, Any]) -> str:
    content, kept = row.get("backed_up_bytes", 0), row.get("kept_bytes", 0)
    if not content:
        return ""
    how = "packed" if kept < content else "raw"
    return f"{how}, {kept / MIB:,.0f} MiB of host memory, {kept / content:.3f} of the content"


def median_phases(part: dict[str, Any]) -> str:
    seconds: dict[str, list[float]] = {}
    for row in part["cycles"]:
        for phase in row["phases"]["wake"]:
            seconds.setdefault(phase["name"], []).append(phase["seconds"])
    return ", ".join(f"{name} {statistics.median(values) * 1e3:.1f}" for name, values in seconds.items())
