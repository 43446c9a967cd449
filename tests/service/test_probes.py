"""Probes and metrics while resident, released and failed."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import wait_until

from .tensor_engine import KV_BYTES, WEIGHTS_BYTES, TensorEngine

Serve = Callable[..., httpx.Client]
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(http: httpx.Client) -> Samples:
    text = http.get("/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


@pytest.mark.guards("health probes confused a sleeping engine with a dead one")
def test_asleep_is_alive_but_not_ready(http: httpx.Client) -> None:
    """Also for routers that check /health; /readyz says why."""
    for path in ("/livez", "/health", "/readyz", "/health_generate"):
        assert http.get(path).status_code == 200
    http.post("/release_memory_occupation")
    assert http.get("/livez").status_code == 200
    assert http.get("/health").status_code == 200
    for path in ("/readyz", "/health_generate"):
        response = http.get(path)
        assert response.status_code == 503
        assert response.json()["reason"] == "memory of cuda_graph, kv_cache, weights, workspace is released"


@pytest.mark.guards("health probes confused a sleeping engine with a dead one")
def test_dead_is_neither_alive_nor_ready(http: httpx.Client, engine: TensorEngine) -> None:
    engine.alive = False
    for path in ("/livez", "/health", "/readyz", "/health_generate"):
        assert http.get(path).status_code == 503


def test_metrics_follow_a_release_and_a_resume(http: httpx.Client) -> None:
    before = scrape(http)
    assert value(before, "memsaver_state", state="resident") == 1
    assert value(before, "memsaver_tag_bytes", tag="weights", state="resident") >= WEIGHTS_BYTES
    assert value(before, "memsaver_admission_open") == 1
    http.post("/release_memory_occupation")
    asleep = scrape(http)
    assert value(asleep, "memsaver_state", state="released") == 1
    assert value(asleep, "memsaver_tag_bytes", tag="weights", state="resident") == 0
    assert value(asleep, "memsaver_tag_bytes", tag="weights", state="released") >= WEIGHTS_BYTES
    assert value(asleep, "memsaver_operations_total", operation="release", outcome="success") == 1
    assert value(asleep, "memsaver_released_bytes_total") >= KV_BYTES + WEIGHTS_BYTES
    assert value(asleep, "memsaver_phase_seconds_count", operation="release", phase="pause") == 1
    assert value(asleep, "memsaver_copy_bytes_total", direction="to_host", skipped="false") >= WEIGHTS_BYTES
    http.post("/resume_memory_occupation")
    http.post("/release_memory_occupation", json={"tags": ["nothing"]})
    awake = scrape(http)
    assert value(awake, "memsaver_state", state="resident") == 1
    assert value(awake, "memsaver_copy_bytes_total", direction="to_device", skipped="false") >= WEIGHTS_BYTES
    assert value(awake, "memsaver_operations_total", operation="release", outcome="unknown_tag") == 1


def test_device_metrics_come_from_the_last_reading(http: httpx.Client) -> None:
    wait_until(lambda: http.get("/memory_occupation").json()["devices"])
    assert value(scrape(http), "memsaver_device_used_bytes", device="0") >= KV_BYTES + WEIGHTS_BYTES


def test_metrics_are_not_in_the_default_registry(http: httpx.Client) -> None:
    from prometheus_client import REGISTRY

    names = [family.name for family in REGISTRY.collect()]
    assert not [name for name in names if name.startswith("memsaver")]


def test_probes_answer_head_as_get_without_a_body(http: httpx.Client) -> None:
    for state in ("resident", "released"):
        for path in ("/livez", "/health", "/readyz", "/metrics"):
            head, get = http.head(path), http.get(path)
            assert (head.status_code, head.content) == (get.status_code, b"")
            assert head.headers["content-type"] == get.headers["content-type"]
        assert http.get("/memory_occupation").json()["state"] == state
        http.post("/release_memory_occupation")


def test_the_version_and_the_model_are_told(serve: Serve, engine: TensorEngine) -> None:
    http = serve(api_key="a key")
    assert http.get("/version").status_code == 401
    http.headers["Authorization"] = "Bearer a key"
    told = http.get("/version").json()
    assert told["version"] == version("memsaver")
    assert (told["engine"], told["driver"]) == ("tensor engine", "host")
    assert http.get("/memory_occupation").json()["model"] == ""
    engine.model_name = "a model"  # type: ignore[attr-defined]
    assert http.get("/memory_occupation").json()["model"] == "a model"


@pytest.mark.parametrize("protect", [False, True])
def test_probes_ask_for_the_key_only_where_told(serve: Serve, protect: bool) -> None:
    http = serve(api_key="a key", protect_probes=protect)
    for path in ("/livez", "/health", "/readyz", "/metrics"):
        assert http.get(path).status_code == (401 if protect else 200)
        assert http.get(path, headers={"Authorization": "Bearer a key"}).status_code == 200
