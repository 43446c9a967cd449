"""The doors of a fleet, and what its engines do together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .doors import FEW, FIELDS, FREQUENT, SLEEP_FIELDS, WRONG, Door, Way, outcomes, tried, walk
from .engine import DRAIN_S, in_flight
from .fleets import CoordinatedSite, coordinated
from .scenario import ABSENT

#: Doors that release, and that resume, by dialect.
RELEASING = {
    "sglang": ["/release_memory_occupation"],
    "vllm_and_ray": ["/sleep", "/release_kv_cache_memory"],
    "tensorrt_llm": ["/release_memory"],
    "aibrix": ["/v1/runtime/models/sleep"],
}
RESUMING = {
    "sglang": ["/resume_memory_occupation"],
    "vllm_and_ray": ["/wake_up", "/wakeup"],
    "tensorrt_llm": ["/resume_memory"],
    "aibrix": ["/v1/runtime/models/wake"],
}
#: Fields without which a door does nothing.
NEEDED: Mapping[str, Mapping[str, Any]] = {
    path: {"model_name": "model of a"} for path in (*RELEASING["aibrix"], *RESUMING["aibrix"])
}
AIBRIX: tuple[Mapping[str, Any], ...] = (
    *({"level": level} for level in (1, 2, 0, 3)),
    *({"operation_id": name} for name in ("named-by-its-caller", "", "with a space")),
    *({"model_name": name} for name in ("model of b", 7, None)),
    *({"model": "model of b"}, {"dry_run": True}, {"prepare": True}, {"async": True}, {"wait": True}),
    *({"tags": ["kv_cache"]}, {"timeout_s": 5}, {"mode": "abort"}, {"hibernate": True}),
)
MODEL = {"model": "model of a"}
#: Ray's way to call the doors that it shares with vLLM, and those of its own.
RAY: dict[str, tuple[Mapping[str, Any], ...]] = {
    "/sleep": (
        {**MODEL, "options": {"level": 1}},
        {**MODEL, "options": {"level": 0}},
        {**MODEL, "options": {"level": 2, "tags": ["weights"]}},
        {**MODEL, "level": 2, "options": {"level": 1, "mode": "wait"}},
        {**MODEL, "options": {"level": 9}},
        {**MODEL, "options": {"colour": "red"}},
        {**MODEL, "options": {"prepare": True}},
        {**MODEL, "options": {"timeout_s": 5, "dry_run": True}},
    ),
    "/wakeup": (
        {**MODEL, "options": {"tags": ["weights"]}},
        {**MODEL, "options": {"tags": ["scheduling"]}},
        {**MODEL, "options": {"wait_for_memory_s": 1}},
        {**MODEL, "options": {"colour": "red"}},
    ),
}
#: Other doors, with what is tried there besides the usual.
OTHERS: dict[str, tuple[Way, ...]] = {
    "/flush_cache": (("?reset_connector=true", ABSENT),),
    "/reset_prefix_cache": (("", {**MODEL, "options": {}}),),
    "/pause_generation": (
        *(("", {"mode": mode}) for mode in ("wait", "keep", "retract", "in_place", "sideways")),
        *(("", {"timeout_s": value}) for value in (5, -1)),
        ("", {"clear_cache": False}),
    ),
    "/pause": (
        *(("", {**MODEL, "options": options}) for options in ({"mode": "wait"}, {"clear_cache": False}, {"mode": "x"})),
        ("", {"mode": "keep", "clear_cache": False}),
        ("", {"timeout_s": 5}),
    ),
    "/continue_generation": (("", {"mode": "wait"}),),
    "/resume": (("", {**MODEL, "options": {}}), ("", {"mode": "wait"})),
    "/content_written": (("", {"tags": ["weights"]}), ("", {"tags": "weights"})),
    "/is_sleeping": (),
    "/is_paused": (),
    "/update_weights_from_disk": (
        ("", {"model_path": "/none"}),
        ("", {"model_path": "/none", "flush_cache": False, "abort_all_requests": True, "load_format": "x"}),
        ("", {"model_path": 7}),
    ),
    "/update_weights_from_tensor": (
        ("", {"serialized_named_tensors": ["AAAA"]}),
        ("", {"serialized_named_tensors": 7}),
    ),
}
SELECTED: tuple[Way, ...] = (
    ("", {"selector": {"names": ["b"]}}),
    ("", {"selector": {"nams": ["a"]}}),
    ("?model=model%20of%20b", ABSENT),
    ("", {"fleet_mode": "best_effort", "operation_id": "named-by-its-caller"}),
)


def doors(_folder: Path) -> Iterator[tuple[str, Any]]:
    """Each door of a fleet of one engine."""
    with coordinated(history=1, drain_timeout_s=DRAIN_S) as site:
        described = site.http.get("/openapi.json").json()["paths"]
        for dialect in RELEASING:
            paths = RELEASING[dialect] + RESUMING[dialect]
            found = {path: _door(path, _fields_of(described, path)) for path in paths}
            for releasing, resuming in zip(RELEASING[dialect], RESUMING[dialect], strict=True):
                walk(site, found[releasing], found[resuming])
            recorded: dict[str, Any] = {path: door.recording() for path, door in found.items()}
            for path in RELEASING[dialect]:
                recorded[f"{path} with a request in flight"] = in_flight(site, path, NEEDED.get(path, {}))
            yield f"fleet_{dialect}", recorded
        yield "fleet_other_doors", {path: _other(site, path) for path in OTHERS}


def _fields_of(described: Any, path: str) -> set[str]:
    """The fields that a door has."""
    return set(described[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"])


def _door(path: str, known: set[str]) -> Door:
    ways, fields = FEW[1:], (*FIELDS, *WRONG[::5], *RAY.get(path, ()))
    if path in ("/sleep", "/wake_up"):
        fields = (*fields, *SLEEP_FIELDS)
    elif path.endswith("_occupation"):
        ways, fields = FREQUENT[1:], (*FIELDS, *WRONG[::2])
    elif path in NEEDED or path == "/wakeup":
        fields = RAY.get(path, AIBRIX)
    if "dry_run" in known:  # a field that a door does not have is tried without moving memory, which takes longer
        fields = tuple(each if known & each.keys() else {**each, "dry_run": True} for each in fields)
    tries = list(tried(path, ways, fields))
    if path.endswith("_occupation"):
        tries += [(f"GET {path}{query}", body) for query, body in FREQUENT[:1] + FREQUENT[6:7]]
    return Door(path, tries, NEEDED.get(path, {}))


def _other(site: CoordinatedSite, path: str) -> dict[str, Any]:
    whole = site.scenario()
    whole.call(f"POST {path}", whole=True)
    steps: list[Any] = []
    lines = [(f"POST {path}{query}", body) for query, body in (*FEW[4:], *SELECTED, *OTHERS[path])]
    lines += [(f"GET {path}{query}", body) for query, body in FEW[:1] + SELECTED[2:3]]
    for line, body in lines:
        scenario = site.scenario()
        scenario.call(line, body)
        steps += scenario.steps
    return {"whole": whole.steps, "outcomes": outcomes(steps, path)}
