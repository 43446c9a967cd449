"""The API description is true, and what does not fit it changes nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import httpx
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

import memsaver_core as ms
from tests.reliability.figures import keep

from .tensor_engine import TensorEngine

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
BAD_REQUESTS = 10_000


def test_every_answer_is_as_described(http: httpx.Client) -> None:
    """State-changing calls included. 503 and 504 are answers (memory is away, a drain of no time); 500 never is."""
    described = schemathesis.openapi.from_url(str(http.base_url.join("/openapi.json")))
    seen: dict[int, int] = {}
    for found in described.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        def answers(case: schemathesis.Case) -> None:
            response = case.call(timeout=60)
            assert response.status_code != 500, response.text
            seen[response.status_code] = seen.get(response.status_code, 0) + 1
            case.validate_response(response, checks=CHECKS)

        answers()
    keep("described_requests", {"requests": sum(seen.values())})
    assert seen.get(200, 0) > 0


def bad_request(choose: random.Random) -> tuple[str, str, bytes]:
    """Return a method, a path and a body that no server should accept."""
    path = choose.choice(
        [
            "/release_memory_occupation",
            "/resume_memory_occupation",
            "/release_memory",
            "/resume_memory",
            "/sleep",
            "/wake_up",
        ]
    )
    junk = bytes(choose.randrange(256) for _ in range(choose.randrange(1, 40)))
    word = "".join(choose.choice("abcdefghijk \x00é\ud800") for _ in range(choose.randrange(1, 12)))
    values = [-1, 1e400, "x" * 300, [word], {"a": word}, [[]], -(10**30), float("nan"), [None]]
    body = choose.choice(
        [
            b"{" + junk,
            b"[" + junk,
            json.dumps({"tags": choose.choice([word, 7, {"weights": True}, [1], ["weights", word], [None]])}).encode(),
            json.dumps({"timeout_s": choose.choice(values), "wait_for_memory_s": -1, "level": 9}).encode(),
            json.dumps({"tags": ["weights", f"no-{choose.random()}"]}).encode(),
            json.dumps([choose.choice(values)]).encode(),
            b"[" * 100_000,
        ]
    )
    return choose.choice(["POST", "POST", "PUT", "DELETE"]), path, body


def test_bad_requests_leave_everything_as_it_was(serve: Callable[..., httpx.Client], engine: TensorEngine) -> None:
    http = serve()
    choose = random.Random(2026)
    before = ms.status()
    for _ in range(BAD_REQUESTS):
        method, path, body = bad_request(choose)
        response = http.request(method, path, content=body)
        assert response.status_code in (400, 405), (method, path, body[:200], response.text)
        assert response.json()["success"] is False
    after = ms.status()
    assert (after.state, after.tags) == (before.state, before.tags)
    assert http.get("/operations").json()["operations"] == []
    assert not engine.is_closed
    keep("bad_requests", {"requests": BAD_REQUESTS})
