"""A state machine over the public API on the host driver: random programs, compared with a model after every step.

It runs in a process of its own, because there is one saver for each process: ``python -m tests.reliability.machine``.
MEMSAVER_MACHINE_EXAMPLES and MEMSAVER_MACHINE_STEPS set how many programs of how many steps. Each run prints its seed,
and --seed repeats its programs (threads and other processes may still take turns in another order).
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import random
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import seed as seed_of
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import memsaver_core as ms
from memsaver_core import _process
from tests.programs import Child

PAGE = 4096
CAPACITY = 8 << 20
TAGS = ("weights", "kv_cache", "a", "b")
POLICIES = ("discard", "zero", "host", "file")
CALLS = (
    "create", "map", "allow_access", "unmap", "release", "synchronize", "copy_to_host", "copy_to_device", "fill_zero",
    "digest", "record", "wait", "register_host", "memory_info", "stream_wait", "reserve",
)  # fmt: skip

TENANT = """
import sys
from memsaver_core import _native
saver = _native.Saver(driver="host", host_devices=[sys.argv[1]], host_capacity=int(sys.argv[2]))
held = None
for line in sys.stdin:
    if held is not None:
        saver.free(held)
        held = None
    try:
        held = saver.allocate(0, "t", "discard", int(line)) if int(line) else None
        print("ok", flush=True)
    except Exception:
        print("no", flush=True)
"""

#: A program as data: the steps by name, with their arguments.
Program = Sequence[tuple[str, dict[str, Any]]]

#: Programs that the model was once wrong about; they run before the random ones.
REPLAYED: dict[str, Program] = {
    "kept by an override, resumed and discarded by a second thread": [
        ("allocate", {"tag": "weights", "policy": "discard", "pages": 2}),
        ("release", {"tags": {"weights"}, "override": "host"}),
        ("release_while_others_work", {"pages": 1, "rounds": 3}),
    ],
    "a release that fails beside a tag that is released already": [
        ("allocate", {"tag": "a", "policy": "zero", "pages": 2}),
        ("allocate", {"tag": "b", "policy": "zero", "pages": 2}),
        ("release", {"tags": {"a"}, "override": None}),
        ("fail_a_call", {"call": "unmap", "nth": 1, "memory": False}),
        ("release", {"tags": set(), "override": None}),
    ],
    "a release that fails when there is no memory to resume what was released before": [
        ("allocate", {"tag": "a", "policy": "zero", "pages": 200}),
        ("release", {"tags": {"a"}, "override": None}),
        ("allocate", {"tag": "a", "policy": "zero", "pages": 20}),
        ("tenant_takes", {"nbytes": CAPACITY - 30 * PAGE}),
        ("fail_a_call", {"call": "unmap", "nth": 1, "memory": False}),
        ("release", {"tags": set(), "override": None}),
    ],
    "more in all than the device has": [
        *[("allocate", {"tag": "a", "policy": "zero", "pages": 200})] * 8,
        ("release", {"tags": set(), "override": None}),
        *[("allocate", {"tag": "a", "policy": "zero", "pages": 200})] * 8,
    ],
}

steps: Counter[str] = Counter()


def step(function: Callable[..., None]) -> Callable[..., None]:
    """A rule that counts, and that is told of where its program fails."""

    @functools.wraps(function)
    def run(self: Machine, **arguments: Any) -> None:
        steps[function.__name__] += 1
        self.program.append((function.__name__, arguments))
        function(self, **arguments)

    return run


class Tenant(Child):
    """Another process on the same device."""

    def __init__(self, device: str) -> None:
        super().__init__("-c", TENANT, device, str(CAPACITY))
        self.bytes = 0

    def hold(self, nbytes: int) -> None:
        """Hold so much instead of what it holds; nothing where that is not free."""
        self.bytes = nbytes if self.ask(str(nbytes)) == "ok" else 0


@dataclass(eq=False)
class Memory:
    """One tensor and what must be in it: these bytes, or anything where None."""

    tensor: torch.Tensor
    address: int
    tag: str
    policy: str
    expected: bytes | None
    released: bool = False

    @property
    def bytes(self) -> int:
        return self.tensor.numel()

    def content(self) -> bytes:
        return self.tensor.numpy().tobytes()


class Machine(RuleBasedStateMachine):
    tenant: Tenant

    def __init__(self) -> None:
        super().__init__()
        self.memories: list[Memory] = []
        self.program: list[tuple[str, dict[str, Any]]] = []
        self.random = np.random.default_rng(0)
        self.planned = False

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    # What the program does.

    @rule(tag=st.sampled_from(TAGS), policy=st.sampled_from(POLICIES), pages=st.integers(1, 200))
    @step
    def allocate(self, tag: str, policy: str, pages: int) -> None:
        planned = self._take_plan()
        free = 0 if planned else self._free_bytes()
        try:
            with ms.region(tag, restore=policy):
                tensor = torch.empty(pages * PAGE, dtype=torch.uint8)
        except ms.MemsaverError as error:
            if planned or (isinstance(error, ms.OutOfDeviceMemoryError) and pages * PAGE > free):
                return
            raise
        finally:
            _process.saver().heal()
        memory = Memory(tensor, tensor.data_ptr(), tag, policy, None)
        self.memories.append(memory)
        self._write(memory)

    @rule(which=st.integers(0, 999))
    @step
    def write(self, which: int) -> None:
        memory = self._pick(which)
        if memory is not None and not memory.released:
            self._write(memory)

    @rule(which=st.integers(0, 999))
    @step
    def free(self, which: int) -> None:
        self._take_plan()
        memory = self._pick(which)
        if memory is not None:
            self.memories.remove(memory)
            del memory
        _process.saver().heal()

    @rule(tags=st.sets(st.sampled_from(TAGS)), override=st.none() | st.sampled_from(POLICIES))
    @step
    def release(self, tags: set[str], override: str | None) -> None:
        planned = self._take_plan()
        selected = self._selected(tags)
        overrides = dict.fromkeys([memory.tag for memory in selected], override) if override else {}
        try:
            ms.release(sorted(tags), restore=overrides)
        except ms.MemsaverError:
            if not planned:
                raise
        else:
            self._note_released(selected, overrides)
            return
        finally:
            _process.saver().heal()
        self._after_a_failed_release(selected, overrides)

    @rule(tags=st.sets(st.sampled_from(TAGS)))
    @step
    def resume(self, tags: set[str]) -> None:
        planned = self._take_plan()
        selected = self._selected(tags)
        needed = sum(memory.bytes for memory in selected if memory.released)
        free = 0 if planned else self._free_bytes()
        try:
            ms.resume(sorted(tags))
        except ms.MemsaverError as error:
            if planned or (isinstance(error, ms.OutOfDeviceMemoryError) and needed > free):
                return  # all is as before: the invariants look
            raise
        finally:
            _process.saver().heal()
        self._note_resumed(selected)

    @rule(call=st.sampled_from(CALLS), nth=st.integers(1, 4), memory=st.booleans())
    @step
    def fail_a_call(self, call: str, nth: int, memory: bool) -> None:
        """The next operation meets a failure of this call."""
        _process.saver().heal()
        _process.saver().fail(call, nth, "out_of_memory" if memory and call == "create" else "invalid_value")
        self.planned = True

    @rule(nbytes=st.integers(0, CAPACITY // PAGE).map(lambda pages: pages * PAGE))
    @step
    def tenant_takes(self, nbytes: int) -> None:
        self.tenant.hold(nbytes)

    @rule()
    @step
    def tenant_goes(self) -> None:
        self.tenant.hold(0)

    @rule(pages=st.integers(1, 50), rounds=st.integers(1, 3))
    @step
    def release_while_others_work(self, pages: int, rounds: int) -> None:
        """Another thread releases and resumes a tag while this one allocates, asks and frees."""
        self._take_plan()
        _process.saver().heal()
        weights = self._selected({"weights"})
        failures: list[BaseException] = []

        def cycle() -> None:
            try:
                for _ in range(rounds):
                    ms.release(["weights"])
                    self._note_released(weights, {})
                    ms.resume(["weights"])
                    self._note_resumed(weights)
            except ms.OutOfDeviceMemoryError:
                pass  # the allocations of the other thread were faster
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=cycle)
        thread.start()
        try:
            while thread.is_alive():
                assert ms.status().state in ("resident", "releasing", "released", "resuming")
                with ms.region("a", restore="zero"):
                    tensor = torch.full((pages * PAGE,), 7, dtype=torch.uint8)
                memory = Memory(tensor, tensor.data_ptr(), "a", "zero", bytes([7]) * (pages * PAGE))
                self.memories.append(memory)
                assert memory.content() == memory.expected
                self.memories.remove(memory)
                del tensor, memory
        except ms.OutOfDeviceMemoryError:
            pass
        finally:
            thread.join()
        assert not failures, failures

    # The model.

    def _selected(self, tags: set[str]) -> list[Memory]:
        return [memory for memory in self.memories if not tags or memory.tag in tags]

    def _pick(self, which: int) -> Memory | None:
        return self.memories[which % len(self.memories)] if self.memories else None

    def _take_plan(self) -> bool:
        planned, self.planned = self.planned, False
        return planned

    def _free_bytes(self) -> int:
        """What the device has free. Not while a failure is planned: the reading would meet it."""
        device = ms.read_devices()[0]
        return device.total_bytes - device.used_bytes

    def _write(self, memory: Memory) -> None:
        content = self.random.integers(0, 256, memory.bytes, dtype=np.uint8)
        memory.tensor.numpy()[:] = content
        memory.expected = content.tobytes()

    def _note_released(self, memories: list[Memory], overrides: dict[str, str]) -> None:
        for memory in memories:
            if memory.released:
                continue
            memory.released = True
            policy = overrides.get(memory.tag, memory.policy)
            if policy == "discard":
                memory.expected = None
            elif policy == "zero":
                memory.expected = bytes(memory.bytes)

    def _note_resumed(self, memories: list[Memory]) -> None:
        for memory in memories:
            memory.released = False

    def _after_a_failed_release(self, memories: list[Memory], overrides: dict[str, str]) -> None:
        """It is undone by a resume, but for what was not kept; or, where memory lacks for that, repeated."""
        tags = sorted({memory.tag for memory in memories})
        if not tags:
            return
        needed = sum(tag.released_bytes for tag in ms.status().tags if tag.tag in tags)
        free = self._free_bytes()
        try:
            ms.resume(tags)
        except ms.OutOfDeviceMemoryError:
            assert needed > free
            ms.release(tags, restore=overrides)
            self._note_released(memories, overrides)
            return
        for memory in memories:
            policy = overrides.get(memory.tag, memory.policy)
            if not memory.released and policy in ("discard", "zero"):
                content = memory.content()
                if policy == "zero":
                    assert content == bytes(memory.bytes) or memory.expected in (None, content)
                memory.expected = content
        self._note_resumed(memories)

    @invariant()
    def the_saver_agrees(self) -> None:
        saver = _process.existing_saver()
        if saver is None or self.planned:
            return
        assert saver.audit({0: self.tenant.bytes}) == []
        status = {tag.tag: tag for tag in ms.status().tags}
        for tag in TAGS:
            memories = [memory for memory in self.memories if memory.tag == tag]
            released = sum(memory.bytes for memory in memories if memory.released)
            if tag in status:
                assert (status[tag].bytes, status[tag].released_bytes) == (sum(m.bytes for m in memories), released)
            else:
                assert not memories
        for memory in self.memories:
            assert memory.tensor.data_ptr() == memory.address
            if not memory.released and memory.expected is not None:
                assert memory.content() == memory.expected

    # The end, of a program that failed too: the next one finds the saver as if it were the first.

    def teardown(self) -> None:
        failure = sys.exc_info()[1]
        if not isinstance(failure, Exception):
            failure = None  # what Hypothesis ends a program with is not an Exception
        _process.saver().heal()
        self.planned = False
        self.tenant.hold(0)
        try:
            if failure is None:
                self.resume(tags=set())
                self.the_saver_agrees()
        except Exception as error:
            failure = error
            raise
        finally:
            if failure is not None:
                self._tell(failure)
            self._leave_nothing()

    def _tell(self, failure: BaseException) -> None:
        """What is reported in the end is a shorter program, where there is one that fails each time."""
        print("A program failed:", *self.program, sep="\n  ", file=sys.stderr)
        traceback.print_exception(failure)

    def _leave_nothing(self) -> None:
        for memory in self.memories:
            memory.tensor.set_()  # the failure's traceback may hold the tensor
        self.memories.clear()
        gc.collect()
        ms.release()
        status = ms.status()
        assert sum(tag.bytes for tag in status.tags) == 0, status
        assert (status.host_backup.bytes, status.host_backup.file_bytes) == (0, 0)
        assert ms.read_devices()[0].used_bytes == 0


def replay(program: Program, machine: Machine) -> None:
    """Run one program."""
    machine.begin(seed=0)
    try:
        for name, arguments in program:
            getattr(machine, name)(**arguments)
            machine.the_saver_agrees()
    finally:
        machine.teardown()


@contextmanager
def a_device() -> Iterator[None]:
    """The saver of this process, on a device that it shares with a tenant."""
    torch.set_num_threads(1)
    device = f"machine-{uuid.uuid4().hex[:12]}"
    _process.configure(
        driver="host",
        host_device=device,
        host_capacity=CAPACITY,
        file_dir="/dev/shm",
        verify="full",
        fault_injection=True,
    )
    for tag in TAGS:  # from here on they are known
        with ms.region(tag):
            torch.empty(PAGE, dtype=torch.uint8)
    Machine.tenant = Tenant(device)
    try:
        yield
    finally:
        Machine.tenant.end()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.reliability.machine")
    # The same programs every time, unless a longer search is asked for.
    fresh = "MEMSAVER_MACHINE_EXAMPLES" in os.environ
    parser.add_argument("--seed", type=int, default=random.getrandbits(32) if fresh else 0)
    seed = parser.parse_args().seed
    examples = int(os.environ.get("MEMSAVER_MACHINE_EXAMPLES", "70"))
    count = int(os.environ.get("MEMSAVER_MACHINE_STEPS", "50"))
    print(f"seed {seed}", flush=True)
    start = time.monotonic()
    with a_device():
        for program in REPLAYED.values():
            replay(program, Machine())
        run_state_machine_as_test(
            seed_of(seed)(Machine),
            settings=settings(
                max_examples=examples,
                stateful_step_count=count,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    seconds = round(time.monotonic() - start, 1)
    figures = {"programs": examples + len(REPLAYED), "steps": sum(steps.values()), "seconds": seconds, "seed": seed}
    print(json.dumps({**figures, "by_rule": dict(steps)}))


if __name__ == "__main__":
    main()
