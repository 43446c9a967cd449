"""A state machine over the public API on the host driver: random programs, compared with a model after every step.

It runs in a process of its own, because there is one saver for each process: ``python -m tests.reliability.machine``.
MEMSAVER_MACHINE_EXAMPLES and MEMSAVER_MACHINE_STEPS set how many programs of how many steps; --seed repeats a run.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

import memsaver_core as ms
from memsaver_core import _process

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

steps: Counter[str] = Counter()


class Tenant:
    """Another process on the same device."""

    def __init__(self, device: str) -> None:
        self.bytes = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", TENANT, device, str(CAPACITY)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hold(self, nbytes: int) -> None:
        """Hold so much instead of what it holds; nothing where that is not free."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{nbytes}\n")
        self._process.stdin.flush()
        self.bytes = nbytes if self._process.stdout.readline().strip() == "ok" else 0

    def end(self) -> None:
        self._process.communicate(timeout=60)


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
        self.random = np.random.default_rng(0)
        self.planned = False

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    # What the program does.

    @rule(tag=st.sampled_from(TAGS), policy=st.sampled_from(POLICIES), pages=st.integers(1, 200))
    def allocate(self, tag: str, policy: str, pages: int) -> None:
        steps["allocate"] += 1
        planned = self._take_plan()
        try:
            with ms.region(tag, restore=policy):
                tensor = torch.empty(pages * PAGE, dtype=torch.uint8)
        except ms.MemsaverError as error:
            if planned or isinstance(error, ms.OutOfDeviceMemoryError):
                return
            raise
        finally:
            _process.saver().heal()
        memory = Memory(tensor, tensor.data_ptr(), tag, policy, None)
        self.memories.append(memory)
        self._write(memory)

    @rule(which=st.integers(0, 999))
    def write(self, which: int) -> None:
        steps["write"] += 1
        memory = self._pick(which)
        if memory is not None and not memory.released:
            self._write(memory)

    @rule(which=st.integers(0, 999))
    def free(self, which: int) -> None:
        steps["free"] += 1
        self._take_plan()
        memory = self._pick(which)
        if memory is not None:
            self.memories.remove(memory)
            del memory
        _process.saver().heal()

    @rule(tags=st.sets(st.sampled_from(TAGS)), override=st.none() | st.sampled_from(POLICIES))
    def release(self, tags: set[str], override: str | None) -> None:
        steps["release"] += 1
        planned = self._take_plan()
        selected = self._selected(tags)
        overrides = dict.fromkeys([memory.tag for memory in selected], override) if override else {}
        try:
            ms.release(sorted(tags), restore=overrides)
        except ms.MemsaverError:
            if not planned:
                raise
            _process.saver().heal()
            self._undo(selected, overrides)
            return
        finally:
            _process.saver().heal()
        self._note_released(selected, overrides)

    @rule(tags=st.sets(st.sampled_from(TAGS)))
    def resume(self, tags: set[str]) -> None:
        steps["resume"] += 1
        planned = self._take_plan()
        needed = sum(memory.bytes for memory in self._selected(tags) if memory.released)
        free = 0
        if not planned:  # the reading would meet the failure
            device = ms.read_devices()[0]
            free = device.total_bytes - device.used_bytes
        try:
            ms.resume(sorted(tags))
        except ms.MemsaverError as error:
            if planned or (isinstance(error, ms.OutOfDeviceMemoryError) and needed > free):
                return  # all is as before: the invariants look
            raise
        finally:
            _process.saver().heal()
        for memory in self._selected(tags):
            memory.released = False

    @rule(call=st.sampled_from(CALLS), nth=st.integers(1, 4), memory=st.booleans())
    def fail_a_call(self, call: str, nth: int, memory: bool) -> None:
        """The next operation meets a failure of this call."""
        steps["fail a call"] += 1
        _process.saver().heal()
        _process.saver().fail(call, nth, "out_of_memory" if memory and call == "create" else "invalid_value")
        self.planned = True

    @rule(nbytes=st.integers(0, CAPACITY // PAGE).map(lambda pages: pages * PAGE))
    def tenant_takes(self, nbytes: int) -> None:
        steps["tenant"] += 1
        self.tenant.hold(nbytes)

    @rule()
    def tenant_goes(self) -> None:
        steps["tenant"] += 1
        self.tenant.hold(0)

    @rule(pages=st.integers(1, 50), rounds=st.integers(1, 3))
    def release_while_others_work(self, pages: int, rounds: int) -> None:
        """Another thread releases and resumes a tag while this one allocates, asks and frees."""
        steps["concurrent"] += 1
        self._take_plan()
        _process.saver().heal()
        failures: list[BaseException] = []

        def cycle() -> None:
            try:
                for _ in range(rounds):
                    ms.release(["weights"])
                    ms.resume(["weights"])
            except ms.OutOfDeviceMemoryError:
                pass  # the allocations of this thread were faster
            except BaseException as error:
                failures.append(error)

        weights = self._selected({"weights"})
        thread = threading.Thread(target=cycle)
        thread.start()
        try:
            while thread.is_alive():
                assert ms.status().state in ("resident", "releasing", "released", "resuming")
                with ms.region("a", restore="zero"):
                    tensor = torch.full((pages * PAGE,), 7, dtype=torch.uint8)
                assert int(tensor.sum()) == 7 * pages * PAGE
                del tensor
        except ms.OutOfDeviceMemoryError:
            pass
        thread.join()
        assert not failures, failures
        if any(tag.state == "released" for tag in ms.status().tags if tag.tag == "weights"):
            self._note_released(weights, {})
        else:
            self._note_released(weights, {})
            for memory in weights:
                memory.released = False

    # The model.

    def _selected(self, tags: set[str]) -> list[Memory]:
        return [memory for memory in self.memories if not tags or memory.tag in tags]

    def _pick(self, which: int) -> Memory | None:
        return self.memories[which % len(self.memories)] if self.memories else None

    def _take_plan(self) -> bool:
        planned, self.planned = self.planned, False
        return planned

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

    def _undo(self, memories: list[Memory], overrides: dict[str, str]) -> None:
        """A failed release is undone by a resume, but for what was discarded."""
        tags = sorted({memory.tag for memory in memories if not memory.released})
        before = {id(memory) for memory in memories if memory.released}
        if not tags:
            return
        ms.resume(tags)
        for memory in memories:
            policy = overrides.get(memory.tag, memory.policy)
            if id(memory) in before:
                memory.released = False
            elif policy in ("discard", "zero"):
                content = memory.content()
                zeroed = policy == "zero" and content == bytes(memory.bytes)
                assert policy == "discard" or zeroed or memory.expected in (None, content)
                memory.expected = content

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

    def teardown(self) -> None:
        _process.saver().heal()
        self.tenant.hold(0)
        ms.resume()
        self.memories.clear()
        gc.collect()
        ms.release()
        status = ms.status()
        assert sum(tag.bytes for tag in status.tags) == 0, status
        assert (status.host_backup.bytes, status.host_backup.file_bytes) == (0, 0)
        assert ms.read_devices()[0].used_bytes == 0


def main() -> None:
    examples = int(os.environ.get("MEMSAVER_MACHINE_EXAMPLES", "70"))
    count = int(os.environ.get("MEMSAVER_MACHINE_STEPS", "50"))
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
    start = time.monotonic()
    try:
        run_state_machine_as_test(
            Machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=count,
                deadline=None,
                database=None,
                # The same programs every time, unless a longer search is asked for.
                derandomize="MEMSAVER_MACHINE_EXAMPLES" not in os.environ,
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        Machine.tenant.end()
    seconds = round(time.monotonic() - start, 1)
    print(json.dumps({"programs": examples, "steps": sum(steps.values()), "seconds": seconds, "by_rule": dict(steps)}))


if __name__ == "__main__":
    main()
