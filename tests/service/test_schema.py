"""The API description is true, and requests that do not fit it change nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.amount import amount
from tests.reliability.figures import keep

from .surface import posts, routes, seen
from .tensor_engine import TensorEngine

EXAMPLES = amount(2, long=100)
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_answer_is_as_described(http: httpx.Client) -> None:
    """State-changing calls included. 503 and 504 are valid answers (memory released, a drain without time); 500
    never is."""
    described = schemathesis.openapi.from_url(str(http.base_url.join("/openapi.json")))
    statuses: dict[int, int] = {}
    for found in described.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def answers(case: schemathesis.Case) -> None:
            response = case.call(timeout=600)
            assert response.status_code != 500, response.text
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            case.validate_response(response, checks=CHECKS)
            for one in http.get("/operations").json()["operations"]:
                if one["status"] in ("queued", "running", "prepared"):  # else later calls would wait for its lease
                    http.post(f"/operations/{one['operation_id']}/abort")

        answers()
    keep("described_requests", {"requests": sum(statuses.values())})
    assert statuses.get(200, 0) > 0


#: Fits no field of any body: neither a text or number nor a list or map of those.
WRONG = (
    lambda word: [{"a": word}],
    lambda word: {word: [word]},
    lambda word: {"weights": {"a": word}},
    lambda word: [[]],
    lambda word: [None],
    lambda word: [word, [word]],
)
#: Further values that do not fit, by field.
WRONG_VALUES: dict[str, list[Any]] = {
    "tags": ["weights", 7, {"weights": True}, [1], ["weights", 7], [["weights"]], ["x" * 300], ["\ud800"]],
    "timeout_s": [-1, 1e400, float("nan"), "soon", 86401],
    "wait_for_memory_s": [-1, 1e400, -(10**30), "x"],
    "mode": ["sideways", 1, "WAIT", "\x00"],
    "restore": [{"weights": "tape"}, {"weights": None}, "host", ["host"]],
    "level": [9, -1, 1.5, "deep"],
    "at_least_bytes": [0, -1, 1 << 63, 10**30, "much"],
    "load_format": [7, True],
    "serialized_named_tensors": [[], ["!"], ["AAAA", "AAAA"], ["gASVAA=="], ["é"], "AAAA", [7]],
    "model_path": [7, "/nowhere/at/all", "", "\x00", "/", "\ud800"],
    "input_ids": [[], [-1], [997], ["1"], [1e400], "1", {"1": 1}],
    "sampling_params": [{"max_new_tokens": -1}, {"max_new_tokens": "4"}, {"max_new_tokens": 1 << 40}, [1], "x"],
    "text": ["x", 7],
}
UNKNOWN_TAGS = [["no-such-tag"], ["weights", "no-such-tag"], ["WEIGHTS"], [""]]
#: Has its own tag, and ignores others.
KNOWS_ITS_TAG = "/release_kv_cache_memory"
BAD_REQUESTS = amount(100, long=20_000)


def bad_body(choose: random.Random, path: str, fields: list[str]) -> bytes:
    """A body that this route, which reads these fields, should refuse."""
    junk = bytes(choose.randrange(256) for _ in range(choose.randrange(1, 40)))
    word = "".join(choose.choice("abcdefghijk \x00é\ud800") for _ in range(choose.randrange(1, 12)))
    kinds = [
        b"{," + junk,  # with any junk it is no JSON
        b"[" + junk,
        json.dumps([choose.choice([-1, float("nan"), word, {"tags": ["weights"]}])]).encode(),
        json.dumps(word).encode(),
        b"[" * 60_000,
        b'{"a":' * 12_000,
    ]
    if fields:
        field = choose.choice(fields)
        values = [*WRONG_VALUES.get(field, []), *(wrong(word) for wrong in WRONG)]
        if field == "tags" and path != KNOWS_ITS_TAG:
            values += UNKNOWN_TAGS
        kinds += [json.dumps({field: choose.choice(values), "other": word}).encode()] * 6
    return choose.choice(kinds)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_bad_requests_leave_everything_as_it_was(serve: Callable[..., httpx.Client], engine: TensorEngine) -> None:
    """On every POST route, with the full state compared each time, while resident and while released."""
    http = serve()
    choose = random.Random(2026)
    bodies = posts(engine)
    assert sorted(bodies) == [path for method, path in routes() if method == "POST"]
    http.post("/generate", json={"input_ids": [1, 2, 3]}).raise_for_status()  # so that there is a cache to drop
    for state in ("resident", "released"):
        if state == "released":
            http.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).raise_for_status()
        operations = http.get("/operations").json()["operations"]
        before = seen(engine)
        for number in range(BAD_REQUESTS // 2):
            path = list(bodies)[number % len(bodies)]
            method, body = choose.choice(["POST", "POST", "PUT", "DELETE"]), bad_body(choose, path, bodies[path])
            response = http.request(method, path, content=body)
            assert response.status_code in (400, 405), (method, path, body[:200], response.text)
            assert response.json()["success"] is False
            assert seen(engine) == before, (method, path, body[:200])
        assert http.get("/operations").json()["operations"] == operations
    keep("bad_requests", {"requests": BAD_REQUESTS})
