"""Engines in processes of their own that are killed or stopped at each step. At the end all are released or all are
resident, and the answer says which is not, and why."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import product
from pathlib import Path

import httpx
import pytest

from memsaver_server.fleet import Fleet, FleetResult, StaticMembership
from tests.programs import Child
from tests.waiting import wait_until

from .conftest import NAMES, SILENCE_S
from .test_faults import STEPS
from .wire import Loop, Wire


def states_of_threads(process: int) -> set[str]:
    """By their letters in /proc; none if the process has ended."""
    found = set()
    for path in Path(f"/proc/{process}/task").glob("*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found.add(path.read_text().rpartition(")")[2].split()[0])
    return found


class Process:
    """An engine, behind a wire."""

    def __init__(self, name: str, stack: ExitStack, loop: Loop) -> None:
        child = stack.enter_context(Child("-m", "tests.fleet.turns_engine", name, "8", MEMSAVER_DRIVER="host"))
        assert child.read_line() == "ready"
        self.pid = child.process.pid
        self.http = stack.enter_context(httpx.Client(base_url=child.ask("load"), timeout=600, verify=False))
        self.wire = Wire(str(self.http.base_url), loop.loop)
        stack.callback(self.wire.close)

    def send(self, number: signal.Signals) -> None:
        """Kill it or stop it; return once it has ended, or all its threads have stopped."""
        os.kill(self.pid, number)
        wait_until(lambda: states_of_threads(self.pid) <= {"T", "Z"})

    def state(self) -> str:
        """``serving``, or the state of its memory."""
        now = self.http.get("/memory_occupation").json()
        return "serving" if now["admission"]["open"] and now["operation_id"] is None else str(now["state"])

    def tokens(self) -> list[int]:
        tokens: list[int] = self.http.post("/v1/completions", json={"prompt": [3, 5], "max_tokens": 8}).json()["tokens"]
        return tokens


class Machine:
    """The processes of the engines a, b and c, and the file that lists them."""

    def __init__(self, folder: Path, stack: ExitStack, loop: Loop) -> None:
        self.path = folder / "engines.yaml"
        self._stack = stack
        self._loop = loop
        self.processes = {name: Process(name, stack, loop) for name in NAMES}
        self.expected = {name: process.tokens() for name, process in self.processes.items()}
        self._write()

    def replace(self, name: str) -> None:
        """Start another process for an engine; it has its memory, as it knows nothing of what is wanted."""
        self.processes[name] = Process(name, self._stack, self._loop)
        self._write()

    def states(self) -> set[str]:
        return {process.state() for process in self.processes.values()}

    def _write(self) -> None:
        lines = [f"- {{name: {name}, url: '{process.wire.url}'}}\n" for name, process in self.processes.items()]
        self.path.write_text("".join(lines))


#: Counted by the engines, whose processes have the system's clock.
LEASE_S = 10.0


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    loop = Loop()
    with ExitStack() as stack:
        yield Machine(tmp_path_factory.mktemp("fleet"), stack, loop)
    loop.close()


@pytest.fixture
def fleet(machine: Machine) -> Iterator[Fleet]:
    with Fleet(StaticMembership(machine.path), silence_s=SILENCE_S, lease_s=LEASE_S) as fleet:
        yield fleet
        fleet.resume()
        assert machine.states() == {"serving"}


@pytest.mark.guards(
    "a fleet-wide sleep reached some engines, and there was no way back",
    "an engine that joined a sleeping fleet late was awake, and a dead one was passed over in silence",
)
@pytest.mark.parametrize(
    ("verb", "step", "number"),
    list(product(["release", "resume"], STEPS, [signal.SIGKILL, signal.SIGSTOP])),
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value,
)
def test_an_engine_is_killed_or_stopped_at_each_step(
    fleet: Fleet, machine: Machine, verb: str, step: str, number: signal.Signals
) -> None:
    before = "serving" if verb == "release" else "released"
    if verb == "resume":
        assert fleet.release().success
    b = machine.processes["b"]
    b.wire.on(STEPS[step], "none", times=1, then=lambda: b.send(number))
    try:
        result: FleetResult = getattr(fleet, verb)()
        assert {machine.processes[name].state() for name in "ac"} == {before}
    finally:
        if number == signal.SIGSTOP:
            os.kill(b.pid, signal.SIGCONT)
        else:
            machine.replace("b")
    assert not result.success
    assert [(engine.name, engine.phase) for engine in result.failed] == [("b", step)]
    assert f"b failed while {step}" in result.message
    assert "b, which is unknown" in result.message or step == "asking"
    assert {engine.state for engine in result.engines if engine.name != "b"} <= {"resident", "released"}

    def settled() -> bool:
        fleet.reconcile()
        return machine.states() == {before}

    wait_until(settled, interval_s=0.5)
    assert fleet.resume().success
    assert {name: process.tokens() for name, process in machine.processes.items()} == machine.expected
