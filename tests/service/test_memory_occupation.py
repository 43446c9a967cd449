"""The contract of release and resume over HTTP, for every caller."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

import memsaver_core as ms
from memsaver_core._native import Saver as Driver
from memsaver_core.contract.reports import ErrorAnswer, OperationAnswer
from memsaver_core.contract.status import OccupationAnswer
from tests.dirty_pages import dirty_pages

from .tensor_engine import ALL_TAGS, KV_BYTES, MIB, WEIGHTS_BYTES, TensorEngine

PROMPT = {"input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 6, "temperature": 0}}
BOTH = KV_BYTES + WEIGHTS_BYTES


def release(http: httpx.Client, body: object = None) -> httpx.Response:
    return http.post("/release_memory_occupation", json=body)


def resume(http: httpx.Client, body: object = None) -> httpx.Response:
    return http.post("/resume_memory_occupation", json=body)


def tags_of(response: httpx.Response) -> dict[str, dict[str, object]]:
    assert response.status_code == 200, response.text
    return {tag["tag"]: tag for tag in response.json()["tags"]}


def tokens(http: httpx.Client) -> list[int]:
    response = http.post("/generate", json=PROMPT)
    assert response.status_code == 200, response.text
    return response.json()["output_ids"]


def used_bytes() -> int:
    return sum(device.used_bytes for device in ms.read_devices())


@pytest.mark.guards("memory was reported free before it was free")
def test_memory_is_back_when_the_answer_comes(http: httpx.Client) -> None:
    """The device's own count has fallen by the reported bytes, and tokens are the same after a resume."""
    before = tokens(http)
    full = used_bytes()
    unused = sum(tag.retained_bytes for tag in ms.status().tags)  # freed for good
    response = release(http, {})
    assert full - used_bytes() >= BOTH
    assert response.status_code == 200
    answer = response.json()
    OperationAnswer.model_validate(answer, extra="forbid")
    assert answer["success"] is True
    assert answer["operation"] == "release"
    assert answer["state"] == "released"
    assert answer["released_bytes"] >= BOTH
    assert sum(device["delta_bytes"] for device in answer["devices"]) <= -BOTH
    response = resume(http, {})
    assert used_bytes() >= full - unused - MIB
    assert response.json()["state"] == "resident"
    assert response.json()["resumed_bytes"] == answer["released_bytes"] - unused
    assert tokens(http) == before


@pytest.mark.guards("memory was unmapped while kernels still used it")
def test_phases_are_told_in_their_order(http: httpx.Client) -> None:
    """The engine is drained and the device synchronized before the first unmap."""
    phases = [phase["name"] for phase in release(http).json()["phases"]]
    assert phases == ["drain", "synchronize", "pause", "empty_cache", "ipc_collect", "settle"]
    phases = [phase["name"] for phase in resume(http).json()["phases"]]
    assert phases == ["restore", "repair", "reopen"]


@pytest.mark.guards("memory was unmapped while kernels still used it")
def test_a_request_in_flight_ends_before_memory_goes(http: httpx.Client, engine: TensorEngine) -> None:
    """A release waits for a running generation, which gets all its tokens."""
    expected = tokens(http)
    engine.block()
    with ThreadPoolExecutor(2) as pool:
        generating = pool.submit(tokens, http)
        engine.wait_until(lambda engine: engine.in_flight())
        releasing = pool.submit(release, http)
        engine.wait_until(lambda engine: engine.is_closed)
        assert used_bytes() >= BOTH
        engine.unblock()
        assert generating.result() == expected
        assert releasing.result().status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "body",
    [None, b"", b"{}", b"null", b'{"tags": null}', b'{"tags": []}', b'{"tags": ["weights", "kv_cache"], "other": 1}'],
)
def test_every_form_of_everything(http: httpx.Client, method: str, body: bytes | None) -> None:
    for path, state in (("/release_memory_occupation", "released"), ("/resume_memory_occupation", "resident")):
        response = http.request(method, path, content=body)
        assert response.status_code == 200, response.text
        assert response.json()["state"] == state
        assert response.json()["released_bytes"] + response.json()["resumed_bytes"] >= BOTH


@pytest.mark.parametrize("body", [b"{", b"tags", b"[]", b"1", b'"weights"', b'{"tags": "weights"}', b'{"tags": [1]}'])
def test_a_malformed_body_changes_nothing(http: httpx.Client, body: bytes) -> None:
    response = http.post("/release_memory_occupation", content=body)
    assert response.status_code == 400
    ErrorAnswer.model_validate(response.json())
    assert http.get("/memory_occupation").json()["state"] == "resident"


@pytest.mark.parametrize("field", [{"timeout_s": -1}, {"timeout_s": 1e300}, {"at_least_bytes": 0}, {"mode": "maybe"}])
def test_an_option_that_cannot_be_is_refused(http: httpx.Client, field: dict[str, object]) -> None:
    assert release(http, field).status_code == 400
    assert http.get("/memory_occupation").json()["state"] == "resident"


@pytest.mark.guards("a second release or resume failed")
def test_second_release_second_resume_and_resume_of_nothing(http: httpx.Client) -> None:
    """If the requested state is already there, that is success, and reported as such."""
    tag = tags_of(resume(http))["weights"]
    assert (tag["already"], tag["resumed_bytes"]) == (True, 0)
    assert release(http).json()["released_bytes"] >= BOTH
    tag = tags_of(release(http))["weights"]
    assert (tag["state"], tag["already"], tag["released_bytes"]) == ("released", True, 0)
    assert resume(http).json()["resumed_bytes"] >= BOTH
    tag = tags_of(resume(http))["weights"]
    assert (tag["state"], tag["already"], tag["resumed_bytes"]) == ("resident", True, 0)


@pytest.mark.guards("releasing everything failed after one tag had been released")
def test_release_of_one_tag_then_of_everything(http: httpx.Client) -> None:
    """The second release takes the rest."""
    assert tags_of(release(http, {"tags": ["weights"]}))["weights"]["already"] is False
    tags = tags_of(release(http))
    assert tags["weights"]["already"] is True
    assert tags["kv_cache"]["released_bytes"] >= KV_BYTES
    assert resume(http).json()["state"] == "resident"


@pytest.mark.guards("resuming everything failed on tags that were never released")
def test_resume_of_everything_after_a_partial_release(http: httpx.Client) -> None:
    """Without tags, a resume brings back exactly what is released."""
    before = tokens(http)
    assert release(http, {"tags": ["kv_cache"]}).json()["released_bytes"] < BOTH
    answer = resume(http).json()
    assert KV_BYTES <= answer["resumed_bytes"] < BOTH
    assert answer["state"] == "resident"
    assert tokens(http) == before


def test_tags_come_back_in_any_order_with_a_flush_between(http: httpx.Client) -> None:
    before = tokens(http)
    release(http, {"tags": ["kv_cache"]})
    release(http, {"tags": ["weights"]})
    assert resume(http, {"tags": ["weights"]}).json()["state"] == "released"
    assert http.get("/flush_cache").status_code == 200
    assert resume(http, {"tags": ["kv_cache"]}).json()["state"] == "resident"
    assert tokens(http) == before


def test_an_unknown_tag_names_those_that_exist(http: httpx.Client) -> None:
    response = release(http, {"tags": ["weights", "wieghts"]})
    assert response.status_code == 400
    assert response.json()["error"]["unknown"] == ["wieghts"]
    assert {"weights", "kv_cache"} <= set(response.json()["error"]["known"])
    assert http.get("/memory_occupation").json()["state"] == "resident"
    assert http.get("/operations").json()["operations"] == []


def test_what_nobody_asks_for_comes_back_with_the_rest(http: httpx.Client) -> None:
    """A client that releases everything and resumes weights and KV cache by name leaves no workspace released, in
    any order."""
    before = tokens(http)
    for first, last in (("weights", "kv_cache"), ("kv_cache", "weights")):
        release(http)
        assert set(tags_of(resume(http, {"tags": [first]}))) == {first}
        assert set(tags_of(resume(http, {"tags": [last]}))) == {last, "cuda_graph", "workspace"}
        assert tokens(http) == before
    release(http, {"tags": ["workspace"]})
    release(http, {"tags": ["kv_cache"]})
    assert set(tags_of(resume(http, {"tags": ["kv_cache"]}))) == {"kv_cache"}


@pytest.mark.guards("the prefix cache pointed to discarded pages")
def test_cached_prefixes_go_with_the_pages_that_held_them(http: httpx.Client, engine: TensorEngine) -> None:
    """A prefix cached before the release is not read from pages that came back as zeros."""
    before = tokens(http)
    release(http)
    resume(http)
    assert (ALL_TAGS, ["kv_cache", "workspace"]) in engine.repairs
    assert tokens(http) == before


@pytest.mark.guards("undefined KV cache pages produced NaN")
def test_kv_pages_come_back_as_zeros(http: httpx.Client, engine: TensorEngine) -> None:
    """Undefined pages have produced NaN elsewhere; KV pages are zero unless the engine asks otherwise."""
    with dirty_pages(engine.kv.data_ptr(), 2 * KV_BYTES):
        release(http, {"restore": {"kv_cache": "discard"}}).raise_for_status()
        resume(http)
    assert bool((engine.kv == -1).all())  # shows that the new pages hold garbage
    with dirty_pages(engine.kv.data_ptr(), 2 * KV_BYTES):
        assert tags_of(release(http))["kv_cache"]["restore"] == "zero"
        resume(http)
    assert not engine.kv.any()


def test_occupation_shows_what_is_held(http: httpx.Client) -> None:
    release(http, {"tags": ["kv_cache"]})
    answer = http.get("/memory_occupation").json()
    OccupationAnswer.model_validate(answer, extra="forbid")
    tags = {tag["tag"]: tag for tag in answer["tags"]}
    assert (answer["enabled"], answer["state"]) == (True, "released")
    assert tags["kv_cache"]["resident_bytes"] == 0
    assert tags["kv_cache"]["released_bytes"] >= KV_BYTES
    assert tags["weights"]["resident_bytes"] >= WEIGHTS_BYTES
    device = answer["devices"][0]
    assert device["free_bytes"] == device["total_bytes"] - device["used_bytes"]
    assert sum(source["bytes"] for source in device["sources"]) == device["used_bytes"]
    assert {"bytes", "capacity_bytes"} <= set(answer["host_backup"])
    assert answer["admission"] == {"open": False, "reason": "memory of kv_cache is released"}


def test_a_restore_policy_for_one_release(http: httpx.Client) -> None:
    answer = release(http, {"restore": {"weights": "discard"}})
    assert tags_of(answer)["weights"]["backed_up_bytes"] == 0
    assert resume(http).json()["state"] == "resident"
    http.post("/content_written")
    assert release(http, {"restore": {"weights": "keep it"}}).status_code == 400
    assert release(http, {"restore": {"wieghts": "discard"}}).status_code == 400


def test_the_policy_that_was_used_is_told(http: httpx.Client) -> None:
    """By the release, by its repeats with other policies, and by the resume."""
    for policy in ("file", "host", "discard", "zero"):
        for _ in range(2):
            assert tags_of(release(http, {"restore": {"weights": policy}}))["weights"]["restore"] == policy
        assert tags_of(release(http))["weights"]["restore"] == policy
        assert tags_of(resume(http))["weights"]["restore"] == policy
        assert tags_of(resume(http))["weights"]["restore"] == "host"
    release(http, {"restore": {"kv_cache": "file"}, "tags": ["kv_cache"]})
    assert tags_of(release(http))["kv_cache"]["restore"] == "file"
    assert tags_of(resume(http))["kv_cache"]["restore"] == "file"


@pytest.mark.parametrize("call", ["unmap", "copy_to_host", "synchronize"])
def test_a_driver_error_in_a_release_is_told_and_the_retry_works(http: httpx.Client, driver: Driver, call: str) -> None:
    before = tokens(http)
    driver.fail(call)
    response = release(http)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "driver_error"
    assert response.json()["error"]["call"]
    assert response.json()["error"]["code"]
    assert response.json()["operation_id"] in http.get("/operations").text
    assert release(http).status_code == 200
    assert resume(http).status_code == 200
    assert tokens(http) == before


@pytest.mark.parametrize("call", ["create", "map", "copy_to_device"])
@pytest.mark.guards("running out of memory or other resources killed the process")
def test_a_driver_error_in_a_resume_leaves_all_of_it_released(http: httpx.Client, driver: Driver, call: str) -> None:
    """It is rolled back, the backup is intact, and the retry works."""
    before = tokens(http)
    release(http)
    driver.fail(call)
    response = resume(http)
    assert response.status_code == 500
    assert response.json()["state"] == "released"
    assert http.get("/memory_status").json()["parked_tags"] == ALL_TAGS
    assert http.post("/generate", json=PROMPT).status_code == 503
    assert resume(http).status_code == 200
    assert tokens(http) == before


def test_a_device_that_cannot_be_read_fails_nothing_that_is_done(http: httpx.Client, driver: Driver) -> None:
    """If the device's memory cannot be read, an operation succeeds without these figures."""
    before = tokens(http)
    driver.fail("memory_info", times=10**6)
    released = release(http)
    assert released.status_code == 200
    assert tags_of(released)["weights"]["released_bytes"] > 0
    assert released.json()["phases"]
    assert not released.json()["devices"]
    assert not any(phase["devices"] for phase in released.json()["phases"])
    refused = resume(http)  # which needs the free memory
    assert (refused.status_code, refused.json()["error"]["call"], refused.json()["state"]) == (
        500,
        "memory_info",
        "released",
    )
    driver.heal()
    resumed = resume(http)
    assert resumed.status_code == 200
    assert resumed.json()["devices"]
    assert tokens(http) == before


def test_a_coordinator_is_known_by_its_whole_name(http: httpx.Client) -> None:
    """One whose name begins with that of another was taken for it."""
    http.get("/memory_occupation", headers={"Memsaver-Coordinator": "memsaver-coordinator a"}).raise_for_status()
    for agent, holder in (("memsaver-coordinator ab", "memsaver-coordinator a"), ("memsaver-coordinator a", None)):
        answer = http.post("/release_memory_occupation", headers={"User-Agent": agent}).json()
        assert answer.get("coordinator") == holder


@pytest.mark.parametrize("call", [release, resume])
def test_an_engine_without_data_parallel_ones_refuses_to_name_some(
    http: httpx.Client, call: Callable[[httpx.Client, object], httpx.Response]
) -> None:
    """Nothing is released."""
    refused = call(http, {"dp_ranks": [0]})
    assert refused.status_code == 409
    assert "leave out dp_ranks" in refused.json()["message"]
    assert "leave out dp_ranks" in call(http, {"dp_ranks": [0], "dry_run": True}).json()["message"]
    assert tokens(http)
