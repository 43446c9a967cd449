"""The gate: admission, drain and holding requests for programs without a scheduler."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from memsaver_server.engine import AdmissionClosedError, DrainMode, DrainTimeoutError, Engine
from memsaver_server.engine.gate import Gate, InFlightRequest
from tests.waiting import wait_until


def in_thread(work: Callable[[], object]) -> Future[object]:
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


class Inside:
    """A request that stays inside the gate until it may leave, or is aborted."""

    def __init__(self, gate: Gate, name: str | None = None) -> None:
        self.leave = threading.Event()
        self.turn: Future[InFlightRequest] = Future()
        self.done = in_thread(lambda: self._run(gate, name))

    def _run(self, gate: Gate, name: str | None) -> str:
        with gate.request(name) as turn:
            self.turn.set_result(turn)
            while not self.leave.wait(0.005):
                if turn.aborted:
                    return "aborted"
        return "ended"


def test_it_is_an_engine() -> None:
    assert isinstance(Gate(), Engine)


def test_a_closed_gate_refuses_with_the_reason_and_an_open_one_lets_in() -> None:
    gate = Gate()
    gate.close_admission("memory is released")
    with pytest.raises(AdmissionClosedError, match="memory is released"), gate.request():
        pass
    gate.open_admission()
    with gate.request("mine") as turn:
        assert turn.name.startswith("mine")


def test_a_drain_waits_for_those_inside() -> None:
    gate = Gate()
    inside = Inside(gate)
    inside.turn.result(600)
    gate.close_admission("draining")
    drained = in_thread(lambda: gate.drain(60))
    assert not drained.done()
    inside.leave.set()
    drained.result(600)
    assert inside.done.result(600) == "ended"


def test_a_drain_that_takes_too_long_names_who_is_inside_and_can_be_repeated() -> None:
    gate = Gate()
    inside = Inside(gate, "long one")
    inside.turn.result(600)
    with pytest.raises(DrainTimeoutError, match="long one"):
        gate.drain(0.0)
    inside.leave.set()
    gate.drain(10)


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
@pytest.mark.guards("nobody could cancel an operation that waited")
def test_a_drain_ends_when_it_is_given_up(mode: DrainMode) -> None:
    gate = Gate()
    given_up = threading.Event()
    with gate.request("long one"):
        drained = in_thread(lambda: gate.drain(3600, mode, given_up.is_set))
        assert not drained.done()
        given_up.set()
        with pytest.raises(DrainTimeoutError, match="long one"):
            drained.result(600)


def test_abort_tells_those_inside() -> None:
    gate = Gate()
    inside = Inside(gate)
    inside.turn.result(600)
    gate.drain(10, "abort")
    assert inside.done.result(600) == "aborted"


def test_a_request_that_raises_leaves_the_gate() -> None:
    gate = Gate()
    with pytest.raises(KeyError), gate.request():
        raise KeyError
    gate.drain(0.0)


def test_held_requests_enter_when_it_opens_and_those_over_the_limit_are_refused() -> None:
    gate = Gate()
    gate.close_admission("released", hold=1)
    held = Inside(gate)
    wait_until(lambda: gate.held == 1)
    with pytest.raises(AdmissionClosedError), gate.request():
        pass
    gate.drain(0.0)
    assert not held.turn.done()
    gate.open_admission()
    held.turn.result(600)
    held.leave.set()
    assert held.done.result(600) == "ended"
    assert gate.held == 0
