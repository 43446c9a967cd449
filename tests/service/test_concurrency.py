"""Many clients at once: the answers must fit one order of the operations, each taking effect at one moment."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import pytest

from tests.amount import amount
from tests.waiting import wait_until

from .tensor_engine import ALL_TAGS

CLIENTS = 64
CALLS = amount(5, long=100)
COMMON = {"kv_cache", "weights"}
PROMPT = {"input_ids": [3, 5, 8], "sampling_params": {"max_new_tokens": 3, "temperature": 0}}


@dataclass(frozen=True)
class Call:
    """A call as its client saw it."""

    kind: str
    sent: float
    answered: float
    status: int
    answer: dict[str, object]


@dataclass(frozen=True)
class Step:
    """An operation as the server recorded it. While it runs, the released tags change from ``before`` to ``after``;
    these are equal if it was prepared and then aborted."""

    operation_id: str
    operation: str
    tags: frozenset[str]
    accepted: float
    began: float
    ended: float
    before: frozenset[str]
    after: frozenset[str]
    prepared: bool
    aborted: bool


class Model:
    """Which tags may have been released at which time, if the operations took effect one after another."""

    def __init__(self, operations: list[dict[str, object]]) -> None:
        self.steps: list[Step] = []
        released, unnamed = frozenset[str](), frozenset[str]()
        for operation in sorted(operations, key=lambda operation: operation["started_at"]):
            prepared = "prepared" in [phase["name"] for phase in operation["phases"]]
            aborted = operation["status"] == "cancelled"
            assert operation["status"] == "succeeded" or (aborted and prepared), operation
            tags = frozenset(operation["tags"] or ALL_TAGS)
            if aborted:
                after = released
            elif operation["operation"] == "release":
                after = released | tags
                unnamed = unnamed - tags if operation["tags"] else after
            else:
                after = released - tags
                # Tags released without being named come back with the last named one.
                after = frozenset() if after <= unnamed and not after & COMMON else after
                unnamed &= after
            began, ended = operation["started_at"], operation["finished_at"]
            assert not self.steps or self.steps[-1].ended <= began, "two operations ran at once"
            name, accepted = operation["operation_id"], operation["created_at"]
            fate = (released, after, prepared, aborted)
            self.steps.append(Step(name, operation["operation"], tags, accepted, began, ended, *fate))
            released = after

    def step(self, operation_id: object) -> Step:
        return next(step for step in self.steps if step.operation_id == operation_id)

    def undone_before(self, call: Call, step: Step) -> Step | None:
        """Return the step that undoes ``step``, of ``call``, although it was accepted before that was sent."""
        for later in self.steps[self.steps.index(step) + 1 :]:
            undoes = later.operation != step.operation and not later.aborted
            if undoes and later.tags & step.tags and later.accepted < call.sent:
                return later
        return None

    def possible(self, call: Call) -> list[tuple[frozenset[str], bool]]:
        """Return each (released tags, running operation) that held at some moment of the call."""
        found: list[tuple[frozenset[str], bool]] = []
        quiet_since, released = 0.0, frozenset[str]()
        for step in self.steps:
            if quiet_since <= call.answered and step.began >= call.sent:
                found.append((released, False))
            if step.began <= call.answered and step.ended >= call.sent:
                found += [(step.before, True), (step.after, True)]
            quiet_since, released = step.ended, step.after
        if quiet_since <= call.answered:
            found.append((released, False))
        return found


def check(call: Call, model: Model, expected: list[int]) -> None:
    possible = model.possible(call)
    if call.kind == "generate" and call.status == 200:
        assert call.answer["output_ids"] == expected, "a wrong token"
        # A release waits for it, so it may end inside one; it begins while everything is resident.
        assert any(not released for released, _ in possible), call
    elif call.kind == "generate":
        assert call.status == 503, call
        assert any(released or busy for released, busy in possible), call
    elif call.kind == "status":
        away = frozenset(tag["tag"] for tag in call.answer["tags"] if tag["state"] != "resident" and tag["bytes"])
        assert any(away == released or busy for released, busy in possible), call
    elif call.kind in ("commit", "abort"):
        check_end(call, model)
    elif call.kind.startswith("prepare") and call.status == 409 and call.answer["error"]["type"] == "cancelled":
        assert model.step(call.answer["operation_id"]).aborted  # by another client that had prepared the same
    elif call.status == 409:
        in_the_way = model.step(call.answer["error"]["operation_id"])
        assert in_the_way.prepared or in_the_way.operation != call.kind.removeprefix("prepare ")
        # It was queued when the call came, and so it ended after the call was sent.
        assert in_the_way.ended >= call.sent, call
    elif call.kind.startswith("prepare"):
        assert call.status == 200, call
        step = model.step(call.answer["operation_id"])
        assert call.kind == f"prepare {step.operation}"
        assert step.began <= call.answered, call
        assert step.ended >= call.sent, call
    elif call.status == 503 and call.kind in ("release", "resume"):
        assert call.answer["error"]["type"] == "too_many_operations", call
    elif call.kind in ("release", "resume"):
        assert call.status in (200, 202), call
        step = model.step(call.answer["operation_id"])
        assert step.operation == call.kind
        assert model.undone_before(call, step) is None, "the operation was undone by one accepted before the call"
        if call.status == 202:
            assert step.ended >= call.sent, "the operation took effect before its call"
            return
        assert call.sent <= step.ended <= call.answered, "the operation took effect outside of its call"
        assert call.answer["state"] == ("released" if step.after else "resident"), call
    else:
        assert call.status == 200, call


def check_end(call: Call, model: Model) -> None:
    """Of what was prepared: one of commit and abort wins, and every later call is told which."""
    if call.status == 200:
        step = model.step(call.answer["operation_id"])
        assert step.aborted is (call.kind == "abort"), call
    else:
        assert call.status == 409, call
        step = model.step(call.answer["error"]["operation_id"])
        assert call.answer["error"]["type"] == {"commit": "lease_ended", "abort": "too_late"}[call.kind]
        assert step.aborted is (call.kind == "commit"), call
    if call.status == 200 or call.kind == "commit":
        assert step.ended <= call.answered, call


def use(base_url: str, seed: int, calls: list[Call], start: threading.Barrier) -> None:
    choose = random.Random(seed)
    with httpx.Client(base_url=base_url, timeout=600, verify=False) as http:
        start.wait()
        for _ in range(CALLS):
            kind = choose.choice(["release", "resume", "generate", "generate", "status", "scrape", "prepare"])
            sent = time.time()
            if kind == "prepare":
                prepare_and_end(http, choose, calls)
                continue
            if kind in ("release", "resume"):
                body = {"tags": choose.choice([None, ["weights"], ["kv_cache"], ["kv_cache", "weights"]])}
                body |= {"wait": choose.random() < 0.5, "async": choose.random() < 0.3}
                response = http.post(f"/{kind}_memory_occupation", json=body)
            elif kind == "generate":
                response = http.post("/generate", json=PROMPT)
            else:
                response = http.get("/memory_occupation" if kind == "status" else "/metrics")
            answer = {} if kind == "scrape" else response.json()
            calls.append(Call(kind, sent, time.time(), response.status_code, answer))


def prepare_and_end(http: httpx.Client, choose: random.Random, calls: list[Call]) -> None:
    """Prepare an operation, and commit or abort it."""
    verb = choose.choice(["release", "resume"])
    body = {"tags": choose.choice([None, ["kv_cache"]]), "prepare": True, "wait": choose.random() < 0.5}
    sent = time.time()
    response = http.post(f"/{verb}_memory_occupation", json=body)
    calls.append(Call(f"prepare {verb}", sent, time.time(), response.status_code, response.json()))
    if response.status_code == 200 and response.json().get("prepared"):
        end = choose.choice(["commit", "abort"])
        sent = time.time()
        response = http.post(f"/operations/{response.json()['operation_id']}/{end}")
        calls.append(Call(end, sent, time.time(), response.status_code, response.json()))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.guards("two engines on one GPU hung")
def test_many_clients_at_once(serve: Callable[..., httpx.Client]) -> None:
    """No wrong answer, no deadlock, and no generation reads released memory."""
    http = serve(history=CLIENTS * CALLS, drain_timeout_s=60)
    expected = http.post("/generate", json=PROMPT).json()["output_ids"]
    calls: list[Call] = []
    start = threading.Barrier(CLIENTS)
    clients = [
        threading.Thread(target=use, args=(str(http.base_url), seed, calls, start), daemon=True)
        for seed in range(CLIENTS)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join(1500)
        assert not client.is_alive(), "a client never got its answer"
    assert len(calls) >= CLIENTS * CALLS
    wait_until(lambda: http.get("/memory_occupation").json()["operation_id"] is None)  # those that nobody waited for
    model = Model(http.get("/operations").json()["operations"])
    for call in calls:
        check(call, model, expected)
    assert any(call.status == 409 for call in calls)
    assert {step.aborted for step in model.steps if step.prepared} == {True, False}
    assert sum(call.kind == "generate" and call.status == 200 for call in calls) > 0
    http.post("/resume_memory_occupation").raise_for_status()
    assert http.post("/generate", json=PROMPT).json()["output_ids"] == expected
