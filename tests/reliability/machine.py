"""A state machine over the public API on the host driver: random programs, compared with a model after every step.

A process has only one saver, so ``random_programs`` runs this in processes of their own.
"""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import gc
import sys
import threading
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import memsaver_core as ms
from memsaver_core import process
from tests.programs import Child
from tests.reliability.faults import (
    ALLOCATING,
    DROPPING,
    MEMORY,
    RELEASING,
    RELEASING_IN_PART,
    RESERVING,
    RESIZING,
    RESUMING,
    UNDO,
    Fault,
    Faults,
    faults_of,
)
from tests.reliability.known_programs import Program, written
from tests.reliability.memory_model import PAGE, Kind, Memory, mapped_pages, pages_of
from tests.reliability.neighbours import COMMON

DEVICES = (0, 1)
#: Bytes of each device; and of host memory for backups, less than what can be released.
CAPACITY = 512 * PAGE
BACKUP_LIMIT = 300 * PAGE
POLICIES = ("discard", "zero", "host", "file")
#: Sizes of allocations: few, so that several are adjacent.
KINDS = (
    *[("weights", "host", 0)] * 4,
    ("weights", "host", 1),
    ("weights", "file", 0),
    ("kv_cache", "zero", 0),
    ("kv_cache", "zero", 1),
    *[("a", "file", 0)] * 2,
    ("a", "host", 1),
    ("b", "discard", 0),
    ("b", "file", 1),
)
TAGS = ("weights", "kv_cache", "a", "b")
#: The tag whose memory comes in pieces of this size.
CHUNKED, CHUNK = "kv_cache", 4 * PAGE
#: Calls that only a release or a resume makes: while it is held there, everything else must continue.
HOLDS = ("copy_to_host", "copy_to_device", "fill_zero", "digest", "pack", "unpack", "record", "wait")
HOLD_SECONDS = 60.0
#: A step that takes longer ends the process, and prints its threads' stacks.
HANG_SECONDS = 120.0
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


def step(function: Callable[..., None]) -> Callable[..., None]:
    """A rule that counts its calls and is named if its program fails."""

    @functools.wraps(function)
    def run(self: Machine, **arguments: Any) -> None:
        steps[function.__name__] += 1
        self.note(function.__name__, arguments)
        function(self, **arguments)

    return run


class Tenant(Child):
    """Another process on the first device."""

    def __init__(self, device: str) -> None:
        super().__init__("-c", TENANT, device, str(CAPACITY))
        self.bytes = 0

    def hold(self, nbytes: int) -> None:
        """Hold this much instead of what it holds; nothing if that is not free."""
        self.bytes = nbytes if self.ask(str(nbytes)) == "ok" else 0


tags_of_a_call = st.sets(st.sampled_from(TAGS), max_size=3).map(sorted)
overrides_of_a_call = st.just({}) | st.dictionaries(st.sampled_from(TAGS), st.sampled_from(POLICIES), max_size=3)
several_pages = st.lists(st.integers(1, 7) | st.integers(1, 40), min_size=1, max_size=5)
contents = st.sampled_from(("random", "weights", "weights", "common", "zeros", "nothing"))
numbers = st.integers(0, 999)
#: The work of the other thread.
works = st.lists(
    st.tuples(st.just("allocate"), st.sampled_from(KINDS), st.integers(1, 20))
    | st.tuples(st.sampled_from(("write", "free", "free_twice", "status")), numbers),
    min_size=1,
    max_size=8,
)


class Machine(RuleBasedStateMachine):
    tenant: Tenant
    faults: Faults
    #: File with the current program, in case it crashes the process.
    journal: Path | None = None

    def __init__(self) -> None:
        super().__init__()
        self.memories: list[Memory] = []
        self.freed: list[int] = []
        self.program: list[tuple[str, dict[str, Any]]] = []
        self.random = np.random.default_rng(0)
        if self.journal is not None:
            self.journal.write_text("")

    def note(self, name: str, arguments: dict[str, Any]) -> None:
        self.program.append((name, arguments))
        if self.journal is not None:
            with self.journal.open("a") as file:
                file.write(written([self.program[-1]]))
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        kinds=st.lists(st.tuples(st.sampled_from(KINDS), several_pages), min_size=1, max_size=4),
    )
    def begin(self, seed: int, kinds: list[tuple[Kind, list[int]]]) -> None:
        """Start with something allocated and resumed once: its chunks span several allocations, and end inside
        blocks."""
        self.note("begin", {"seed": seed, "kinds": kinds})
        self.random = np.random.default_rng(seed)
        for kind, pages in kinds:
            for each in pages:
                self._allocate(kind, each, "weights", self._free_bytes()[kind[2]])
        self._release([], {}, [])
        self._resume([], [])

    # The steps of a program.

    @rule(
        kind=st.sampled_from(KINDS),
        pages=several_pages,
        content=contents,
        faults=st.just([]) | faults_of(ALLOCATING),
    )
    @step
    def allocate(self, kind: Kind, pages: list[int], content: str, faults: list[Fault]) -> None:
        free = self._free_bytes()[kind[2]]
        with self._failing(faults):
            for each in pages:
                if self._allocate(kind, each, content, free):
                    free -= each * PAGE

    @rule(which=numbers, first=numbers, pages=st.integers(1, 40), content=contents)
    @step
    def write(self, which: int, first: int, pages: int, content: str) -> None:
        memory = self._pick(self.memories, which)
        if memory is not None:
            self._write(memory, first % memory.pages, pages, content)

    @rule(which=numbers, faults=st.just([]) | faults_of(UNDO))
    @step
    def free(self, which: int, faults: list[Fault]) -> None:
        memory = self._pick(self.memories, which)
        with self._failing(faults):
            if memory is not None:
                self._free(memory)

    @rule(which=numbers, inside=st.booleans())
    @step
    def free_what_is_not_allocated(self, which: int, inside: bool) -> None:
        """What was freed before; an address in the middle of an allocation; a foreign address."""
        memory = self._pick(self.memories, which)
        if inside and memory is not None and memory.pages > 1:
            self._refuse_to_free(memory.address + PAGE)
        elif self.freed:
            self._refuse_to_free(self.freed[which % len(self.freed)])
        self._refuse_to_free(which * PAGE)

    @rule(tags=tags_of_a_call, overrides=overrides_of_a_call, faults=st.just([]) | faults_of(RELEASING))
    @step
    def release(self, tags: list[str], overrides: dict[str, str], faults: list[Fault]) -> None:
        self._release(tags, overrides, faults)

    @rule(
        tags=st.just([]) | tags_of_a_call,
        overrides=overrides_of_a_call,
        faults=faults_of(RELEASING_IN_PART),
        write=st.booleans(),
        again=st.none() | overrides_of_a_call,
    )
    @step
    def release_in_part(
        self,
        tags: list[str],
        overrides: dict[str, str],
        faults: list[Fault],
        write: bool,
        again: dict[str, str] | None,
    ) -> None:
        """A failure leaves part of it released; the rest may then change, or be released with other policies."""
        if not any(memory.here.any() for memory in self._selected(tags)):
            self._resume(tags, [])
        self._release(tags, overrides, faults)
        for memory in self._selected(tags) if write else ():
            self._write(memory, 0, memory.pages, "weights")
        if again is not None:
            self._release(tags, again, [])

    release_in_part_as_often = release_in_part_more_often = release_in_part  # one rule per name

    @rule(tags=tags_of_a_call, faults=st.just([]) | faults_of(RESUMING))
    @step
    def resume(self, tags: list[str], faults: list[Fault]) -> None:
        self._resume(tags, faults)

    @rule(tags=st.just([]) | tags_of_a_call, faults=faults_of(RESUMING))
    @step
    def resume_with_failures(self, tags: list[str], faults: list[Fault]) -> None:
        if not any(memory.released_bytes for memory in self._selected(tags)):
            self._release(tags, {}, [])
        self._resume(tags, faults)

    @rule(
        tag=st.just(CHUNKED) | st.sampled_from(TAGS),
        fraction=st.sampled_from((0, 0.3, 0.5, 1)),
        faults=st.just([]) | faults_of(RESIZING),
    )
    @step
    def resize(self, tag: str, fraction: float, faults: list[Fault]) -> None:
        before = self._selected([tag])
        released = {memory.kind for memory in before if memory.released_bytes}
        if released and tag != CHUNKED:
            return  # how its memory is divided is not known here
        shrunk = sum(int(np.count_nonzero(memory.shrunk)) for memory in before)
        short = any(shrunk * PAGE > free for free in self._free_bytes().values())
        done = False
        with self._failing(faults):
            try:
                ms.resize(tag, fraction=fraction)
                done = True
            except ms.ConfigurationError:
                assert any(memory.kind in released and memory.here.any() for memory in before)
            except ms.OutOfDeviceMemoryError:
                if not short and not self.faults.met():
                    raise
            finally:
                here = mapped_pages(process.saver().left_mapped())
                for memory in before if done or not released else ():
                    unused = np.arange(memory.pages) * PAGE >= fraction * memory.bytes
                    if memory.kind in released:
                        memory.be_divided(unused, CHUNK)
                    else:
                        memory.be_resized(unused, here(memory), done=done)

    resize_as_often = resize  # one rule per name

    @rule(tags=tags_of_a_call, give_back=st.booleans(), faults=st.just([]) | faults_of(RESERVING))
    @step
    def reserve(self, tags: list[str], give_back: bool, faults: list[Fault]) -> None:
        """All that a resume needs, or nothing. What is not given back is left to the next resume."""
        with self._failing(faults):
            self._reserve(tags)
        if give_back:
            ms.give_back_reserved()
            assert ms.status().reserved_by_device == {}

    @rule(tags=st.just([]) | tags_of_a_call)
    @step
    def resume_what_is_reserved(self, tags: list[str]) -> None:
        """It cannot run out of memory, whatever the co-tenant takes."""
        if not self._reserve(tags):
            return
        held = self.tenant.bytes
        self.tenant.hold(held + self._free_bytes()[0])
        with self._resuming(tags, self._needed(tags)):
            ms.resume(tags)
        self.tenant.hold(held)

    @rule(pages=st.just(0) | st.integers(0, CAPACITY // PAGE))
    @step
    def tenant_takes(self, pages: int) -> None:
        self.tenant.hold(pages * PAGE)

    @rule(tags=tags_of_a_call, faults=st.just([]) | faults_of(DROPPING))
    @step
    def drop_backups(self, tags: list[str], faults: list[Fault]) -> None:
        with self._failing(faults):
            process.saver().drop_backups(tags)
            for tag in ms.status().tags:
                if (not tags or tag.tag in tags) and tag.released_bytes == 0:
                    assert tag.backed_up_bytes == 0, tag

    @rule(which=numbers, page=numbers)
    @step
    def damage_a_backup(self, which: int, page: int) -> None:
        """Flip a bit in the backup of one page."""
        memory = self._pick([memory for memory in self.memories if memory.released_bytes], which)
        if memory is None:
            return
        page = self._pick(np.flatnonzero(memory.released).tolist(), page)
        if np.array_equal(memory.expected[page], COMMON[page]):
            return  # in a store, this backup may be that of other memory, too
        kept = process.saver().backup_of(memory.address + page * PAGE, PAGE, 0)
        assert kept["released"]
        if kept["in_host_memory"] and kept["memory"]:
            byte = ctypes.c_ubyte.from_address(kept["memory"])
            byte.value ^= 1
            memory.damaged[page] = not memory.damaged[page]

    @rule(wait=st.booleans(), faults=st.just([]) | faults_of(MEMORY))
    @step
    def prepare_backup(self, wait: bool, faults: list[Fault]) -> None:
        with self._failing(faults):
            ms.prepare_backup(wait=wait)

    @rule(
        operation=st.sampled_from(("release", "resume")),
        tags=tags_of_a_call,
        overrides=overrides_of_a_call,
        hold=st.none() | st.sampled_from(HOLDS),
        work=works,
        faults=st.just([]) | faults_of({**RELEASING, **RESUMING}),
    )
    @step
    def operate_while_another_works(
        self,
        operation: str,
        tags: list[str],
        overrides: dict[str, str],
        hold: str | None,
        work: list[tuple[Any, ...]],
        faults: list[Fault],
    ) -> None:
        """Another thread releases or resumes, and may be held in the middle, while this one works."""
        free = self._free_bytes()
        failure: list[BaseException] = []

        def operate() -> None:
            try:
                if operation == "release":
                    ms.release(tags, restore=overrides)
                else:
                    ms.resume(tags)
            except BaseException as error:
                failure.append(error)

        model = self._releasing(tags, overrides) if operation == "release" else self._resuming(tags, free, work)
        with self._failing(faults), model:
            thread = threading.Thread(target=operate)
            begun = self._hold(hold)
            thread.start()
            try:
                while thread.is_alive() and hold is not None and not begun():
                    thread.join(0.0002)
                self._work(work, operation, tags, free, anywhere=hold is not None)
            finally:
                if hold is not None:
                    self.faults.heal()
                thread.join()
            if failure:
                raise failure[0]

    def _hold(self, call: str | None) -> Callable[[], bool]:
        """Hold this call. Returns whether it was reached."""
        saver = process.saver()
        if call is None:
            return lambda: False
        before = saver.counts().get(call, 0)
        saver.delay(call, HOLD_SECONDS)
        return lambda: saver.counts().get(call, 0) > before

    def _work(
        self, work: list[tuple[Any, ...]], operation: str, tags: list[str], free: dict[int, int], *, anywhere: bool
    ) -> None:
        """Operations that do not wait for the one on ``tags``. ``anywhere``: that one has begun, or is over."""
        others = [tag for tag in TAGS if tags and tag not in tags]
        needed = self._needed(tags) if operation == "resume" else {}
        for what, *arguments in work:
            if what == "allocate":
                kind, pages = arguments
                if anywhere or kind[0] in others:
                    self._allocate(kind, pages, "random", free[kind[2]] - needed.get(kind[2], 0))
                free[kind[2]] -= pages * PAGE
            elif what == "write":
                memory = self._pick([each for each in self.memories if each.tag in others], *arguments)
                if memory is not None:
                    self._write(memory, 0, memory.pages, "random")
                    memory.look()
            elif what == "status":
                status = ms.status()
                assert status.state in ("resident", "releasing", "released", "resuming")
                for tag in status.tags:
                    if tag.tag in others:
                        self._compare(tag)
            else:
                memory = self._pick(self.memories, *arguments)
                if memory is not None:
                    self._free(memory)
                if what == "free_twice" and self.freed:
                    self._refuse_to_free(self.freed[-1])

    # The model.

    def _release(self, tags: list[str], overrides: dict[str, str], faults: list[Fault]) -> None:
        with self._failing(faults), self._releasing(tags, overrides):
            ms.release(tags, restore=overrides)

    def _resume(self, tags: list[str], faults: list[Fault]) -> None:
        free = self._free_bytes()
        with self._failing(faults), self._resuming(tags, free):
            ms.resume(tags)

    def _reserve(self, tags: list[str]) -> bool:
        """Whether memory for a resume of these tags could be reserved."""
        needed, free = self._needed(tags), self._free_bytes()
        for device, size in ms.status().reserved_by_device.items():
            free[device] += size
        try:
            ms.reserve_with(ms.MemoryRequest(tags=tuple(tags)))
        except ms.MemsaverError as error:
            assert ms.status().reserved_by_device == {}
            short = any(needed[device] > free[device] for device in DEVICES)
            if isinstance(error, ms.OutOfDeviceMemoryError) and short:
                return False
            raise
        assert ms.status().reserved_by_device == {device: size for device, size in needed.items() if size}
        return True

    def _pick(self, several: list[Any], which: int) -> Any:
        return several[which % len(several)] if several else None

    def _selected(self, tags: list[str]) -> list[Memory]:
        return [memory for memory in self.memories if not tags or memory.tag in tags]

    def _needed(self, tags: list[str]) -> dict[int, int]:
        """What a resume needs on each device."""
        return {
            device: sum(memory.released_bytes for memory in self._selected(tags) if memory.device == device)
            for device in DEVICES
        }

    def _free_bytes(self) -> dict[int, int]:
        """The free bytes of each device."""
        return {device.index: device.total_bytes - device.used_bytes for device in ms.read_devices()}

    @contextmanager
    def _failing(self, faults: list[Fault]) -> Iterator[None]:
        """A step that may fail if it meets one of these."""
        self.faults.plan(faults)
        try:
            yield
        except ms.MemsaverError:
            if not self.faults.met():
                raise
        finally:
            self.faults.end()

    def _allocate(self, kind: Kind, pages: int, content: str, free: int) -> bool:
        """Whether the allocation succeeded. ``free``: at least this much was free."""
        tag, policy, device = kind
        try:
            with ms.region(tag, restore=policy, device=device, chunk_bytes=CHUNK if tag == CHUNKED else 0):
                tensor = torch.empty(pages * PAGE, dtype=torch.uint8)
        except ms.OutOfDeviceMemoryError as error:
            if error.device == device and (pages * PAGE > free or self.faults.met()):
                return False
            raise
        except ms.MemsaverError:
            if self.faults.met():
                return False
            raise
        shape = (pages, PAGE // 8)
        memory = Memory(
            tensor, tensor.data_ptr(), tag, policy, device, np.zeros(shape, np.uint64), np.zeros(pages, bool)
        )
        assert all(memory.address != other.address for other in self.memories)
        self.memories.append(memory)
        if memory.address in self.freed:
            self.freed.remove(memory.address)
        self._write(memory, 0, pages, content)
        return True

    def _write(self, memory: Memory, first: int, pages: int, content: str) -> None:
        """Write to the resident ones of these pages."""
        at = np.flatnonzero(memory.here[first : first + pages]) + first
        if content == "nothing" or len(at) == 0:
            return
        memory.expected[at] = 0
        if content in ("random", "weights"):
            memory.expected[at] = pages_of(np.frombuffer(self.random.bytes(len(at) * PAGE), np.uint8))
        if content == "weights":  # in bfloat16, with four exponents: can be packed
            memory.expected[at] = memory.expected[at] & np.uint64(0x81FF81FF81FF81FF) | np.uint64(0x3C003C003C003C00)
        if content == "common":
            memory.expected[at] = COMMON[at]
        memory.sure[at] = True
        memory.or_zeros[at] = False
        memory.content()[at] = memory.expected[at]

    def _free(self, memory: Memory) -> None:
        self.memories.remove(memory)
        self.freed.append(memory.address)
        del memory.tensor

    def _refuse_to_free(self, address: int) -> None:
        try:
            process.saver().free(address)
        except ms.ConfigurationError:
            return
        raise AssertionError(f"{address:#x} is not allocated, and was freed")

    @contextmanager
    def _releasing(self, tags: list[str], overrides: dict[str, str]) -> Iterator[None]:
        """A release: what stays resident is unchanged, and what is released is owed what its policy says."""
        kept = self._kept_bytes()
        before = self._selected(tags)
        room = sum(m.bytes - m.released_bytes for m in before if overrides.get(m.tag, m.policy) == "host")
        error: ms.MemsaverError | None = None
        try:
            yield
        except ms.MemsaverError as raised:
            error = raised
        self._give_up(before, overrides, certainly=error is None)
        here = mapped_pages(process.saver().left_mapped())
        kept_here = lost = left = 0
        for memory in self._selected(tags):
            policy = overrides.get(memory.tag, memory.policy)
            now = here(memory)
            gone = memory.here & ~now
            left += int(np.count_nonzero(gone))
            if memory in before:
                assert error is not None or not (memory.here & now).any(), f"released memory is resident: {memory}"
                kept_here += int(np.count_nonzero(memory.here & now)) if policy in ("host", "file") else 0
                lost += int(np.count_nonzero(gone)) if policy in ("discard", "zero") else 0
            memory.owe(policy, gone)
            memory.here[gone] = False
        if error is None:
            return
        assert not (kept_here and lost), "content was given up before all that is to be kept was"
        if isinstance(error, ms.OutOfHostMemoryError) and not self.faults.met():
            assert kept + room > BACKUP_LIMIT, "the backup would have fitted"
            assert not left, "something was unmapped before all of the backup had its memory"
            return
        raise error

    @contextmanager
    def _resuming(self, tags: list[str], free: dict[int, int], work: Sequence[tuple[Any, ...]] = ()) -> Iterator[None]:
        """A resume: all or nothing. ``work`` takes memory meanwhile."""
        before = self._selected(tags)  # some may be freed meanwhile
        needed = self._needed(tags)
        taken = dict.fromkeys(DEVICES, 0)
        for what, *arguments in work:
            if what == "allocate":
                taken[arguments[0][2]] += arguments[1] * PAGE
        short = any(needed[device] + taken[device] > free[device] for device in DEVICES)
        try:
            yield
        except ms.OutOfDeviceMemoryError:
            if not short and not self.faults.met():
                raise
        except ms.BackupError as error:
            told = [memory.tell(error.address, error.bytes) for memory in before]
            self._may_have_noted_damage(tags)
            if not any(told) and not self.faults.met():
                raise
        except ms.MemsaverError:
            self._may_have_noted_damage(tags)
            raise
        else:
            for memory in self._selected(tags):
                assert not memory.damaged.any(), f"a damaged backup was restored: {memory}"
                memory.be_resident()

    def _may_have_noted_damage(self, tags: list[str]) -> None:
        """A resume works on several devices at once, and reports the damage of one."""
        for memory in self._selected(tags):
            damage = self.faults.met() or (memory.damaged | memory.perhaps_damaged).any()
            memory.perhaps_told |= bool(damage and memory.released_bytes)

    def _give_up(self, before: list[Memory], overrides: dict[str, str], *, certainly: bool) -> None:
        """If a resume reported damage, an override discards what is kept beside it, too; perhaps not if the damaged
        memory was freed meanwhile, as that may have been before the release began."""
        for kind in {memory.kind for memory in before}:
            policy = overrides.get(kind[0])
            if policy not in ("discard", "zero"):
                continue
            there = [memory for memory in before if memory.kind == kind]
            beside = [memory for memory in self.memories if memory.kind == kind]
            if certainly and any(memory.told and memory in beside for memory in there):
                for each in beside:
                    each.give_up(policy)
            elif any(memory.told or memory.perhaps_told for memory in there):
                for each in beside:
                    each.may_give_up(policy)

    def _kept_bytes(self) -> int:
        return int(process.saver().status()["host_backup"]["used_bytes"])

    def _compare(self, tag: ms.TagStatus) -> None:
        memories = [memory for memory in self.memories if memory.tag == tag.tag]
        shrunk = sum(int(np.count_nonzero(memory.shrunk)) for memory in memories) * PAGE
        expected = (sum(memory.bytes for memory in memories), sum(memory.released_bytes for memory in memories), shrunk)
        assert (tag.bytes, tag.released_bytes, tag.shrunk_bytes) == expected, tag

    @invariant()
    def the_saver_agrees(self) -> None:
        problems = process.saver().audit({0: self.tenant.bytes})
        assert problems == [], problems
        status = ms.status()
        for tag in status.tags:
            self._compare(tag)
        here = mapped_pages(process.saver().left_mapped())
        for memory in self.memories:
            assert memory.tensor.data_ptr() == memory.address
            now = here(memory)
            wrong = memory.here != now
            assert not wrong.any(), f"pages {np.flatnonzero(wrong).tolist()} are resident, or not, against it: {memory}"
            memory.look()

    # The end, also of a failed program: the next one must find the saver as new.

    def teardown(self) -> None:
        failure = sys.exc_info()[1]
        if not isinstance(failure, Exception):
            failure = None  # Hypothesis ends a program by something that is not an Exception
        self.faults.end()
        self.tenant.hold(0)
        try:
            if failure is None:
                self.resume(tags=[], faults=[])
                self.the_saver_agrees()
        except Exception as error:
            failure = error
            raise
        finally:
            if failure is not None:
                self._tell(failure)
            self._leave_nothing()

    def _tell(self, failure: BaseException) -> None:
        """The final report has a shorter program, if one fails each time."""
        print("A program failed (it can be replayed):", written(self.program), sep="\n", file=sys.stderr)
        traceback.print_exception(failure)

    def _leave_nothing(self) -> None:
        for memory in self.memories:
            memory.tensor.set_()  # the failure's traceback may hold the tensor
        self.memories.clear()
        gc.collect()
        ms.give_back_reserved()
        ms.release()
        status = ms.status()
        assert sum(tag.bytes for tag in status.tags) == 0, status
        assert (status.host_backup.bytes, status.host_backup.file_bytes) == (0, 0)
        assert [device.used_bytes for device in ms.read_devices()] == [0 for _ in DEVICES]


def replay(program: Program, machine: Machine) -> None:
    """Run one program."""
    try:
        if program and program[0][0] != "begin":
            machine.begin(seed=0, kinds=[])
        for name, arguments in program:
            getattr(machine, name)(**arguments)
            machine.the_saver_agrees()
    finally:
        machine.teardown()


@contextmanager
def two_devices(shared_backups: str = "") -> Iterator[None]:
    """The saver of this process, with two devices, the first of them shared with a co-tenant."""
    torch.set_num_threads(1)
    devices = [f"machine-{uuid.uuid4().hex[:12]}" for _ in DEVICES]
    process.configure(
        driver="host",
        host_device=",".join(devices),
        host_capacity=CAPACITY,
        host_backup_limit=BACKUP_LIMIT,
        file_dir="/dev/shm",
        verify="full",
        shared_backups=shared_backups,
    )
    for tag in TAGS:  # tags and devices exist from here on
        for device in DEVICES:
            with ms.region(tag, device=device):
                torch.empty(PAGE, dtype=torch.uint8)
    Machine.faults = Faults()
    Machine.tenant = Tenant(devices[0])
    try:
        yield
    finally:
        Machine.tenant.end()
