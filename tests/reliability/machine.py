"""A state machine over the public API on the host driver: random programs, compared with a model after every step.

There is one saver for each process, so ``random_programs`` runs this in processes of their own.
"""

from __future__ import annotations

import ast
import ctypes
import errno
import functools
import gc
import sys
import threading
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import memsaver_core as ms
from memsaver_core import _native, _process
from tests.programs import Child

PAGE = 4096
DEVICES = (0, 1)
#: Of a block of the core with small units, the larger part of these programs runs on.
BLOCK_PAGES = 4
#: Of each device; and of host memory for backups, which is less than what can be released.
CAPACITY = 512 * PAGE
BACKUP_LIMIT = 300 * PAGE
POLICIES = ("discard", "zero", "host", "file")
#: What is allocated: few, so that several lie side by side.
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
#: Calls of an operation that nothing else makes: while it stands still there, everything else goes on.
HOLDS = ("copy_to_host", "copy_to_device", "fill_zero", "digest", "record", "wait")
HOLD_SECONDS = 60.0
SHORT = -1  # a transfer that ends early
#: What may fail: a call to the driver, or to the operating system, and how.
UNDO = {"unmap": ("invalid_value",), "release": ("invalid_value",), "synchronize": ("invalid_value",)}
ALLOCATING = {
    "create": ("invalid_value", "out_of_memory"),
    "map": ("invalid_value",),
    "allow_access": ("invalid_value",),
    "reserve": ("invalid_value",),
    **UNDO,
}
MEMORY = {
    "register_host": ("invalid_value", "out_of_host_memory"),
    "mmap": (errno.ENOMEM,),
    "fopen": (errno.EMFILE,),
    "thread": (errno.EAGAIN,),
}
MOVING = {
    **dict.fromkeys(("digest", "record", "wait", "done", "memory_info"), ("invalid_value",)),
    **MEMORY,
}
RELEASING = {
    "copy_to_host": ("invalid_value",),
    "open": (errno.EMFILE, errno.EOPNOTSUPP),
    "mkostemp": (errno.EMFILE,),
    "fstatvfs": (errno.EIO,),
    "fallocate": (errno.EOPNOTSUPP, errno.EIO),
    "pwrite": (errno.ENOSPC, errno.EIO, errno.EINTR, SHORT),
    **MOVING,
    **UNDO,
}
RELEASING_IN_PART = {
    **dict.fromkeys(("unmap", "release", "copy_to_host", "digest", "record", "wait", "done"), ("invalid_value",)),
    "register_host": ("invalid_value",),
    "pwrite": (errno.ENOSPC,),
}
RESUMING = {
    **dict.fromkeys(("copy_to_device", "fill_zero", "stream_wait"), ("invalid_value",)),
    "pread": (errno.EIO, errno.EINTR, SHORT),
    **ALLOCATING,
    **MOVING,
}
DROPPING = {"unregister_host": ("invalid_value",), "thread": (errno.EAGAIN,), "fallocate": (errno.EIO,)}

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

#: Where the devices cannot be read after all was resumed, the resume says that it failed. To be mended.
A_READING_UNDOES_NO_RESUME = True

#: What stopped one growth of the pool is told to those who wait for a later one, too. To be mended.
AN_OLD_GROWTH_FAILS_A_NEW_ONE = True
#: What is resident of a block of which a failed release took a part comes back as it was before that: not as it was
#: written since, and not as the zeros that a later release promised. To be mended.
A_HALF_BLOCK_COMES_BACK_WHOLE = True

#: A program as data: the steps by name, with their arguments.
Program = Sequence[tuple[str, dict[str, Any]]]
#: A tag, a policy, a device.
Kind = tuple[str, str, int]
#: The call; the driver's kind of error, or an errno; at which call from now, and how often in a row.
Fault = tuple[str, "str | int", int, int]


def _allocate(tag: str, policy: str, *pages: int) -> tuple[str, dict[str, Any]]:
    return ("allocate", {"kind": (tag, policy, 0), "pages": list(pages), "content": "random", "faults": []})


def _release(*tags: str, faults: Sequence[Fault] = (), **overrides: str) -> tuple[str, dict[str, Any]]:
    return ("release", {"tags": list(tags), "overrides": overrides, "faults": list(faults)})


def _resume(*tags: str, faults: Sequence[Fault] = ()) -> tuple[str, dict[str, Any]]:
    return ("resume", {"tags": list(tags), "faults": list(faults)})


_UNMAP: Fault = ("unmap", "invalid_value", 1, 1)

#: Programs that failed once, for the model's sake or the saver's; they run before the random ones.
REPLAYED: dict[str, Program] = {
    "kept by an override, resumed and discarded": [
        _allocate("weights", "discard", 2),
        _release("weights", weights="host"),
        _resume("weights"),
        _release("weights"),
    ],
    "a release that fails beside a tag that is released already": [
        _allocate("a", "zero", 2),
        _allocate("b", "zero", 2),
        _release("a"),
        _release(faults=[_UNMAP]),
    ],
    "a release that fails when there is no memory to resume what was released before": [
        _allocate("a", "zero", 200),
        _release("a"),
        _allocate("a", "zero", 20),
        ("tenant_takes", {"pages": CAPACITY // PAGE - 30}),
        _release(faults=[_UNMAP]),
    ],
    "more in all than the device has": [
        _allocate("a", "zero", *[50] * 8),
        _release(),
        _allocate("a", "zero", *[50] * 8),
    ],
}

steps: Counter[str] = Counter()


def step(function: Callable[..., None]) -> Callable[..., None]:
    """A rule that counts, and that is told of where its program fails."""

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
        """Hold so much instead of what it holds; nothing where that is not free."""
        self.bytes = nbytes if self.ask(str(nbytes)) == "ok" else 0


class Faults:
    """Failures of calls to the driver and, where the build offers them, to the operating system: of one step."""

    def __init__(self) -> None:
        self.saver = _process.saver()
        self.system = ctypes.CDLL(_native.__file__)
        self.fails_system_calls = hasattr(self.system, "memsaver_fail_system_call")
        if self.fails_system_calls:
            self.system.memsaver_system_call_failed.restype = ctypes.c_bool
        self._at: list[tuple[str, int]] = []
        self._met = False

    def plan(self, faults: Sequence[Fault]) -> None:
        for call, how, nth, times in faults:
            if isinstance(how, str):
                self._at.append((call, self.saver.counts().get(call, 0) + nth))
                self.saver.fail(call, nth, how, times)
            elif self.fails_system_calls:
                counted = (ctypes.c_size_t(nth), ctypes.c_int(how), ctypes.c_size_t(times))
                self.system.memsaver_fail_system_call(call.encode(), *counted)

    def met(self) -> bool:
        """Whether one of them came."""
        counts = self.saver.counts()
        self._met = self._met or any(counts.get(call, 0) >= at for call, at in self._at)
        if self.fails_system_calls:
            self._met = self._met or self.system.memsaver_system_call_failed()
        return self._met

    def heal(self) -> None:
        """Call off what did not come; calls that stand still go on."""
        self.met()
        self._at.clear()
        self.saver.heal()
        if self.fails_system_calls:
            self.system.memsaver_heal_system_calls()

    def end(self) -> None:
        self.heal()
        self._met = False


@dataclass(eq=False)
class Memory:
    """One tensor and what must be in it, page by page."""

    tensor: torch.Tensor
    address: int
    tag: str
    policy: str
    device: int
    expected: np.ndarray  # what each page must hold,
    sure: np.ndarray  # where it must hold something
    or_zeros: np.ndarray = field(init=False)  # it may hold zeros instead: a release that failed may have owed them
    here: np.ndarray = field(init=False)  # it is resident
    #: Of what is released, and whose backup is not what it was:
    damaged: np.ndarray = field(init=False)  # a resume cannot bring it back
    perhaps_damaged: np.ndarray = field(init=False)  # a resume may not bring it back
    told: np.ndarray = field(init=False)  # a resume said so: it can be given up
    perhaps_told: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.here = np.ones(self.pages, bool)
        for name in ("or_zeros", "damaged", "perhaps_damaged", "told", "perhaps_told"):
            setattr(self, name, np.zeros(self.pages, bool))

    @property
    def pages(self) -> int:
        return len(self.sure)

    @property
    def bytes(self) -> int:
        return self.pages * PAGE

    @property
    def released_bytes(self) -> int:
        return int(np.count_nonzero(~self.here)) * PAGE

    def in_half_blocks(self) -> np.ndarray:
        """Pages whose block is resident in part."""
        block = np.arange(self.pages) // BLOCK_PAGES
        here, all_ = np.bincount(block, self.here), np.bincount(block)
        half: np.ndarray = ((here > 0) & (here < all_))[block]
        return half

    def content(self) -> np.ndarray:
        """Its pages. Those that are not resident must not be touched: that ends the process."""
        return _pages(self.tensor.numpy())

    def owe(self, policy: str, pages: np.ndarray) -> None:
        """These pages were released under this policy."""
        if policy == "discard":
            self.sure[pages] = False
        elif policy == "zero":
            self.sure[pages] = True
            self.expected[pages] = 0
        if policy in ("discard", "zero"):
            self.or_zeros[pages] = False

    def may_owe(self, policy: str, pages: np.ndarray) -> None:
        """These pages were released, and then perhaps under this policy."""
        if policy == "discard":
            self.sure[pages] = False
        elif policy == "zero":
            self.or_zeros |= pages

    def give_up(self, policy: str) -> None:
        """What cannot be brought back is owed what this policy says, instead."""
        if policy not in ("discard", "zero"):
            return
        self.owe(policy, self.told)
        self.may_owe(policy, self.perhaps_told)
        self.perhaps_damaged |= self.damaged & self.perhaps_told
        self.damaged &= ~(self.told | self.perhaps_told)
        self.told[:] = False

    def may_give_up(self, policy: str) -> None:
        """As far as a release came that failed."""
        if policy not in ("discard", "zero"):
            return
        self.perhaps_told |= self.told
        self.told[:] = False
        self.give_up(policy)

    def tell(self, begin: int, nbytes: int) -> bool:
        """A resume said that this range cannot be brought back. Whether that may be."""
        pages = self.address + np.arange(self.pages) * PAGE
        told = (pages >= begin) & (pages < begin + nbytes)
        self.told |= told
        return bool((told & (self.damaged | self.perhaps_damaged)).any())

    def be_resident(self) -> None:
        for pages in (self.damaged, self.perhaps_damaged, self.told, self.perhaps_told):
            pages[:] = False
        self.here[:] = True

    def look(self) -> None:
        """Every resident page holds what it must. From then on it must hold what it holds."""
        if not self.here.any():
            return
        at = np.flatnonzero(self.here)
        now = self.content()[at]  # a copy: what a failure's traceback holds shall not keep the memory
        right = ~self.sure[at] | (now == self.expected[at]).all(axis=1)
        right |= self.or_zeros[at] & (now == 0).all(axis=1)
        assert right.all(), f"wrong content in pages {at[~right].tolist()} of {self}"
        self.expected[at] = now
        self.sure[at] = True
        self.or_zeros[at] = False

    def __str__(self) -> str:
        return f"{self.pages} pages under {self.tag!r} ({self.policy}) on device {self.device} at {self.address:#x}"


def _pages(content: np.ndarray) -> np.ndarray:
    return content.view(np.uint64).reshape(-1, PAGE // 8)


def mapped_pages() -> Callable[[Memory], np.ndarray]:
    """Which pages of a memory the kernel has memory behind now."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    mapped = [line.split(" ", 1)[0].split("-") for line in lines if "memsaver-device" in line and " rw" in line]
    begins = np.array([0, *(int(begin, 16) for begin, _ in mapped)], np.uint64)
    ends = np.array([0, *(int(end, 16) for _, end in mapped)], np.uint64)

    def of(memory: Memory) -> np.ndarray:
        pages = np.uint64(memory.address) + np.arange(memory.pages, dtype=np.uint64) * np.uint64(PAGE)
        result: np.ndarray = pages < ends[np.searchsorted(begins, pages, "right") - 1]
        return result

    return of


tags_of_a_call = st.sets(st.sampled_from(TAGS), max_size=3).map(sorted)
overrides_of_a_call = st.just({}) | st.dictionaries(st.sampled_from(TAGS), st.sampled_from(POLICIES), max_size=3)
several_pages = st.lists(st.integers(1, 7) | st.integers(1, 40), min_size=1, max_size=5)
contents = st.sampled_from(("random", "random", "zeros", "nothing"))
numbers = st.integers(0, 999)
#: What the other thread does meanwhile.
works = st.lists(
    st.tuples(st.just("allocate"), st.sampled_from(KINDS), st.integers(1, 20))
    | st.tuples(st.sampled_from(("write", "free", "free_twice", "status")), numbers),
    min_size=1,
    max_size=8,
)


def faults_of(calls: dict[str, Sequence[str | int]]) -> st.SearchStrategy[list[Fault]]:
    """One or two."""
    one = st.tuples(
        st.sampled_from([(call, how) for call, hows in calls.items() for how in hows]),
        st.integers(1, 3) | st.integers(1, 12),
        st.sampled_from((1, 1, 1, 3)),
    ).map(lambda fault: (*fault[0], *fault[1:]))
    return st.lists(one, min_size=1, max_size=2)


class Machine(RuleBasedStateMachine):
    tenant: Tenant
    faults: Faults
    #: Where the program at work is written down, for when it ends the process.
    journal: Path | None = None

    def __init__(self) -> None:
        super().__init__()
        self.memories: list[Memory] = []
        self.freed: list[int] = []
        self.program: list[tuple[str, dict[str, Any]]] = []
        self.random = np.random.default_rng(0)
        self.orphans = False  # the driver may have refused to unmap or take back what is nobody's any more
        if self.journal is not None:
            self.journal.write_text("")

    def note(self, name: str, arguments: dict[str, Any]) -> None:
        self.program.append((name, arguments))
        if self.journal is not None:
            with self.journal.open("a") as file:
                file.write(written([self.program[-1]]))

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        kinds=st.lists(st.tuples(st.sampled_from(KINDS), several_pages), min_size=1, max_size=4),
    )
    def begin(self, seed: int, kinds: list[tuple[Kind, list[int]]]) -> None:
        """Something is there, for the second time: its chunks span several memories, and end inside of blocks."""
        self.note("begin", {"seed": seed, "kinds": kinds})
        self.random = np.random.default_rng(seed)
        for kind, pages in kinds:
            for each in pages:
                self._allocate(kind, each, "random", self._free_bytes()[kind[2]])
        self._release([], {}, [])
        self._resume([], [])

    # What the program does.

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
        """What was freed before; the middle of what is allocated; nothing of ours."""
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
        """A failure in the middle leaves some of it released; perhaps the rest changes, or goes under other policies."""
        self._release(tags, overrides, faults)
        for memory in self._selected(tags) if write else ():
            self._write(memory, 0, memory.pages, "random")
        if again is not None:
            self._release(tags, again, [])

    release_in_part_as_often = release_in_part_more_often = release_in_part  # a rule for each name

    @rule(tags=tags_of_a_call, faults=st.just([]) | faults_of(RESUMING))
    @step
    def resume(self, tags: list[str], faults: list[Fault]) -> None:
        self._resume(tags, faults)

    @rule(tags=st.just([]) | tags_of_a_call, faults=faults_of(RESUMING))
    @step
    def resume_with_failures(self, tags: list[str], faults: list[Fault]) -> None:
        self._resume(tags, faults)

    @rule(pages=st.just(0) | st.integers(0, CAPACITY // PAGE))
    @step
    def tenant_takes(self, pages: int) -> None:
        self.tenant.hold(pages * PAGE)

    @rule(tags=tags_of_a_call, faults=st.just([]) | faults_of(DROPPING))
    @step
    def drop_backups(self, tags: list[str], faults: list[Fault]) -> None:
        with self._failing(faults):
            _process.saver().drop_backups(tags)
            for tag in ms.status().tags:
                if (not tags or tag.tag in tags) and tag.released_bytes == 0:
                    assert tag.backed_up_bytes == 0, tag

    @rule(which=numbers, page=numbers)
    @step
    def damage_a_backup(self, which: int, page: int) -> None:
        """A bit of what is kept of one page is another one."""
        memory = self._pick([memory for memory in self.memories if memory.released_bytes], which)
        if memory is None:
            return
        page = self._pick(np.flatnonzero(~memory.here).tolist(), page)
        kept = _process.saver().backup_of(memory.address + page * PAGE, PAGE, 0)
        assert kept["released"]
        if kept["in_host_memory"] and kept["memory"]:
            byte = ctypes.c_ubyte.from_address(kept["memory"])
            byte.value ^= 1
            memory.damaged[page] = not memory.damaged[page]

    @rule(wait=st.booleans(), faults=st.just([]) | faults_of(MEMORY))
    @step
    def prepare_backup(self, wait: bool, faults: list[Fault]) -> None:
        with self._failing(faults):
            try:
                ms.prepare_backup(wait=wait)
            except ms.MemsaverError:
                if not AN_OLD_GROWTH_FAILS_A_NEW_ONE:
                    raise

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
        """Another thread releases or resumes, and perhaps stands still in its middle, while this one works."""
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
        """Let this call stand still. Whether one does."""
        saver = _process.saver()
        if call is None:
            return lambda: False
        before = saver.counts().get(call, 0)
        saver.delay(call, HOLD_SECONDS)
        return lambda: saver.counts().get(call, 0) > before

    def _work(
        self, work: list[tuple[Any, ...]], operation: str, tags: list[str], free: dict[int, int], *, anywhere: bool
    ) -> None:
        """What does not wait for an operation on ``tags``. ``anywhere``: it has begun, or is over."""
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

    def _pick(self, several: list[Any], which: int) -> Any:
        return several[which % len(several)] if several else None

    def _selected(self, tags: list[str]) -> list[Memory]:
        return [memory for memory in self.memories if not tags or memory.tag in tags]

    def _needed(self, tags: list[str]) -> dict[int, int]:
        """What a resume takes of each device."""
        return {
            device: sum(memory.released_bytes for memory in self._selected(tags) if memory.device == device)
            for device in DEVICES
        }

    def _free_bytes(self) -> dict[int, int]:
        """What each device has free."""
        return {device.index: device.total_bytes - device.used_bytes for device in ms.read_devices()}

    @contextmanager
    def _failing(self, faults: list[Fault]) -> Iterator[None]:
        """A step that may fail where it meets one of these."""
        self.faults.plan(faults)
        try:
            yield
        except ms.MemsaverError:
            if not self.faults.met():
                raise
        finally:
            self.orphans = self.orphans or self.faults.met()
            self.faults.end()

    def _allocate(self, kind: Kind, pages: int, content: str, free: int) -> bool:
        """Whether it was to be had. ``free``: so much was free at least."""
        tag, policy, device = kind
        try:
            with ms.region(tag, restore=policy, device=device):
                tensor = torch.empty(pages * PAGE, dtype=torch.uint8)
        except ms.OutOfDeviceMemoryError as error:
            assert error.device == device
            if pages * PAGE > free or self.faults.met():
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
        """Write to what is resident of these pages."""
        writable = memory.here & ~memory.in_half_blocks() if A_HALF_BLOCK_COMES_BACK_WHOLE else memory.here
        at = np.flatnonzero(writable[first : first + pages]) + first
        if content == "nothing" or len(at) == 0:
            return
        memory.expected[at] = 0
        if content == "random":
            memory.expected[at] = _pages(np.frombuffer(self.random.bytes(len(at) * PAGE), np.uint8))
        memory.sure[at] = True
        memory.or_zeros[at] = False
        memory.content()[at] = memory.expected[at]

    def _free(self, memory: Memory) -> None:
        self.memories.remove(memory)
        self.freed.append(memory.address)
        del memory.tensor

    def _refuse_to_free(self, address: int) -> None:
        try:
            _process.saver().free(address)
        except ms.ConfigurationError:
            return
        raise AssertionError(f"{address:#x} is not allocated, and was freed")

    @contextmanager
    def _releasing(self, tags: list[str], overrides: dict[str, str]) -> Iterator[None]:
        """A release: what it leaves resident is as it was, and what goes is owed what its policy says."""
        backed_up = self._pool_bytes()
        before = self._selected(tags)
        room = sum(m.bytes - m.released_bytes for m in before if overrides.get(m.tag, m.policy) == "host")
        error: ms.MemsaverError | None = None
        try:
            yield
        except ms.MemsaverError as raised:
            error = raised
        here = mapped_pages()
        kept_here = lost = left = 0
        for memory in self._selected(tags):
            policy = overrides.get(memory.tag, memory.policy)
            now = here(memory)
            gone_now = memory.here & ~now
            gone = gone_now.copy()
            left += int(np.count_nonzero(gone))
            if memory in before:
                assert error is not None or not (memory.here & now).any(), f"released memory is resident: {memory}"
                kept_here += int(np.count_nonzero(memory.here & now)) if policy in ("host", "file") else 0
                lost += int(np.count_nonzero(gone)) if policy in ("discard", "zero") else 0
            if memory.tag in overrides:
                (memory.give_up if error is None else memory.may_give_up)(policy)
            if A_HALF_BLOCK_COMES_BACK_WHOLE and policy == "zero":
                half = memory.in_half_blocks()
                memory.owe("discard", gone & half)
                gone &= ~half
            memory.owe(policy, gone)
            memory.here[gone_now] = False
        if error is None:
            self._note_success()
            return
        assert not (kept_here and lost), "content was given up before all that is to be kept was"
        if isinstance(error, ms.OutOfHostMemoryError) and not self.faults.met():
            assert backed_up + room > BACKUP_LIMIT, "the backup would have fitted"
            assert not left, "something was unmapped before all of the backup had its memory"
            return
        raise error

    @contextmanager
    def _resuming(self, tags: list[str], free: dict[int, int], work: Sequence[tuple[Any, ...]] = ()) -> Iterator[None]:
        """A resume: all or nothing. ``work``: what takes memory meanwhile."""
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
        except ms.MemsaverError as error:
            self._may_have_noted_damage(tags)
            if A_READING_UNDOES_NO_RESUME and isinstance(error, ms.DriverError) and error.call == "memory_info":
                here = mapped_pages()
                selected = self._selected(tags)
                if selected and all(here(memory).all() for memory in selected):
                    for memory in selected:
                        memory.be_resident()
            raise
        else:
            self._note_success()
            for memory in self._selected(tags):
                assert not memory.damaged.any(), f"a damaged backup was restored: {memory}"
                memory.be_resident()

    def _may_have_noted_damage(self, tags: list[str]) -> None:
        """It works on several devices at once, and tells of one."""
        for memory in self._selected(tags):
            memory.perhaps_told |= memory.damaged | memory.perhaps_damaged
            if self.faults.met():
                memory.perhaps_told |= ~memory.here

    def _note_success(self) -> None:
        """An operation began with what had been refused earlier, and ended well."""
        if not self.faults.met():
            self.orphans = False

    def _pool_bytes(self) -> int:
        return int(_process.saver().status()["pool_used_bytes"])

    def _compare(self, tag: ms.TagStatus) -> None:
        memories = [memory for memory in self.memories if memory.tag == tag.tag]
        expected = (sum(memory.bytes for memory in memories), sum(memory.released_bytes for memory in memories))
        assert (tag.bytes, tag.released_bytes) == expected, tag

    @invariant()
    def the_saver_agrees(self) -> None:
        assert _process.saver().audit({0: self.tenant.bytes}) == []
        status = ms.status()
        for tag in status.tags:
            self._compare(tag)
        here = mapped_pages()
        for memory in self.memories:
            assert memory.tensor.data_ptr() == memory.address
            now = here(memory)
            wrong = memory.here & ~now if self.orphans else memory.here != now
            assert not wrong.any(), f"pages {np.flatnonzero(wrong).tolist()} are resident, or not, against it: {memory}"
            memory.look()

    # The end, of a program that failed too: the next one finds the saver as if it were the first.

    def teardown(self) -> None:
        failure = sys.exc_info()[1]
        if not isinstance(failure, Exception):
            failure = None  # what Hypothesis ends a program with is not an Exception
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
        """What is reported in the end is a shorter program, where there is one that fails each time."""
        print("A program failed (it can be replayed):", written(self.program), sep="\n", file=sys.stderr)
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
        assert [device.used_bytes for device in ms.read_devices()] == [0 for _ in DEVICES]


def written(program: Program) -> str:
    """A program as text, a step in each line."""
    return "".join(f"{each},\n" for each in program)


def read(text: str) -> Program:
    """A program from text, as it is told where one failed."""
    program: Program = ast.literal_eval(f"[{text}]")
    return program


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
def two_devices() -> Iterator[None]:
    """The saver of this process, on two devices, the first of which it shares with a tenant."""
    torch.set_num_threads(1)
    devices = [f"machine-{uuid.uuid4().hex[:12]}" for _ in DEVICES]
    _process.configure(
        driver="host",
        host_device=",".join(devices),
        host_capacity=CAPACITY,
        host_backup_limit=BACKUP_LIMIT,
        file_dir="/dev/shm",
        verify="full",
        fault_injection=True,
    )
    for tag in TAGS:  # from here on they are known, and so are the devices
        for device in DEVICES:
            with ms.region(tag, device=device):
                torch.empty(PAGE, dtype=torch.uint8)
    Machine.faults = Faults()
    Machine.tenant = Tenant(devices[0])
    try:
        yield
    finally:
        Machine.tenant.end()
