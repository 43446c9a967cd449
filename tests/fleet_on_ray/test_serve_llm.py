"""Ray Serve LLM's own ingress with the mixin in front: its calls act on all replicas of a model or on none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import ray

pytest.importorskip("ray.serve", reason="Ray Serve is not installed", exc_type=ImportError)
pytest.importorskip("pyarrow", reason="Ray Serve LLM imports pyarrow")

from ray import serve

from .actors import MODEL, Site
from .standin import sitecustomize as standin


def application(fleet: str) -> Any:
    """Ray Serve LLM's application for one model. The engines are other actors, as vLLM's replicas need a GPU."""
    from ray.llm._internal.serve.core.configs.openai_api_models import ModelCard
    from ray.llm._internal.serve.core.ingress.dev_ingress import DEV_ENDPOINTS, DevIngress
    from ray.serve.llm.ingress import make_fastapi_ingress

    from memsaver_server.integrations.ray_serve.plugin import AtomicSleepMixin

    class Ingress(AtomicSleepMixin, DevIngress):
        pass

    @serve.deployment
    class NoReplica:
        pass

    Ingress.fleet = fleet
    ingress = make_fastapi_ingress(Ingress, endpoint_map={**DEV_ENDPOINTS, **AtomicSleepMixin.ENDPOINTS})
    card = ModelCard(id=MODEL, object="model", owned_by="", permission=[], metadata={})
    deployment = serve.deployment(ingress).options(ray_actor_options={"num_cpus": 0})
    return deployment.bind(llm_deployments={MODEL: NoReplica.bind()}, model_cards={MODEL: card})


@pytest.fixture(scope="module")
def engines(nodes: list[str]) -> Iterator[list[Any]]:
    site = Site("serve-llm", nodes)
    _ = site.fleet
    yield [site.engines("a", "b"), site.engines("c", node=1)]
    site.close()


@pytest.fixture(scope="module")
def app(engines: list[Any]) -> Iterator[httpx.Client]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with standin.installed():
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        try:
            serve.run(application("serve-llm"), route_prefix="/")
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                yield client
        finally:
            serve.shutdown()


def sleeping(app: httpx.Client) -> bool:
    by_query = app.get("/is_sleeping", params={"model": MODEL}).json()
    assert by_query == app.post("/is_sleeping", json={"model": MODEL}).json()
    return bool(by_query["is_sleeping"])


def whole(engines: list[Any]) -> bool:
    return all(ray.get([engine.whole.remote() for engine in engines]))


def test_sleep_and_wakeup_of_a_model(app: httpx.Client, engines: list[Any]) -> None:
    answer = app.post("/sleep", json={"model": MODEL, "options": {"level": 1}})
    assert answer.status_code == 200, answer.text
    assert {engine["name"] for engine in answer.json()["engines"]} == {"a", "b", "c"}
    assert sleeping(app)
    answer = app.post("/wakeup", json={"model": MODEL, "options": {"tags": ["weights", "kv_cache"]}})
    assert answer.status_code == 200, answer.text
    assert not sleeping(app)
    assert whole(engines)


@pytest.mark.guards("a fleet-wide sleep reached some engines, and there was no way back")
def test_a_replica_that_cannot_sleep_keeps_all_awake(app: httpx.Client, engines: list[Any]) -> None:
    ray.get(engines[1].fail.remote("c", "release"))
    answer = app.post("/sleep", json={"model": MODEL})
    assert answer.status_code == 503
    assert answer.json()["rolled_back"]
    assert "c failed" in answer.json()["message"]
    assert not sleeping(app)
    assert whole(engines)


def test_wrong_calls_are_refused(app: httpx.Client) -> None:
    assert app.post("/sleep", json={"model": "another"}).status_code == 404
    assert app.post("/sleep", json={"model": MODEL, "options": {"level": 0}}).status_code == 400
    assert app.post("/sleep", json={"model": MODEL, "options": {"level": 7}}).status_code == 400
    assert not sleeping(app)


def test_the_other_calls_of_the_ingress_are_there(app: httpx.Client) -> None:
    assert [model["id"] for model in app.get("/v1/models").json()["data"]] == [MODEL]
    paths = app.get("/openapi.json").json()["paths"]
    assert {"/pause", "/resume", "/reset_prefix_cache", "/sleep", "/wakeup"} <= set(paths)
