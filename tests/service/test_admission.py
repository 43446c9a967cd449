"""Which requests are admitted while memory is released and resumed."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import httpx
import pytest
import safetensors.torch

from memsaver_core.contract.errors import NotResidentError
from memsaver_server import attach
from tests.waiting import wait_until

from .tensor_engine import ALL_TAGS, TensorEngine

PROMPT = {"input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
Serve = Callable[..., httpx.Client]


def generate(http: httpx.Client, **more: object) -> httpx.Response:
    return http.post("/generate", json={**PROMPT, **more})


def post(http: httpx.Client, path: str, **body: object) -> httpx.Response:
    return http.post(path, json=body)


@pytest.mark.guards("a request during sleep hung or used released memory")
def test_generation_while_released_is_refused(http: httpx.Client, engine: TensorEngine) -> None:
    """503 with Retry-After and the reason; no kernel runs."""
    post(http, "/release_memory_occupation")
    computed = engine.tokens_computed
    response = generate(http)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert "cuda_graph, kv_cache, weights, workspace" in response.json()["message"]
    assert engine.tokens_computed == computed
    post(http, "/resume_memory_occupation")
    assert generate(http).status_code == 200


def test_a_client_that_goes_away_ends_its_request(
    http: httpx.Client, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the tokens of clients that time out and repeat pile up, and a release waits for all of them."""
    ended = Event()

    async def generate_for_ever(_: object) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    monkeypatch.setattr(engine, "generate", generate_for_ever)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/generate", json=PROMPT, timeout=0.3)
    assert ended.wait(60)


@pytest.mark.guards("a request during sleep hung or used released memory")
def test_generation_while_released_is_queued_where_asked_for(serve: Serve, engine: TensorEngine) -> None:
    """Held until everything is resident, then served; requests beyond the limit are refused."""
    http = serve(while_released="queue", queue_limit=1)
    expected = generate(http).json()["output_ids"]
    post(http, "/release_memory_occupation")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(generate, http)
        engine.wait_until(lambda engine: engine.held == 1)
        assert generate(http).status_code == 503
        post(http, "/resume_memory_occupation", tags=["weights"])
        assert not held.done()
        post(http, "/resume_memory_occupation", tags=["kv_cache"])
        assert held.result().json()["output_ids"] == expected


def test_continue_before_the_kv_cache_is_back_is_remembered(http: httpx.Client) -> None:
    post(http, "/pause_generation", mode="retract")
    post(http, "/release_memory_occupation")
    post(http, "/resume_memory_occupation", tags=["weights"])
    assert post(http, "/continue_generation").status_code == 200
    assert generate(http).status_code == 503
    post(http, "/resume_memory_occupation", tags=["kv_cache"])
    assert generate(http).status_code == 200


@pytest.mark.guards("memory was unmapped while kernels still used it")
def test_nothing_opens_admission_while_a_release_runs(
    http: httpx.Client, engine: TensorEngine, in_flight: Future[httpx.Response]
) -> None:
    """Neither ``continue_generation`` nor a failing pause admits a request before memory is released."""
    with ThreadPoolExecutor(1) as pool:
        releasing = pool.submit(post, http, "/release_memory_occupation")
        engine.wait_until(lambda engine: engine.is_closed)
        assert post(http, "/continue_generation").status_code == 200
        assert post(http, "/pause_generation", mode="wait", timeout_s=0).status_code == 504
        assert generate(http).status_code == 503
        engine.unblock()
        assert releasing.result().status_code == 200
        assert in_flight.result().status_code == 200
    assert generate(http).status_code == 503


def test_a_pause_that_is_overtaken_by_continue_ends_without_effect(
    http: httpx.Client, engine: TensorEngine, in_flight: Future[httpx.Response]
) -> None:
    """It says so, and the engine computes."""
    with ThreadPoolExecutor(1) as pool:
        pausing = pool.submit(post, http, "/pause_generation", mode="wait")
        engine.wait_until(lambda engine: engine.is_closed)
        post(http, "/continue_generation")
        engine.unblock()
        ended = pausing.result()
        assert (ended.status_code, ended.json()["error"]["type"]) == (409, "pause_ended")
    assert http.get("/readyz").status_code == 200
    assert generate(http).status_code == 200


@pytest.mark.parametrize(("path", "query"), [("/pause_generation", ""), ("/sleep", "?level=0")])
def test_a_pause_that_fails_speaks_of_the_pause(
    http: httpx.Client, engine: TensorEngine, in_flight: Future[httpx.Response], path: str, query: str
) -> None:
    late = post(http, path + query, mode="wait", timeout_s=0)
    assert (late.status_code, late.json()["error"]["type"]) == (504, "drain_timeout")
    assert "; generation was not paused. Repeat" in late.json()["message"]
    assert "release" not in late.json()["message"]
    engine.unblock()


@pytest.mark.parametrize("second_succeeds", [True, False])
def test_a_pause_that_fails_undoes_itself_alone(
    http: httpx.Client, engine: TensorEngine, in_flight: Future[httpx.Response], second_succeeds: bool
) -> None:
    """Of two that overlap; the engine is paused if one of them succeeds."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, http, "/pause_generation", mode="wait", timeout_s=1)
        engine.wait_until(lambda engine: engine.is_closed)
        if second_succeeds:
            second = pool.submit(post, http, "/pause_generation", mode="wait")
            assert first.result().status_code == 504
        else:
            assert post(http, "/pause_generation", mode="wait", timeout_s=1.2).status_code == 504
            assert first.result().status_code == 504
            assert http.get("/readyz").status_code == 200
        engine.unblock()
        if second_succeeds:
            assert second.result().status_code == 200
            assert http.get("/readyz").json()["reason"] == "generation is paused"
            post(http, "/continue_generation")
    assert generate(http).status_code == 200


def test_a_resume_of_what_is_resident_disturbs_nobody(
    http: httpx.Client, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    close = engine.close_admission

    def watch(reason: str, *, hold: int = 0) -> None:
        closed.append(reason)
        close(reason, hold=hold)

    monkeypatch.setattr(engine, "close_admission", watch)
    assert post(http, "/resume_memory_occupation").status_code == 200
    assert closed == []


def test_weights_are_not_written_into_released_memory(http: httpx.Client, engine: TensorEngine) -> None:
    payload = base64.b64encode(safetensors.torch.save({"weights": engine.weights.clone()})).decode()
    body = {"serialized_named_tensors": [payload]}
    post(http, "/release_memory_occupation", tags=["weights"])
    response = post(http, "/update_weights_from_tensor", **body)
    assert response.status_code == 409
    assert "resume it first" in response.json()["message"]
    post(http, "/resume_memory_occupation")
    assert post(http, "/update_weights_from_tensor", **body).status_code == 200
    assert post(http, "/update_weights_from_tensor", serialized_named_tensors=["AAAA"]).status_code == 400
    assert post(http, "/update_weights_from_disk", model_path="/no/such/folder").status_code == 400


def lost(http: httpx.Client) -> set[str]:
    return {tag["tag"] for tag in http.get("/memory_occupation").json()["tags"] if tag["content"] == "lost"}


def payload(engine: TensorEngine) -> list[str]:
    return [base64.b64encode(safetensors.torch.save({"weights": engine.weights.clone()})).decode()]


def discard_weights(http: httpx.Client) -> None:
    post(http, "/release_memory_occupation", restore={"weights": "discard"}).raise_for_status()


def sleep_at_level_2(http: httpx.Client) -> None:
    http.post("/sleep?level=2").raise_for_status()


@pytest.mark.parametrize("release", [discard_weights, sleep_at_level_2])
@pytest.mark.guards("generation answered from memory whose content was discarded")
def test_discarded_weights_are_lost_until_an_update_writes_them(
    http: httpx.Client, engine: TensorEngine, caplog: pytest.LogCaptureFixture, release: Callable[[httpx.Client], None]
) -> None:
    """Status, probe, metric, log and admission say so, whatever is resumed or continued meanwhile."""
    expected, weights = generate(http).json()["output_ids"], payload(engine)
    release(http)
    assert lost(http) == {"weights"}
    post(http, "/resume_memory_occupation", tags=["weights"])
    post(http, "/continue_generation")
    post(http, "/resume_memory_occupation")
    assert lost(http) == {"weights"}
    now = http.get("/readyz")
    assert now.status_code == 503
    assert "the content of weights was discarded" in now.json()["reason"]
    assert http.get("/livez").status_code == 200
    assert 'memsaver_content_lost{tag="weights"} 1.0' in http.get("/metrics").text
    assert 'memsaver_content_lost{tag="kv_cache"} 0.0' in http.get("/metrics").text
    wait_until(lambda: "the content of weights was discarded" in caplog.text)
    refused = generate(http)
    assert refused.status_code == 503
    assert "POST /content_written" in refused.json()["message"]
    assert post(http, "/update_weights_from_tensor", serialized_named_tensors=["AAAA"]).status_code == 400
    assert generate(http).status_code == 503
    post(http, "/update_weights_from_tensor", serialized_named_tensors=weights).raise_for_status()
    assert lost(http) == set()
    assert http.get("/readyz").status_code == 200
    assert 'memsaver_content_lost{tag="weights"} 0.0' in http.get("/metrics").text
    assert generate(http).json()["output_ids"] == expected


@pytest.mark.guards("generation answered from memory whose content was discarded")
def test_a_caller_that_writes_content_by_other_means_says_so(http: httpx.Client, engine: TensorEngine) -> None:
    """Also content that an engine cannot compute again under other tags than weights."""
    expected = generate(http).json()["output_ids"]
    post(http, "/release_memory_occupation", restore={"cuda_graph": "zero", "workspace": "discard"})
    assert post(http, "/content_written", tags=["cuda_graph"]).status_code == 409
    post(http, "/resume_memory_occupation")
    assert lost(http) == {"cuda_graph"}
    assert post(http, "/content_written", tags=["no such tag"]).status_code == 400
    assert post(http, "/content_written", tags=["weights"]).status_code == 200
    assert generate(http).status_code == 503
    engine.graph.fill_(31)
    assert post(http, "/content_written").json()["message"] == "Content counts as written."
    assert generate(http).json()["output_ids"] == expected


def test_content_with_a_backup_is_not_lost(http: httpx.Client) -> None:
    """A release that discards what was released before, and kept, discards nothing."""
    expected = generate(http).json()["output_ids"]
    post(http, "/release_memory_occupation", tags=["weights"])
    post(http, "/release_memory_occupation", restore={"weights": "discard"})
    assert lost(http) == set()
    post(http, "/resume_memory_occupation")
    assert generate(http).json()["output_ids"] == expected


def test_garbage_that_was_kept_is_still_lost(http: httpx.Client, engine: TensorEngine) -> None:
    discard_weights(http)
    post(http, "/resume_memory_occupation")
    post(http, "/release_memory_occupation")
    post(http, "/resume_memory_occupation")
    assert lost(http) == {"weights"}
    assert generate(http).status_code == 503


def test_a_paused_engine_without_weights_holds_no_request(http: httpx.Client) -> None:
    """They would wait for an update that may never come."""
    post(http, "/pause_generation")
    discard_weights(http)
    post(http, "/resume_memory_occupation")
    assert generate(http).status_code == 503


def test_the_program_of_an_engine_writes_weights_itself(engine: TensorEngine) -> None:
    weights = engine.weights.clone()
    with attach(engine) as server, httpx.Client(base_url=server.url, timeout=600, verify=False) as http:
        discard_weights(http)
        with pytest.raises(NotResidentError), server.lifecycle.writing():
            pass
        post(http, "/resume_memory_occupation")
        with pytest.raises(ZeroDivisionError), server.lifecycle.writing():
            engine.weights[0] = 1 // 0
        assert generate(http).status_code == 503
        with server.lifecycle.writing():
            engine.weights.copy_(weights)
        assert generate(http).status_code == 200


def test_a_pause_outlives_a_release_and_a_resume(http: httpx.Client, engine: TensorEngine) -> None:
    post(http, "/pause_generation")
    post(http, "/release_memory_occupation")
    post(http, "/resume_memory_occupation")
    assert http.get("/readyz").json()["reason"] == "generation is paused"
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(generate, http)
        engine.wait_until(lambda engine: engine.held == 1)
        post(http, "/continue_generation")
        assert held.result().status_code == 200


@pytest.fixture
def in_flight(http: httpx.Client, engine: TensorEngine) -> Future[httpx.Response]:
    engine.block()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, http, rid="the-slow-one")
        engine.wait_until(lambda engine: engine.in_flight())
        yield running
        engine.unblock()


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_drain_that_takes_too_long_releases_nothing(
    http: httpx.Client, engine: TensorEngine, in_flight: Future[httpx.Response]
) -> None:
    """The answer names the phase and the requests that delayed it; admission is as before."""
    response = post(http, "/release_memory_occupation", timeout_s=0.05)
    assert response.status_code == 504
    assert response.json()["error"]["phase"] == "drain"
    assert response.json()["error"]["pending"] == ["the-slow-one"]
    assert response.json()["state"] == "resident"
    assert http.get("/readyz").status_code == 200
    engine.unblock()
    assert in_flight.result().status_code == 200
    assert post(http, "/release_memory_occupation").status_code == 200


def test_abort_ends_requests_with_what_they_have(http: httpx.Client, in_flight: Future[httpx.Response]) -> None:
    assert post(http, "/release_memory_occupation", mode="abort").status_code == 200
    assert in_flight.result().json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_keep_freezes_requests_and_goes_on_after_the_resume(
    http: httpx.Client, engine: TensorEngine, in_flight: Future[httpx.Response]
) -> None:
    assert post(http, "/release_memory_occupation", mode="keep").status_code == 200
    engine.unblock()
    post(http, "/resume_memory_occupation", tags=["weights"])
    assert not in_flight.done()
    post(http, "/resume_memory_occupation")
    assert in_flight.result().json()["output_ids"] == generate(http).json()["output_ids"]


def test_a_pause_that_cannot_drain_leaves_generation_as_it_was(
    http: httpx.Client, in_flight: Future[httpx.Response]
) -> None:
    assert post(http, "/pause_generation", mode="wait", timeout_s=0).status_code == 504
    assert http.get("/readyz").status_code == 200


def test_a_repair_that_fails_keeps_admission_closed_until_it_succeeds(
    http: httpx.Client, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    post(http, "/release_memory_occupation")
    whole = engine.repair

    def broken(tags: object, lost: object) -> None:
        raise RuntimeError("the block table is gone")

    monkeypatch.setattr(engine, "repair", broken)
    response = post(http, "/resume_memory_occupation")
    assert response.status_code == 500
    assert "the block table is gone" in response.json()["message"]
    assert generate(http).status_code == 503
    monkeypatch.setattr(engine, "repair", whole)
    assert post(http, "/resume_memory_occupation").status_code == 200
    assert engine.repairs[-1] == (ALL_TAGS, ["kv_cache", "workspace"])
    assert generate(http).status_code == 200
