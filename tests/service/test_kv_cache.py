"""The KV cache of the reference engine gets smaller and larger while it serves, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import memsaver_core as ms
from memsaver_core.contract.errors import UnsupportedError
from memsaver_core.contract.reports import PlanAnswer, ResizedAnswer
from memsaver_server.client import Client
from memsaver_server.client.errors import (
    ConflictError,
    DeviceMemoryError,
    DrainDeadlineError,
    InvalidRequestError,
    OperationCancelledError,
)
from memsaver_server.fleet import Member, MemoryRecord
from memsaver_server.reference.engine import TransformersEngine
from tests.fleet.served_fleet import served
from tests.waiting import wait_until

from .tensor_engine import MIB, tenant

#: A page is a slot of 512 tokens.
PAGE, TOKENS, PAGES = MIB, 512, 9
#: Bytes that are rounded down to so many pages.
THREE, FOUR = 3 * PAGE + 100, 4 * PAGE + 100
PROMPTS = [[3 + n, 5, 8, 13] for n in range(PAGES)]


@pytest.fixture(scope="module")
def only_engine() -> Iterator[TransformersEngine]:
    engine = TransformersEngine(kv_cache_bytes=(PAGES + 1) * PAGE, max_len=TOKENS)
    yield engine
    engine.close()


@pytest.fixture
def engine(only_engine: TransformersEngine) -> TransformersEngine:
    return only_engine


@pytest.fixture
def client(http: httpx.Client) -> Iterator[Client]:
    with Client(str(http.base_url)) as client:
        yield client
        client.resume()
        client.continue_generation()
        client.resize_kv_cache(fraction=1.0)


def used_bytes() -> int:
    return ms.read_devices()[0].used_bytes


def generate(client: Client, prompt: list[int]) -> list[int]:
    answer = client.generate(input_ids=prompt, max_new_tokens=8, ignore_eos=True)
    return list(answer["output_ids"])


def outputs(client: Client) -> list[list[int]]:
    """All at once: one batch."""
    with ThreadPoolExecutor(PAGES) as pool:
        return list(pool.map(partial(generate, client), PROMPTS))


@pytest.fixture
def frozen(client: Client, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Future[Any]]]:
    """As many requests as there are pages, each on one, and frozen until generation continues."""
    choose, hold = engine._choose, [True]
    monkeypatch.setattr(engine, "_choose", lambda: choose()[:0] if hold[0] else choose())
    with ThreadPoolExecutor(PAGES) as pool:
        requests = [pool.submit(generate, client, prompt) for prompt in PROMPTS]
        wait_until(lambda: client.kv_cache().used_bytes == PAGES * PAGE)
        client.pause_generation("keep")
        hold[0] = False
        yield requests
        client.continue_generation()


def test_half_of_it_goes_and_comes_back(client: Client) -> None:
    whole = client.kv_cache()
    assert (whole.bytes, whole.full_bytes, whole.tokens) == (PAGES * PAGE, PAGES * PAGE, PAGES * TOKENS)
    assert (whole.used_bytes, whole.smallest_bytes, whole.largest_bytes) == (0, PAGE, PAGES * PAGE)
    before, tokens = used_bytes(), outputs(client)
    for _ in range(2):
        half = client.resize_kv_cache(bytes=FOUR)
        cache = half.kv_cache
        assert (cache.bytes, cache.tokens, cache.full_bytes) == (4 * PAGE, 4 * TOKENS, PAGES * PAGE)
        assert before - used_bytes() == half.released_bytes == 5 * PAGE
        assert half.message.startswith("the KV cache has 4.0 MiB of 9.0 MiB: released 5.0 MiB in ")
        assert outputs(client) == tokens
        assert client.resize_kv_cache(fraction=1.0).kv_cache.bytes == PAGES * PAGE
        assert used_bytes() == before
        assert outputs(client) == tokens


@pytest.mark.parametrize(
    ("size", "pages"),
    [
        ({"bytes": 2 * PAGE - 1}, 1),
        ({"fraction": 0.01}, 1),
        ({"fraction": 0.99}, 8),
        ({"tokens": 1}, 1),
        ({"tokens": TOKENS + 1}, 2),
    ],
)
def test_sizes(client: Client, size: dict[str, Any], pages: int) -> None:
    assert client.resize_kv_cache(**size).kv_cache.bytes == client.kv_cache().bytes == pages * PAGE


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({}, "send one of bytes, fraction and tokens"),
        ({"bytes": PAGE, "tokens": 5}, "send one of bytes, fraction and tokens"),
        ({"bytes": PAGE - 1}, "a page takes 1.0 MiB"),
        ({"bytes": (PAGES + 1) * PAGE}, "the largest cache, with which the engine began, has 9.0 MiB or 4608 tokens"),
        ({"fraction": 1.5}, "fraction"),
        ({"tokens": 10_000}, "a KV cache of 20 pages is impossible"),
        ({"fraction": 0.5, "mode": "keep"}, "mode"),
    ],
)
def test_what_is_refused(client: Client, wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        client.resize_kv_cache(**wrong)
    assert client.kv_cache().bytes == PAGES * PAGE


def test_pages_in_use_stay_until_their_requests_end(
    client: Client, engine: TransformersEngine, frozen: list[Future[list[int]]]
) -> None:
    with pytest.raises(DrainDeadlineError, match=r"still ran after 0 s.*the KV cache is as before"):
        client.resize_kv_cache(fraction=0.5, timeout_s=0)
    now = client.kv_cache()
    assert (now.bytes, now.used_bytes, now.smallest_bytes) == (PAGES * PAGE, PAGES * PAGE, PAGES * PAGE)
    with ThreadPoolExecutor(2) as pool:
        shrinking = pool.submit(client.resize_kv_cache, fraction=0.5, timeout_s=600)
        wait_until(lambda: engine._slots.limit == 4)
        with pytest.raises(ConflictError, match=r"cannot resize kv_cache: resize \w+ of kv_cache is in progress"):
            client.resize_kv_cache(fraction=1.0)
        joins = pool.submit(client.resize_kv_cache, fraction=0.5, timeout_s=600)
        wait_until(lambda: client.operations()[0].callers == 2)
        assert not shrinking.done()
        client.continue_generation()
        assert shrinking.result().kv_cache.bytes == 4 * PAGE
        assert joins.result().operation_id == shrinking.result().operation_id
    assert [each.result() for each in frozen] == outputs(client)


def test_requests_are_preempted_if_asked(client: Client, frozen: list[Future[list[int]]]) -> None:
    before = used_bytes()
    assert client.resize_kv_cache(fraction=0.5, mode="preempt", timeout_s=0).kv_cache.bytes == 4 * PAGE
    assert before - used_bytes() == 5 * PAGE
    assert client.kv_cache().used_bytes == 4 * PAGE
    client.continue_generation()
    assert [each.result() for each in frozen] == outputs(client)


def test_queued_resizes_give_way_to_a_release(client: Client, frozen: list[Future[list[int]]]) -> None:
    waits = client.start_resize_kv_cache(fraction=0.5, timeout_s=600)
    queued = client.start_resize_kv_cache(fraction=0.3, timeout_s=600, wait=True)
    assert client.plan("resize", fraction=0.5, timeout_s=600).blockers == (), "it joins"
    assert client.occupation().operation_id is None, "the engine serves"
    assert client.release(["weights"], mode="keep").released_bytes > 0
    assert [client.operation(each.operation_id).status for each in (waits, queued)] == ["cancelled"] * 2
    client.resume()


@pytest.mark.parametrize("verb", ["release", "resume"])
def test_a_resize_that_waits_gives_way(
    client: Client, engine: TransformersEngine, frozen: list[Future[list[int]]], verb: str
) -> None:
    with ThreadPoolExecutor(1) as pool:
        shrinking = pool.submit(client.resize_kv_cache, fraction=0.5, timeout_s=600)
        wait_until(lambda: engine._slots.limit == 4)
        if verb == "release":
            assert client.release(mode="keep").released_bytes > PAGES * PAGE
        client.resume()
        with pytest.raises(OperationCancelledError, match=rf"was cancelled by a {verb} of \S+ memsaver-client"):
            shrinking.result()
    assert client.kv_cache().bytes == PAGES * PAGE
    client.continue_generation()
    assert [each.result() for each in frozen] == outputs(client)


def test_it_is_an_operation(client: Client, frozen: list[Future[list[int]]]) -> None:
    started = client.start_resize_kv_cache(fraction=0.5, timeout_s=600)
    wait_until(lambda: client.operation(started.operation_id).phase == "drain")
    with pytest.raises(InvalidRequestError, match="a KV cache of 20 pages"):
        client.start_resize_kv_cache(tokens=10_000)
    assert client.cancel(started.operation_id).status == "cancelled"
    assert client.kv_cache().bytes == PAGES * PAGE
    started = client.start_resize_kv_cache(fraction=0.5, mode="preempt", timeout_s=600)
    assert [event.name for event in client.events(started.operation_id)][-1] == "done"
    done = client.operation(started.operation_id)
    assert (done.operation, done.status, done.tags) == ("resize", "succeeded", ("kv_cache",))
    assert [phase.name for phase in done.phases] == ["drain", "resize"]
    assert [phase.devices[0].delta_bytes for phase in done.phases] == [0, -5 * PAGE]
    assert isinstance(done.answer, ResizedAnswer)
    assert (done.answer.kv_cache.bytes, done.answer.tags[0].released_bytes) == (4 * PAGE, 5 * PAGE)
    now = client.occupation()
    assert (now.state, now.kv_cache) == ("resident", client.kv_cache())
    metrics = {each.name: each for each in text_string_to_metric_families(httpx.get(f"{client.address}/metrics").text)}
    sizes = {sample.labels["kind"]: sample.value for sample in metrics["memsaver_kv_cache_bytes"].samples}
    assert sizes == {
        "size": 4 * PAGE,
        "used": 4 * PAGE,
        "smallest": 4 * PAGE,
        "largest": PAGES * PAGE,
        "full": PAGES * PAGE,
    }
    counted = [sample.labels for sample in metrics["memsaver_operations"].samples]
    assert {"operation": "resize", "outcome": "cancelled"} in counted


def test_metrics_do_not_wait_for_the_engine_nor_fail_with_it(
    client: Client, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine whose cache cannot be resized has no series of it."""

    def scrape() -> str:
        return httpx.get(f"{client.address}/metrics").raise_for_status().text

    def refuse() -> None:
        raise UnsupportedError("the KV cache cannot be resized")

    wait_until(lambda: "memsaver_kv_cache_bytes{" in scrape())
    with monkeypatch.context() as changed:
        changed.setattr(engine, "kv_cache", refuse)
        wait_until(lambda: "memsaver_kv_cache_bytes{" not in scrape())


def test_a_dry_run_changes_nothing(client: Client, frozen: list[Future[list[int]]]) -> None:
    plan = client.plan("resize", fraction=0.5)
    assert plan.message == "dry run: would release 5.0 MiB of kv_cache, after requests on 5.0 MiB of it"
    assert isinstance(plan, PlanAnswer)
    assert ([tag.bytes for tag in plan.tags], plan.blockers) == ([5 * PAGE], ())
    assert client.kv_cache().bytes == PAGES * PAGE
    client.resize_kv_cache(fraction=0.5, mode="preempt")
    assert client.plan("resize", fraction=0.5).message == "dry run: nothing to resize"
    assert client.plan("resize", fraction=1.0).message == "dry run: would resume 5.0 MiB of kv_cache"
    with tenant(left=2 * PAGE):
        (blocker,) = client.plan("resize", fraction=1.0).blockers
        assert blocker == f"device 0: {5 * PAGE} bytes are needed, {2 * PAGE} are free"
    client.release(mode="keep")
    assert client.plan("resize", fraction=1.0).blockers == ("the memory of 'kv_cache' is released; resume it first",)
    client.resume()


def test_a_release_and_its_resume_keep_the_size(client: Client) -> None:
    tokens = outputs(client)
    client.resize_kv_cache(fraction=0.5)
    before = used_bytes()
    client.release()
    with pytest.raises(ConflictError, match="'kv_cache' is released; resume it first"):
        client.resize_kv_cache(fraction=1.0)
    client.resume()
    assert (used_bytes(), client.kv_cache().bytes) == (before, 4 * PAGE)
    (tag,) = (tag for tag in client.occupation().tags if tag.tag == "kv_cache")
    assert (tag.state, tag.shrunk_bytes) == ("resident", 5 * PAGE)
    assert outputs(client) == tokens


def test_a_coordinator_limits_it_as_aibrix_asks(client: Client, tmp_path: Path) -> None:
    path = "/v1/runtime/models/kv-limit"
    asked = {"model_name": "m", "limit_bytes": FOUR, "operation_id": "límit-1"}
    audit = tmp_path / "audit.log"
    with served([Member("a", client.address, model="m")], audit_file=str(audit)) as fleet:
        for applied in (True, False):
            answer = fleet.post(path, json=asked).json()
            (row,) = answer.pop("engines")
            assert (row["name"], row["state"], row["released_bytes"]) == ("a", "resident", (PAGES - 4) * PAGE)
            assert client.kv_cache().bytes == 4 * PAGE
            named = {"model_name": "m", "operation_id": "límit-1"}
            assert answer == {"status": "success", **named, "applied": applied, "phase": "active"}
        operation = client.operations()[0]
        assert (operation.operation_id, " memsaver-coordinator" in operation.client) == (row["operation_id"], True)
        client.resize_kv_cache(fraction=1.0)
        fleet.post(path, json=asked).raise_for_status()
        assert client.kv_cache().bytes == PAGES * PAGE, "a repeat is the same operation"
        other = fleet.post(path, json={**asked, "limit_bytes": THREE})
        assert (other.status_code, "a different request" in other.json()["message"]) == (422, True)
        assert fleet.post(path, json={**asked, "limit_bytes": True}).status_code == 400
        del asked["operation_id"]
        refused = fleet.post(path, json={**asked, "limit_bytes": 1})
        assert (refused.status_code, "a page takes 1.0 MiB" in refused.json()["message"]) == (400, True)
        elsewhere = fleet.post(path, json={**asked, "model_name": "n"})
        assert elsewhere.status_code == 404
        counted = 'memsaver_fleet_operations_total{operation="resize",outcome="success"} 1.0'
        assert counted in fleet.get("/metrics").text
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["outcome"] for line in lines] == ["success", "bad_request", "not_found"]
    assert (lines[0]["event"], lines[0]["operation_id"], lines[0]["origin"]) == ("resize", "límit-1", "caller")
    assert lines[0]["client"].startswith("127.0.0.1 python-httpx")
    assert lines[0]["engines"] == {"a": "done"}
    assert lines[0]["released_bytes"] == (PAGES - 4) * PAGE
    assert client.kv_cache().bytes == PAGES * PAGE


def test_a_limit_that_the_end_of_the_coordinator_cuts_off_is_audited(
    client: Client, frozen: list[Future[Any]], tmp_path: Path
) -> None:
    asked, audit = {"model_name": "m", "limit_bytes": FOUR, "operation_id": "cut"}, tmp_path / "audit.log"
    with ThreadPoolExecutor(1) as pool:
        with served([Member("a", client.address, model="m")], audit_file=str(audit)) as fleet:
            url = fleet.base_url.join("/v1/runtime/models/kv-limit")
            limited = pool.submit(httpx.post, url, json=asked, timeout=600)
            wait_until(
                lambda: any(each.operation == "resize" and each.status == "running" for each in client.operations())
            )
        assert limited.result().status_code == 503
    wait_until(lambda: audit.read_text().endswith("\n"))
    (line,) = [json.loads(line) for line in audit.read_text().splitlines()]
    assert (line["operation_id"], line["outcome"]) == ("cut", "server_ends")


def test_the_id_of_a_limit_is_its_request_after_a_restart_of_the_coordinator(client: Client, tmp_path: Path) -> None:
    """A repeat was answered as applied; with another limit, an engine that had started anew did it."""
    models, record = "/v1/runtime/models", MemoryRecord()
    limit, sleep = {"model_name": "m", "operation_id": "one"}, {"model_name": "m", "operation_id": "two"}
    members, audit = [Member("a", client.address, model="m")], tmp_path / "audit.log"
    with served(members, record=record) as fleet:
        assert fleet.post(f"{models}/kv-limit", json={**limit, "limit_bytes": FOUR}).json()["applied"]
        fleet.post(f"{models}/sleep", json=sleep).raise_for_status()
        fleet.post(f"{models}/wake", json={"model_name": "m"}).raise_for_status()
    with served(members, record=record, audit_file=str(audit)) as fleet:
        known = [operation.operation_id for operation in client.operations()]
        again = fleet.post(f"{models}/kv-limit", json={**limit, "limit_bytes": FOUR}).json()
        assert (again["status"], again["applied"]) == ("success", False)
        for path, body, first in (
            ("kv-limit", {**limit, "limit_bytes": THREE}, "resize one"),
            ("sleep", limit, "resize one"),
            ("kv-limit", {**sleep, "limit_bytes": FOUR}, "release two"),
        ):
            refused = fleet.post(f"{models}/{path}", json=body)
            assert (refused.status_code, first in refused.json()["message"]) == (422, True), refused.text
        assert [operation.operation_id for operation in client.operations()] == known, "an engine was asked"
    assert audit.read_text() == "", "a repeat moves nothing"
    client.resize_kv_cache(fraction=1.0)


def test_growing_without_enough_memory_changes_nothing(client: Client) -> None:
    tokens = generate(client, PROMPTS[0])
    client.resize_kv_cache(fraction=0.5)
    with tenant(left=2 * PAGE):
        assert client.kv_cache().largest_bytes == 6 * PAGE
        with pytest.raises(DeviceMemoryError, match="too little free memory to grow") as short:
            client.resize_kv_cache(fraction=1.0)
        assert (short.value.needed_bytes, short.value.free_bytes) == (5 * PAGE, 2 * PAGE)
        assert client.kv_cache().bytes == 4 * PAGE
        assert generate(client, PROMPTS[0]) == tokens
        assert client.resize_kv_cache(tokens=6 * TOKENS).kv_cache.bytes == 6 * PAGE


def test_growing_waits_for_memory(client: Client) -> None:
    tokens = outputs(client)
    client.resize_kv_cache(fraction=0.5)
    with ThreadPoolExecutor(1) as pool:
        with tenant(left=2 * PAGE):
            growing = pool.submit(client.resize_kv_cache, fraction=1.0, wait_for_memory_s=600)
            wait_until(lambda: client.operations()[0].phase == "wait_for_memory")
            assert outputs(client) == tokens
        assert growing.result().kv_cache.bytes == PAGES * PAGE
    assert outputs(client) == tokens


def test_a_resume_brings_back_what_finds_room(client: Client) -> None:
    tokens = outputs(client)
    everything = client.release().released_bytes
    with tenant(left=everything - 5 * PAGE):
        with pytest.raises(DeviceMemoryError):
            client.resume()
        plan = client.plan("resume", kv_cache="shrink")
        assert not plan.blockers
        resumed = client.resume(kv_cache="shrink").resumed_bytes
        assert everything - 7 * PAGE <= resumed <= everything - 5 * PAGE
        assert client.kv_cache().bytes in (3 * PAGE, 4 * PAGE)
        assert outputs(client) == tokens
    assert client.resize_kv_cache(fraction=1.0).kv_cache.bytes == PAGES * PAGE
    assert outputs(client) == tokens


def test_a_resume_without_room_for_a_page_leaves_the_size(client: Client, http: httpx.Client) -> None:
    weights = client.release(["weights"]).released_bytes
    client.release()
    with tenant(left=weights + PAGE // 2), pytest.raises(DeviceMemoryError):
        client.resume(["weights", "kv_cache"], kv_cache="shrink")
    (cache,) = (tag for tag in http.get("/memory_occupation").json()["tags"] if tag["tag"] == "kv_cache")
    assert (cache["resident_bytes"], cache["shrunk_bytes"]) == (0, 0)
    client.resume()
    assert client.kv_cache().bytes == PAGES * PAGE


def test_a_prepared_resume_does_not_shrink(http: httpx.Client) -> None:
    refused = http.post("/resume_memory_occupation", json={"kv_cache": "shrink", "prepare": True})
    assert refused.status_code == 400
    assert "holds the memory of the whole KV cache" in refused.text
