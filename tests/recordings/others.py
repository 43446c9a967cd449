"""The other doors of one engine: generation, caches, weights, probes in each state, metrics, pages and descriptions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch

from memsaver_server import Gate
from tests.native import injection
from tests.service.tensor_engine import TensorEngine

from .doors import FREQUENT, Way, outcomes
from .engines import PROMPT, Site, driver, generating, image, memory, payload, served
from .scenario import ABSENT, Scenario

RELEASE, RESUME = "POST /release_memory_occupation", "POST /resume_memory_occupation"
#: Doors that change something, with the fields that are tried there besides the usual ones.
CHANGING: dict[str, tuple[Way, ...]] = {
    "/flush_cache": (("", {"timeout_s": 5}), ("?timeout=60&reset_connector=true", ABSENT)),
    "/pause_generation": (
        *(("", {"mode": mode}) for mode in ("abort", "wait", "keep", "retract", "in_place", "sideways", 7)),
        *(("", {"timeout_s": value}) for value in (0, 5, -1, "soon")),
        ("?mode=wait&timeout_s=5", ABSENT),
        ("", {"is_async": True, "torch_empty_cache": False, "keep_pause": True}),
        ("", {"clear_cache": False}),
        ("", {"mod": "wait"}),
    ),
    "/continue_generation": (("", {"mode": "wait"}), ("", {"clear_cache": True})),
    "/content_written": (("", {"tags": ["weights"]}), ("", {"tagz": ["weights"]}), ("", {"tags": "weights"})),
}
#: Generation: what is refused, and what answers.
PROMPTS: tuple[Any, ...] = (
    ABSENT,
    b"{",
    [],
    {},
    {"text": "hello"},
    {"input_ids": []},
    {"input_ids": ["1"]},
    {"input_ids": [3, 5, 8]},
    {**PROMPT, "stream": False, "text": None},
    {**PROMPT, "stream": True},
    {**PROMPT, "sampling_params": {"max_new_tokens": -1}},
    {**PROMPT, "sampling_params": 7},
    {**PROMPT, "sampling_parms": {}},
    {**PROMPT, "colour": "red", "return_logprob": True},
)
#: What a probe, a router or a client asks.
QUESTIONS = (
    *("GET /livez", "GET /health", "GET /readyz", "GET /health_generate", "HEAD /readyz"),
    *("GET /is_sleeping", "GET /memory_status"),
)
_SAMPLE = re.compile(r"^(\w+(?:\{.*\})?) \S+$", re.MULTILINE)
_BOUND = re.compile(r'le="([^"]*)"')


def others(folder: Path) -> Iterator[tuple[str, Any]]:
    """The recordings of all other doors."""
    with served(history=4) as site:
        yield (
            "engine_other_doors",
            {
                **{path: _door(site, path) for path in CHANGING},
                "/content_written of what a release has discarded": _content_written(site),
                "/generate": _generate(site),
                "/generate while it is not served": _generate_refused(site),
                "/pause_generation with a request in flight": _pause(site),
            },
        )
        yield "engine_weights", _weights(site, folder)
        yield "dashboard", _dashboard(site)
        yield "openapi_engine", description(site.http)
    with served(history=4) as site:
        yield "engine_probes", _probes(site)
    with served(history=4) as site:
        yield "metrics_engine", _metrics(site)
    with served(Bare(), history=4) as site:
        scenario = site.scenario()
        for line in ("POST /generate", "POST /update_weights_from_disk", "POST /update_weights_from_tensor"):
            scenario.call(line, {})
        scenario.call("GET /health_generate")
        scenario.call(RELEASE, {"verify": "token"})
        scenario.call(RESUME, {"verify": "token"})
        scenario.call("GET /version", whole=True)
        yield "engine_that_only_releases", scenario.steps


class Bare(Gate):
    """A gate, which neither generates nor takes weights."""

    def __init__(self) -> None:
        super().__init__("a gate")

    def unblock(self) -> None:
        """It is never blocked."""

    def close(self) -> None:
        """It holds nothing."""


def description(http: httpx.Client) -> Any:
    """The OpenAPI description, without the version."""
    found = http.get("/openapi.json").json()
    return {**found, "info": {**found["info"], "version": "VERSION"}}


def _door(site: Site, path: str) -> dict[str, Any]:
    whole = site.scenario()
    whole.call(f"POST {path}", whole=True)
    steps: list[Any] = []
    lines = [(f"POST {path}{query}", body) for query, body in (*FREQUENT, *CHANGING[path])]
    lines += [(f"GET {path}{query}", body) for query, body in FREQUENT[:1] + FREQUENT[-3:]]
    for line, body in lines:
        scenario = site.scenario()
        scenario.call(line, body)
        steps += scenario.steps
    return {"whole": whole.steps, "outcomes": outcomes(steps, path)}


def _content_written(site: Site) -> list[Any]:
    scenario = site.scenario()
    scenario.call("POST /sleep", {"level": 2, "tags": ["weights", "kv_cache"]})
    scenario.call("POST /content_written")
    scenario.call("POST /content_written", {"tags": ["weights"]}, whole=True)
    scenario.call(RESUME, {"tags": ["weights"]})
    scenario.call("POST /content_written", {"tags": ["no_such_tag"]})
    scenario.call("POST /content_written", {"tags": ["workspace"]})
    scenario.call("POST /content_written", {"tags": ["weights"]})
    scenario.call("POST /content_written", {"tags": ["weights"]})
    scenario.call(RESUME)
    scenario.call("POST /content_written?tags=weights")
    return scenario.steps


def _generate(site: Site) -> list[Any]:
    steps: list[Any] = []
    for body in PROMPTS:
        scenario = site.scenario()
        scenario.call("POST /generate", body)
        steps += scenario.steps
    return outcomes(steps, "/generate")


def _generate_refused(site: Site) -> list[Any]:
    scenario = site.scenario()
    scenario.call(RELEASE, {"tags": ["kv_cache"]})
    scenario.call("POST /generate", PROMPT, whole=True)
    scenario.call(RESUME)
    scenario.call("POST /pause_generation")
    with scenario.during("POST /generate", PROMPT):
        site.engine.wait_until(lambda engine: engine.held)
        scenario.call("POST /continue_generation")
    return scenario.steps


def _pause(site: Site) -> list[Any]:
    scenario = site.scenario()
    with generating(site):
        scenario.call("POST /pause_generation", {"mode": "wait", "timeout_s": 0.01}, whole=True)
        scenario.call("POST /sleep?level=0&mode=wait&timeout_s=0.01")
        scenario.call("POST /pause_generation", {"mode": "keep", "timeout_s": 60}, whole=True)
        scenario.call("POST /continue_generation", whole=True)
        scenario.call("POST /pause_generation", {"timeout_s": 60})
    scenario.call("GET /is_sleeping")
    scenario.call("POST /sleep?level=0")
    scenario.call("GET /is_sleeping")
    scenario.call(RELEASE, {"tags": ["kv_cache"]})
    scenario.call("POST /continue_generation", whole=True)
    scenario.call("POST /wake_up")
    scenario.call("POST /wake_up", {"tags": ["scheduling"], "dry_run": True})
    scenario.call("POST /wake_up", {"tags": ["scheduling"]})
    return scenario.steps


def _weights(site: Site, folder: Path) -> dict[str, Any]:
    good, bad = folder / "weights", folder / "bad"
    good.write_bytes(image(site))
    bad.write_bytes(safetensors.torch.save({"other": memory().graph}))
    texts = {payload(site): "PAYLOAD", payload(site, 2): "PAYLOAD", str(folder): "/FOLDER"}
    disk, tensor = "POST /update_weights_from_disk", "POST /update_weights_from_tensor"
    steps: list[Any] = []
    for line, body in (
        *((disk, body) for body in (ABSENT, {}, [], {"model_path": None}, {"model_path": 7})),
        *((disk, {"model_path": str(path)}) for path in (good, bad, folder / "none")),
        (f"{disk}?model_path={good}", ABSENT),
        (disk, {"model_path": str(good), "flush_cache": False, "abort_all_requests": True, "load_format": "x"}),
        (disk, {"model_path": str(good), "flush_cache": "perhaps"}),
        (disk, {"model_path": str(good), "weight_version": "7", "colour": "red"}),
        (disk, {"model_paths": str(good)}),
        *((tensor, body) for body in (ABSENT, {}, b"[", {"serialized_named_tensors": "x"})),
        *((tensor, {"serialized_named_tensors": each}) for each in ([], ["AAAA"], ["AAAA", "AAAA"], [payload(site)])),
        (tensor, {"serialized_named_tensors": [payload(site, 2)], "load_format": "flattened_bucket"}),
        (tensor, {"serialized_named_tensors": [payload(site)], "flush_cache": False, "abort_all_requests": True}),
        (tensor, {"serialized_named_tensors": [payload(site)], "load_format": 7}),
        (tensor, {"serialized_named_tensors": [payload(site)], "colour": "red"}),
    ):
        scenario = site.scenario(texts, keep=True)
        scenario.call(line, body)
        steps += scenario.steps
    memory().load()
    scenario = site.scenario(texts)
    scenario.call("POST /sleep", {"level": 2})
    scenario.call(disk, {"model_path": str(good)}, whole=True)
    scenario.call("POST /wake_up")
    scenario.call(tensor, {"serialized_named_tensors": [payload(site)]}, whole=True)
    return {"each by itself": steps, "after a sleep of level 2": scenario.steps}


def _dashboard(site: Site) -> list[Any]:
    """Its files, without most of their content."""
    steps: list[Any] = []
    for path in ("/", "/dashboard/index.html", "/dashboard/style.css", "/dashboard/icon.svg", "/dashboard/page.js"):
        scenario = site.scenario()
        scenario.call(f"GET {path}")
        steps += scenario.steps
    scenario = site.scenario()
    scenario.call("GET /dashboard/no-such-file", whole=True)
    return [*steps, *scenario.steps]


# -- what an engine says in each of its states -------------------------------------------------------------------------


def _probes(site: Site) -> dict[str, Any]:
    def call(*calls: tuple[str, Any]) -> Callable[[Scenario], None]:
        return lambda scenario: [scenario.call(line, body) for line, body in calls] and None

    states: dict[str, Callable[[Scenario], None]] = {
        "resident": lambda _: None,
        "paused": call(("POST /pause_generation", ABSENT)),
        "asleep at level 0": call(("POST /sleep?level=0", ABSENT)),
        "a release is prepared": call((RELEASE, {"prepare": True, "tags": ["kv_cache"]})),
        "a tag is released": call((RELEASE, {"tags": ["kv_cache"]})),
        "released": call((RELEASE, ABSENT)),
        "hibernated": call((RELEASE, {"hibernate": True})),
        "a tag without its content": call(("POST /sleep?level=2", ABSENT), (RESUME, ABSENT)),
        "a resume that failed": lambda scenario: _failed_resume(scenario),
        "a wake-up that failed": lambda scenario: _failed_wake(scenario),
        "a repair that failed": lambda scenario: _failed_repair(scenario, site.engine),
        "a verification that failed": lambda scenario: _failed_verification(scenario, site.engine),
    }
    found: dict[str, Any] = {}
    for name, reach in states.items():
        scenario = site.scenario()
        reach(scenario)
        _ask(scenario)
        found[name] = scenario.steps
    scenario = site.scenario()
    with generating(site):
        scenario.call(RELEASE, {"async": True})
        while site.http.get("/operations").json()["operations"][0]["phase"] != "drain":
            pass
        _ask(scenario)
    found["draining"] = scenario.steps
    scenario = site.scenario()
    site.engine.alive = False
    _ask(scenario)
    site.engine.alive = True
    found["the engine is dead"] = scenario.steps
    return found


def _ask(scenario: Scenario) -> None:
    for line in QUESTIONS:
        scenario.call(line)
    scenario.call("GET /memory_occupation", whole=True)


def _failed_resume(scenario: Scenario) -> None:
    scenario.call(RELEASE)
    driver().fail("create", kind="out_of_memory")
    scenario.call(RESUME, whole=True)


def _failed_wake(scenario: Scenario) -> None:
    scenario.call(RELEASE, {"hibernate": True})
    injection.fail_step("restore")
    scenario.call(RESUME, whole=True)


def _failed_repair(scenario: Scenario, engine: TensorEngine) -> None:
    def repair(_tags: list[str], _lost: list[str]) -> None:
        del engine.repair
        raise RuntimeError("the cache cannot be rebuilt")

    scenario.call(RELEASE)
    engine.repair = repair  # type: ignore[assignment]
    scenario.has_bug = True
    scenario.call(RESUME, whole=True)


def _failed_verification(scenario: Scenario, engine: TensorEngine) -> None:
    scenario.call(RELEASE, {"verify": "token", "tags": ["kv_cache"]})
    engine.weights[1] += 1
    scenario.call(RESUME, {"verify": "token"}, whole=True)


def _metrics(site: Site) -> dict[str, list[str]]:
    """All metrics after a little of everything."""
    for line, body in (
        (RELEASE, {"tags": ["kv_cache"], "restore": {"kv_cache": "host"}}),
        (RESUME, {}),
        (RELEASE, {"tags": ["no_such_tag"]}),
        ("POST /sleep?level=2", {}),
    ):
        method, path = line.split()
        site.http.request(method, path, json=body)
    site.http.get("/operations", headers={"Sec-Fetch-Site": "cross-site"})
    site.http.post("/resume_memory_occupation", json={"prepare": True})
    text: str = site.http.get("/metrics").text
    site.restore()
    return samples(text)


def samples(text: str) -> dict[str, list[str]]:
    """The names and labels of metrics without their values, what each is, and the bounds of histograms."""
    lines = _SAMPLE.sub(r"\1", _BOUND.sub('le="BOUND"', text)).splitlines()
    return {"samples": sorted(set(lines)), "bounds": list(dict.fromkeys(_BOUND.findall(text)))}
