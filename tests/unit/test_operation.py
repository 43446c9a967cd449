"""The table of an operation's states, and what two threads may do to one operation at the same moment."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from memsaver_core.contract.errors import (
    ConflictError,
    IdempotencyKeyError,
    LeaseEndedError,
    OperationCancelledError,
    TooLateToCancelError,
)
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import Release, Resume
from memsaver_core.phases import PhaseLog
from memsaver_server import clock
from memsaver_server.operation.history import KEPT_S, MAX_KEPT, Keys
from memsaver_server.operation.operation import Operation
from memsaver_server.operation.table import ENGINE, Row, Table
from tests.waiting import wait_until

REPORT = OperationReport(operation="release")


@pytest.fixture
def operation() -> Operation:
    """A release that is prepared first, and drains."""
    operation = Operation("one", Release(prepare=True, timeout_s=1.0), "test", ENGINE)
    operation.log = PhaseLog(lambda: ())
    operation.start("drain")
    return operation


def held(operation: Operation) -> tuple[threading.Thread, list[BaseException]]:
    """Have a thread hold ``operation``; return that and its error, once it is prepared."""
    errors: list[BaseException] = []

    def hold() -> None:
        try:
            operation.await_commit()
        except OperationCancelledError as error:
            errors.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    wait_until(lambda: operation.status == "prepared")
    return thread, errors


def test_who_has_forced_its_end_stays_known(operation: Operation) -> None:
    """Another call that was refused before it had ended kept that out of the audit log."""
    operation.key = "of its owner"
    operation.check_owner(None, forced_by="operator")
    with pytest.raises(ConflictError):
        operation.check_owner("of another")
    assert operation.audited() == {"forced_by": "operator"}


def test_every_state_leads_to_an_end() -> None:
    ends = {state for state, status in ENGINE.statuses.items() if status in ("succeeded", "failed", "cancelled")}
    events = {row.event for row in ENGINE.rows}
    leads = {
        state: {ENGINE.next(state, event) for event in events if ENGINE.allows(state, event)} - {state}
        for state in ENGINE.statuses
    }
    assert {state for state, to in leads.items() if not to} == ends
    reached = {ENGINE.first}
    while (more := reached | {str(to) for state in reached for to in leads[state]}) != reached:
        reached = more
    assert reached == set(ENGINE.statuses)


def test_what_the_table_does_not_have_cannot_happen() -> None:
    with pytest.raises(AssertionError, match="'moved' cannot happen to an operation that is queued"):
        ENGINE.next("queued", "moved")
    with pytest.raises(AssertionError, match="two rows"):
        Table({"a": "queued", "b": "failed"}, Row("a", "x", "worker", "b"), Row("a b", "x", "worker", "a"))
    with pytest.raises(AssertionError, match="other states"):
        Table({"a": "queued", "b": "failed"}, Row("a", "x", "worker", "c"))


def test_a_cancel_just_after_the_commit_is_too_late(operation: Operation) -> None:
    """Although the operation's thread has not noticed the commit yet."""
    thread, errors = held(operation)
    with operation.changed:
        operation.commit()
        with pytest.raises(TooLateToCancelError):
            operation.cancel("the operator")
    thread.join()
    assert (operation.state, errors) == ("moving", [])
    operation.finish(operation.moved(REPORT), None)
    assert operation.status == "succeeded"


def test_a_commit_just_after_the_cancel_is_refused(operation: Operation) -> None:
    thread, errors = held(operation)
    with operation.changed:
        operation.cancel("the operator")
        with pytest.raises(LeaseEndedError, match="cancelled by the operator"):
            operation.commit()
        assert not operation.join(operation.request)
    thread.join()
    assert [str(error).split(";")[0] for error in errors] == ["release one of all tags was cancelled by the operator"]
    operation.finish(None, errors[0])
    assert operation.status == "cancelled"


def test_no_call_joins_a_drain_that_has_failed(operation: Operation) -> None:
    """One that overtakes it just before has it drain anew."""
    asked = operation.request
    stronger = asked.model_copy(update={"mode": "abort"})
    assert operation.join(stronger)
    assert not operation.begin_undo(asked)
    assert operation.state == "draining"
    assert operation.begin_undo(operation.request)
    assert not operation.join(stronger)


def test_keys_stand_for_their_requests_for_a_stated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was dropped counts as new: it is answered by nothing that was done before."""
    now, keys, request = 0.0, Keys(), Release(tags=("weights",))
    monkeypatch.setattr(clock, "source", lambda: now)
    operation = Operation("one", request, "test", ENGINE)
    keys.add("a", request, operation)
    now = KEPT_S - 1
    assert keys.find(request, "a") is operation
    now += KEPT_S - 1
    with pytest.raises(IdempotencyKeyError, match="'a' belongs to release one"):
        keys.find(Resume(tags=("weights",)), "a")
    now += 2
    assert keys.find(Resume(tags=("weights",)), "a") is None
    for number in range(MAX_KEPT + 1):
        keys.add(str(number), request, operation)
    assert (keys.find(request, "0"), keys.find(request, "1")) == (None, operation)


def test_requests_that_are_equal_have_one_digest() -> None:
    one = Release(tags=("a", "b"), restore={"a": "host", "b": "file"}, lease_s=3, prepare=True)
    same = Release(tags=("b", "a"), restore={"b": "file", "a": "host"}, prepare=True, trim=None)
    assert one.digest() == same.digest()
    others = [Release(tags=("a",)), Resume(tags=("a",)), Release(), Resume(), Release(tags=("a",), trim=False), one]
    assert len({other.digest() for other in others}) == len(others)


def test_what_is_forgotten_keeps_nothing_of_its_errors(operation: Operation) -> None:
    """The frames in which an error arose had kept what they knew: engines, requests, tensors."""

    class Big:
        pass

    def fail() -> weakref.ref[Big]:
        big = Big()
        try:
            raise ValueError(repr(big))
        except ValueError:
            try:
                raise RuntimeError("no")
            except RuntimeError as error:
                operation.finish(None, error)
        return weakref.ref(big)

    held = fail()
    forgotten = operation.as_forgotten()
    gc.collect()
    assert (held(), str(forgotten.error)) == (None, "no")
