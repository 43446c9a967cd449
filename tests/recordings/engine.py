"""The doors of one engine by which memory is released and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .doors import FEW, FIELDS, FREQUENT, SLEEP_FIELDS, VARIANTS, WAYS, WRONG, Door, Fields, outcomes, tried, walk
from .engines import Site, generating, served

#: By dialect.
RELEASING = {
    "sglang": ["/release_memory_occupation"],
    "vllm": ["/sleep", "/release_kv_cache_memory"],
    "tensorrt_llm": ["/release_memory"],
}
RESUMING = {"sglang": ["/resume_memory_occupation"], "vllm": ["/wake_up"], "tensorrt_llm": ["/resume_memory"]}
#: Doors at which everything is tried; others take the fields of one of these.
FIRST = ("/release_memory_occupation", "/sleep", "/resume_memory_occupation", "/wake_up")
#: What a release does with a request in flight, which does not end by itself.
NO_FIELDS: Fields = {}
IN_FLIGHT: tuple[Fields, ...] = (
    {},
    {"mode": "wait", "timeout_s": 0.01},
    {"mode": "abort", "timeout_s": 60},
    {"mode": "keep", "timeout_s": 60},
    {"mode": "abort", "dry_run": True},
)
#: The deadline of a drain that does not name one, seconds: more than a request takes that is aborted.
DRAIN_S = 3


def doors(_folder: Path) -> Iterator[tuple[str, Any]]:
    """Each door with what is tried there."""
    with served(history=1, drain_timeout_s=DRAIN_S) as site:
        for dialect in RELEASING:
            found = {door.path: door for door in map(_door, RELEASING[dialect] + RESUMING[dialect])}
            for path in RELEASING[dialect]:
                walk(site, found[path], found[RESUMING[dialect][0]])
            recorded: dict[str, Any] = {path: door.recording() for path, door in found.items()}
            for path in RELEASING[dialect]:
                recorded[f"{path} with a request in flight"] = in_flight(site, path)
            yield f"engine_{dialect}", recorded


def _door(path: str) -> Door:
    if path in FIRST:
        tries = list(tried(path, WAYS[1:], (*FIELDS, *SLEEP_FIELDS, *VARIANTS, *WRONG)))
    else:
        tries = list(tried(path, FEW[1:], (*FIELDS, *WRONG[::4])))
    if path.endswith("_occupation"):
        tries += [(f"GET {path}{query}", body) for query, body in FREQUENT]
    return Door(path, tries)


def in_flight(site: Site, path: str, needed: Fields = NO_FIELDS) -> list[Any]:
    """Return what a door does with a request in flight; it is sent ``needed`` with each call."""
    steps: list[Any] = []
    for fields in IN_FLIGHT:
        scenario = site.scenario()
        with generating(site) as generated:
            scenario.call(f"POST {path}", {**needed, **fields})
            site.restore()
        reason = generated.result(600).json()["meta_info"]["finish_reason"]["type"]
        steps += [{**step, "request_in_flight": f"ended by {reason}"} for step in scenario.steps]
    return outcomes(steps, path)
