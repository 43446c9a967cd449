"""Weights that outlive their engine: keepers, and engines that start from what they keep."""

from __future__ import annotations

import itertools
import json
import mmap
import operator
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import IO, Any

import pytest

from memsaver_core.manifests import SharedStore, kept_in
from tests import forks
from tests.amount import amount
from tests.native import injection
from tests.native.build import built
from tests.programs import Ordered
from tests.reliability.figures import keep
from tests.reliability.warm_engine import ELEMENTS
from tests.waiting import wait_until

MEMSAVER = [sys.executable, "-m", "memsaver_server.cli"]
WEIGHTS = 3 * ELEMENTS * 4  # bytes of one engine's weights, about
CYCLES = amount(3, long=1000)
EVERY = amount(36, long=1)  # at which system calls a keeper is killed


class Engine(Ordered):
    """A process that loads weights by the public API; see warm_engine.py."""

    def __init__(self, store: str) -> None:
        settings = {"MEMSAVER_DRIVER": "host", "MEMSAVER_SHARED_BACKUPS": store, "MEMSAVER_HOST_BACKUP_LIMIT": "1GiB"}
        super().__init__("-m", "tests.reliability.warm_engine", **injection.in_child(), **settings)

    def load(self, **key: Any) -> Any:
        return self.does("load", key)


class Keeper:
    """``memsaver store keep``."""

    def __init__(self, store: str, limit: str = "1GiB", *, store_limit: str = "1GiB") -> None:
        command = [*MEMSAVER, "store", "keep", store, "--limit", limit, "--store-limit", store_limit]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        assert self.line.startswith(f"keeping weights of the store {store}")

    def end(self, how: int) -> int:
        self.process.send_signal(how)
        self.process.communicate(timeout=60)
        return self.process.returncode


@pytest.fixture
def store() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def running() -> Iterator[list[Any]]:
    """Processes that are killed at the end of the test."""
    processes: list[Any] = []
    yield processes
    for each in processes:
        each.process.kill()
        each.process.communicate(timeout=60)


def listed(store: str) -> list[dict[str, Any]]:
    ran = forks.run([*MEMSAVER, "store", "list", store, "--json"], capture_output=True, text=True, check=True)
    weights: list[dict[str, Any]] = json.loads(ran.stdout)["weights"]
    return weights


def is_held(store: str, keepers: int = 1) -> bool:
    """Whether so many keepers hold what the store has."""
    kept = kept_in(SharedStore(store))
    return bool(kept) and all(sum(keeper for _, keeper in each.text["holders"]) == keepers for each in kept)


@pytest.mark.parametrize("state", ["resident", "released", "releasing", "resuming"])
@pytest.mark.guards("a process was killed in the middle of an operation")
def test_the_next_engine_loads_nothing(store: str, running: list[Any], state: str) -> None:
    """Whatever its predecessor was doing when it was killed, once its weights were loaded: the keeper holds them by
    then. The content is the same, and no release copies it."""
    keeper = Keeper(store)
    first = Engine(store)
    running += [keeper, first]
    reason, loads, sums = first.load()
    assert (reason, loads) == ("the store has none of this model", 1)
    assert keeper.line.endswith("up to 1 GiB\n")
    if state == "released":
        assert first.does("release")["backed_up_bytes"] == 0
    elif state == "resuming":
        first.does("release")
        first.does("hold", "copy_to_device")
        first.tell("resume")
    elif state == "releasing":
        first.does("hold", "unmap")
        first.tell("release")
    first.kill()
    next_one = Engine(store)
    running.append(next_one)
    assert next_one.load() == ["", 0, sums]
    assert next_one.does("release")["unchanged_bytes"] > WEIGHTS
    assert next_one.does("resume") == sums
    status = next_one.does("status")
    assert status["used_bytes"] < 1.2 * WEIGHTS  # one copy


def test_other_tensors_of_the_same_memory_have_the_content_too(store: str, running: list[Any]) -> None:
    engines = [Engine(store), Engine(store)]
    running += engines
    for engine in engines:
        assert engine.does("view") == [0.0] * 7
    assert [engine.load()[:2] for engine in engines] == [["the store has none of this model", 1], ["", 0]]
    assert engines[1].does("view") == engines[0].does("view") != [0.0] * 7


def test_engines_beside_each_other_need_no_keeper(store: str, running: list[Any]) -> None:
    running += [Engine(store), Engine(store)]
    first, second = running
    sums = first.load()[2]
    assert second.load() == ["", 0, sums]
    second.does("write", 3.0)  # its own memory, and not the other's
    assert first.does("release")["unchanged_bytes"] > 0
    assert first.does("resume") == sums


@pytest.mark.parametrize("first_dies", [False, True])
def test_two_that_start_at_once_share_a_load(store: str, running: list[Any], first_dies: bool) -> None:
    running += [Engine(store), Engine(store)]
    first, second = running
    first.tell("load", {"hold": True})
    assert first.answer() == "loading"
    second.tell("load", {})
    if first_dies:
        first.kill()
        assert second.answer()[:2] == ["the store has none of this model", 1]
        return
    first.say("go on")
    _, loads, sums = first.answer()
    assert loads == 1
    assert second.answer() == ["", 0, sums]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"revision": "r2"}, "the store has them with revision 'r1', not 'r2'"),
        ({"dtype": "bfloat16"}, "the store has them with dtype 'float32', not 'bfloat16'"),
        ({"quantization": "fp8"}, "the store has them with quantization '', not 'fp8'"),
        ({"rank": 1, "ranks": 2}, "the store has them with rank 0, not 1, ranks 1, not 2"),
        ({"model": "another"}, "the store has none of this model"),
    ],
)
def test_other_weights_are_loaded(store: str, running: list[Any], changed: dict[str, Any], reason: str) -> None:
    running += [Engine(store), Engine(store)]
    running[0].load()
    assert running[1].load(**changed)[:2] == [reason, 1]


def change_in_the_store(keeper: Keeper, pattern: bytes) -> None:
    """Change a byte of each place in the store's memory that has ``pattern``."""
    changed = 0
    for link in Path(f"/proc/{keeper.process.pid}/fd").iterdir():
        if not os.readlink(link).startswith("/memfd:memsaver-backups"):
            continue
        with open(link, "r+b", buffering=0) as file:
            at = 0
            while True:
                try:
                    begin = os.lseek(file.fileno(), at, os.SEEK_DATA)
                except OSError:  # no data is left
                    break
                at = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
                with mmap.mmap(file.fileno(), at - begin, offset=begin) as memory:
                    found = memory.find(pattern)
                    while found >= 0:
                        memory[found + len(pattern) - 1] ^= 1
                        changed += 1
                        found = memory.find(pattern, found + 1)
    assert changed == 1


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (struct.pack("<2f", 1234.5, 1235.5), "differs from the digest"),
        (b'"storages": [[', "is damaged, or of another version"),
        (b"memsaver-weights-1", "is damaged, or of another version"),
    ],
    ids=["content", "manifest", "head"],
)
def test_what_is_damaged_is_loaded_anew(store: str, running: list[Any], pattern: bytes, reason: str) -> None:
    """And replaced, so that the next engine finds it good."""
    keeper, first, second, third = running[:] = [Keeper(store), Engine(store), Engine(store), Engine(store)]
    sums = first.load()[2]
    first.kill()
    change_in_the_store(keeper, pattern)
    why, loads, now = second.load()
    assert reason in why
    assert (loads, now) == (1, sums)
    assert third.load() == ["", 0, sums]
    assert third.does("release")["unchanged_bytes"] > WEIGHTS


def test_what_is_gone_in_part_is_loaded_anew(store: str, running: list[Any]) -> None:
    """Without a keeper: the engine that gave it has other weights by now, as a trainer's update leaves it."""
    first, second, third = running[:] = [Engine(store) for _ in range(3)]
    sums = first.load()[2]
    first.does("write", 3.0)
    first.does("release")
    why, loads, now = second.load()
    assert "the shared store lacks a block" in why
    assert "a keeper (memsaver store keep) would have held it" in why
    assert (loads, now) == (1, sums)
    assert third.load() == ["", 0, sums]


def asleep(store: str, *revisions: str) -> list[Engine]:
    """Engines with the same weights, which are released; the first has loaded them."""
    engines = [Engine(store), Engine(store)]
    for engine in engines:
        engine.load()
        engine.does("release")
    for revision in revisions:
        assert engines[0].does("update", {"revision": revision}) == 2
    return engines


def test_an_update_is_taken_from_the_engine_that_has_loaded_it(store: str, running: list[Any]) -> None:
    """Also once that one is resident again. The store has the content once, and forgets the version before."""
    first, second = running[:] = asleep(store, "r2")
    sums = first.does("resume")
    assert second.does("update", {"revision": "r2"}) == 0
    assert second.does("resume") == sums
    assert second.does("release")["unchanged_bytes"] > WEIGHTS
    assert second.does("status")["used_bytes"] < 1.2 * WEIGHTS
    first.does("release")
    assert first.does("update", {"revision": "r3", "begin": 1.25}) == 3
    assert second.does("update", {"revision": "r3"}) == 0
    assert first.does("resume") == second.does("resume") != sums
    assert [each["revision"] for each in listed(store) if each["model"] == "an update"] == ["r3"]


def test_an_update_is_taken_from_a_keeper(store: str, running: list[Any]) -> None:
    keeper = Keeper(store)
    first, second = running[:] = asleep(store, "r2")
    running.append(keeper)
    wait_until(lambda: len(listed(store)) == 2)
    sums = first.does("resume")
    first.kill()
    assert second.does("update", {"revision": "r2"}) == 0
    assert second.does("resume") == sums


@pytest.mark.parametrize(
    "pattern", [struct.pack("<2f", 1234.25, 1235.25), b'"revision": "r2"'], ids=["content", "manifest"]
)
def test_an_update_that_is_damaged_is_loaded_anew(store: str, running: list[Any], pattern: bytes) -> None:
    """And replaced, so that the next engine finds it good."""
    keeper = Keeper(store)
    first, second = running[:] = asleep(store, "r2")
    running.append(keeper)
    sums = first.does("resume")
    first.kill()
    change_in_the_store(keeper, pattern)
    assert second.does("update", {"revision": "r2"}) == 1
    assert second.does("resume") == sums
    third = Engine(store)
    running.append(third)
    third.load()
    third.does("release")
    assert third.does("update", {"revision": "r2"}) == 0
    assert third.does("resume") == sums


@pytest.mark.parametrize("writes", [False, True])
def test_an_update_is_not_shared_if_it_writes_other_tensors(store: str, running: list[Any], writes: bool) -> None:
    first, second = running[:] = [Engine(store), Engine(store)]
    for engine in (first, second):
        engine.load()
        engine.does("more")
        engine.does("release")
    assert first.does("update", {"revision": "r2", "more": writes}) == 2
    assert second.does("update", {"revision": "r2", "more": writes}) == writes
    assert first.does("resume") == second.does("resume")


def test_the_limit_is_for_what_was_used_last(store: str, running: list[Any]) -> None:
    """Room for two: the one that nobody used for longest goes, unless it is pinned."""
    keeper = Keeper(store, f"{int(2.5 * WEIGHTS)}B")
    running.append(keeper)

    def give(model: str, *left: str) -> None:
        engine = Engine(store)
        running.append(engine)
        engine.load(model=model, seed=len(running))
        wait_until(lambda: any(each["model"] == model and len(each["held_by"]) == 2 for each in listed(store)))
        engine.kill()
        wait_until(lambda: [each["model"] for each in listed(store)] == list(left))

    give("a", "a")
    give("b", "b", "a")
    give("c", "c", "b")
    pinned = forks.run([*MEMSAVER, "store", "pin", store, "b"], capture_output=True, text=True, check=True)
    assert pinned.stdout.startswith("pinned: ")
    give("d", "d", "b")
    give("e", "e", "b")
    forks.run([*MEMSAVER, "store", "pin", store, "b", "--off"], check=True, stdout=subprocess.DEVNULL)
    give("f", "f", "e")
    forks.run([*MEMSAVER, "store", "drop", store, "e"], check=True, stdout=subprocess.DEVNULL)
    last = listed(store)
    assert [each["model"] for each in last] == ["f"]
    assert last[0]["held_by"] == [{"process": keeper.process.pid, "keeper": True}]
    assert WEIGHTS < last[0]["bytes"] < 1.2 * WEIGHTS
    shown = forks.run([*MEMSAVER, "store", "list", store], capture_output=True, text=True, check=True).stdout
    assert f"keeper {keeper.process.pid}" in shown
    failed = forks.run([*MEMSAVER, "store", "drop", store, "e"], capture_output=True, text=True, check=False)
    assert failed.returncode == 2
    assert "has no weights 'e'" in failed.stderr


def test_kept_weights_give_way(store: str, running: list[Any]) -> None:
    """A release needs the room: what nobody uses goes, and the release succeeds."""
    keeper = Keeper(store, store_limit=f"{int(1.5 * WEIGHTS)}B")
    running.append(keeper)
    first, second = Engine(store), Engine(store)
    running += [first, second]
    first.load()
    first.kill()
    assert second.load(model="another", seed=5)[1] == 1
    assert second.does("release")["unchanged_bytes"] > WEIGHTS
    assert [each["model"] for each in listed(store)] == ["another"]


def test_a_second_keeper_takes_over(store: str, running: list[Any]) -> None:
    engine, one, other = running[:] = [Engine(store), Keeper(store), Keeper(store)]
    sums = engine.load()[2]
    wait_until(lambda: is_held(store, keepers=2))
    engine.kill()
    assert one.end(signal.SIGTERM) == 0
    assert is_held(store)
    third = Keeper(store)
    running.append(third)
    wait_until(lambda: is_held(store, keepers=2))
    assert other.end(signal.SIGKILL) == -signal.SIGKILL
    next_one = Engine(store)
    running.append(next_one)
    assert next_one.load() == ["", 0, sums]


def test_a_keeper_is_small_and_ends_with_its_store(store: str, running: list[Any]) -> None:
    keeper, engine = running[:] = [Keeper(store), Engine(store)]
    engine.load()
    engine.kill()
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{keeper.process.pid}/status").read_text().splitlines())
    assert int(fields["VmRSS"].split()[0]) < 12 << 10  # KiB; most of it is the index and code that processes share
    assert int(fields["RssAnon"].split()[0]) < 1 << 10
    assert keeper.end(signal.SIGTERM) == 0
    failed = forks.run([*MEMSAVER, "store", "list", store], capture_output=True, text=True, check=False)
    assert failed.returncode == 3
    assert "no process of this user has" in failed.stderr


@cache
def program() -> str:
    """What ``memsaver store keep`` runs, which starts in milliseconds."""
    keeper = Keeper(f"test-{uuid.uuid4().hex[:12]}")
    path = os.readlink(f"/proc/{keeper.process.pid}/exe")
    assert keeper.end(signal.SIGKILL) == -signal.SIGKILL
    return path


class Program:
    """The keeper's program, held before or after its nth system call; 0: not held."""

    def __init__(self, store: str, nth: int = 0, after: bool = False) -> None:
        self.report, report_to = os.pipe()
        environment = {
            "LD_PRELOAD": str(built("standstill") / "libstandstill.so"),
            "STAND_STILL_AT": f"{nth} {after:d} {report_to}",
        }
        self.process = subprocess.Popen(
            [program(), store, str(1 << 30), str(1 << 30)],
            stdout=subprocess.PIPE,
            env=os.environ | environment,
            pass_fds=[report_to],
        )
        os.close(report_to)

    def held_before(self, other: IO[Any] | None = None) -> str:
        """Wait until it is held, has ended, or ``other`` can be read. Return the call at which it is held, if any."""
        ready, _, _ = select.select([self.report, *filter(None, [other])], [], [])
        return os.read(self.report, 100).decode() if self.report in ready else ""

    def end(self, how: int) -> None:
        self.process.send_signal(how)
        self.process.communicate(timeout=600)
        assert self.process.returncode == (-how if how == signal.SIGKILL else 0)
        os.close(self.report)


def sockets_of(store: str) -> list[str]:
    """The names that processes of the store have."""
    prefix = f"memsaver-backups/{os.geteuid()}/{store}/"
    return [line for line in Path("/proc/net/unix").read_text().splitlines() if prefix in line]


def left_in(engine: Engine) -> tuple[int, int, int, int]:
    """What must not grow: processes of the store, its memory in use and in all, open files of an engine."""
    status = engine.does("status")
    files = os.listdir(f"/proc/{engine.process.pid}/fd")
    return status["processes"], status["used_bytes"], status["total_bytes"], len(files)


def killed_alone(store: str, nth: int, after: bool) -> str:
    """Kill the first process of a store at the nth of its system calls, before it keeps. Return where, if it got
    there."""
    keeper = Program(store, nth, after)
    call = keeper.held_before(keeper.process.stdout)
    keeper.end(signal.SIGKILL)
    successor = Program(store)
    assert successor.process.stdout is not None
    assert successor.process.stdout.readline().startswith(b"keeping weights")
    successor.end(signal.SIGTERM)
    assert sockets_of(store) == []
    return f"create, {call}" if call else ""


def killed_beside(engine: Engine, sums: list[float], store: str, nth: int, after: bool) -> str:
    """Kill a keeper at the nth system call of its life, in which another engine gives weights to the store. Return
    where, if it got there."""
    before = left_in(engine)
    keeper = Program(store, nth, after)
    others: list[Engine] = []
    operation, call = "join", keeper.held_before(keeper.process.stdout)
    if not call:
        others.append(Engine(store))
        others[0].tell("load", {"model": "another", "seed": 2})
        operation, call = "keep", keeper.held_before(others[0].process.stdout)
    if not call:
        keeper.process.terminate()
        operation, call = "end", keeper.held_before()
    engine.tell("release")
    keeper.end(signal.SIGKILL if call else signal.SIGTERM)
    assert engine.answer()["unchanged_bytes"] > WEIGHTS
    assert engine.does("resume") == sums
    for each in others:
        assert each.answer()[1] == 1
        each.kill()
    successor = Program(store)
    wait_until(lambda: is_held(store))
    successor.end(signal.SIGTERM)
    wait_until(lambda: all(map(operator.le, left_in(engine), before)))
    return f"{operation}, {call}" if call else ""


@pytest.mark.long
@pytest.mark.timeout(1200)  # it may have to build the library
@pytest.mark.guards("the process that had written a shared backup died")
def test_keepers_are_killed_before_and_after_each_system_call(store: str, running: list[Any]) -> None:
    """The engine's operations succeed, the next keeper holds everything, and nothing is left of either."""
    start = time.monotonic()
    kills: Counter[str] = Counter()
    first = itertools.cycle(range(1, EVERY + 1))

    def kill_everywhere(killed: Callable[[int, bool], str]) -> None:
        for after in (False, True):
            places = itertools.count(next(first), EVERY)
            while place := killed(next(places), after):
                kills[place] += 1

    kill_everywhere(partial(killed_alone, store))
    engine = Engine(store)
    running.append(engine)
    kill_everywhere(partial(killed_beside, engine, engine.load()[2], store))
    engine.end()
    assert sockets_of(store) == []
    figures = {
        "kills": sum(kills.values()),
        "seconds": round(time.monotonic() - start, 1),
        "by_place": dict(sorted(kills.items())),
    }
    keep("keeper_kills", figures)
    assert figures["kills"] > amount(6, long=300)
    if amount(0, long=1):
        assert {place.split(",")[0] for place in kills} == {"create", "join", "keep", "end"}


@pytest.mark.long
@pytest.mark.guards("the process that had written a shared backup died")
def test_keepers_are_killed_at_any_moment(store: str, running: list[Any]) -> None:
    """Engines go on with their content, and the next keeper has what they gave. Nothing grows."""
    start = time.monotonic()
    engine = Engine(store)
    running.append(engine)
    sums = engine.load()[2]
    before = left_in(engine)
    with_a_dead_one = (before[0] + 1, *before[1:])  # the next member that joins takes it out
    numbers = random.Random(CYCLES)
    for _ in range(CYCLES):
        killed = subprocess.Popen([program(), store, str(1 << 30), str(1 << 30)], stdout=subprocess.DEVNULL)
        for _ in range(numbers.randrange(5)):
            assert engine.does("release")["unchanged_bytes"] > WEIGHTS
            assert engine.does("resume") == sums
        killed.kill()
        killed.wait()
        wait_until(lambda: all(map(operator.le, left_in(engine), with_a_dead_one)))
    wait_until(lambda: all(map(operator.le, left_in(engine), before)))
    keep("keeper_cycles", {"cycles": CYCLES, "seconds": round(time.monotonic() - start, 1)})
    running.append(Keeper(store))
    engine.kill()
    next_one = Engine(store)
    running.append(next_one)
    assert next_one.load() == ["", 0, sums]
