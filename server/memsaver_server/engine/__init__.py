"""The interface between the service and an engine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, get_args, runtime_checkable

import memsaver_core as ms
from memsaver_core.contract.errors import AdmissionClosedError as AdmissionClosedError
from memsaver_core.contract.errors import DrainTimeoutError as DrainTimeoutError
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import CacheMode as CacheMode
from memsaver_core.contract.requests import DrainMode as DrainMode
from memsaver_core.contract.requests import MemoryRequest, Tagged
from memsaver_core.contract.status import DeviceMemory, Status
from memsaver_core.manifests import WeightsKey
from memsaver_core.phases import PhaseLog
from memsaver_core.ranks.plans import plan_release, reserve
from memsaver_core.updates import written_asleep
from memsaver_server import clock

#: How often a drain looks whether its caller has given it up, seconds.
DRAIN_POLL_S = 0.05


def never() -> bool:
    """The default ``given_up`` of a drain: its caller never gives it up."""
    return False


def waits(deadline: float, given_up: Callable[[], bool], now: Callable[[], float] = clock.monotonic) -> Iterator[float]:
    """Yield how long to wait next for something, seconds: 0, then up to ``DRAIN_POLL_S``. Ends at the ``deadline``, a
    time of the clock ``now``, or once ``given_up()`` is true."""
    yield 0.0
    while not given_up() and (left := deadline - now()) > 0:
        yield min(DRAIN_POLL_S, left)


def check_drain_mode(mode: str) -> None:
    if mode not in get_args(DrainMode):
        raise ValueError(f"unknown drain mode {mode!r}; choose one of {', '.join(get_args(DrainMode))}")


class Memory(Protocol):
    """The memory of an engine. Each member promises what the function of that name in ``memsaver_core`` does;
    ``release`` and ``resume`` are ``release_with`` and ``resume_with``.

    An engine whose memory is in other processes has an attribute ``memory`` that reaches them: the service treats them
    as one memory, of which all or none is released.
    """

    def enabled(self) -> bool: ...

    def check_tags(self, tags: Sequence[str] | None) -> list[str]: ...

    def release(self, request: MemoryRequest, *, log: PhaseLog | None = None) -> OperationReport: ...

    def resume(self, request: Tagged, *, log: PhaseLog | None = None) -> OperationReport: ...

    def check_release(self, request: MemoryRequest) -> object:
        """Raise the error with which ``release`` would certainly fail now. May hold what the release needs, until that
        or ``give_back_reserved`` is called."""

    def reserve(self, request: Tagged) -> None:
        """Take the device memory that ``resume`` needs, which then cannot run short, and hold it until ``resume`` or
        ``give_back_reserved``. A hibernated engine only checks that it is free.

        Raises:
            OutOfDeviceMemoryError: the device has too little free memory; nothing is held.
        """

    def give_back_reserved(self) -> None:
        """Give back what ``reserve`` or ``check_release`` took and no operation has used."""

    def status(self) -> Status: ...

    def read_devices(self) -> tuple[DeviceMemory, ...]: ...

    def hibernation_obstacles(self) -> list[str]: ...

    def prepare_backup(self) -> None: ...

    def written_asleep(self, tag: str, source: WeightsKey | None = None) -> AbstractContextManager[None]:
        """See ``memsaver_core.updates.written_asleep``."""


@runtime_checkable
class WatchedMemory(Memory, Protocol):
    """A memory in other processes; the death of one is an event. They may be those of several data-parallel engines;
    an operation may be of some of these."""

    def on_failure(self, call: Callable[[], None]) -> None:
        """Call ``call`` once ``status`` is ``failed``, at once if it is; from any thread."""

    def raise_if_failed(self) -> None:
        """Raise GroupFailedError if a process has ended or hangs."""

    def take_lost(self) -> set[str]:
        """Return the tags that are resident again after a failed release, but without their content. Each call returns
        only tags that no call before has returned."""

    def status_of(self, dp_ranks: Sequence[int]) -> Status:
        """Return what these data-parallel engines hold."""


class _LocalMemory:
    enabled = staticmethod(ms.enabled)
    check_tags = staticmethod(ms.check_tags)
    release = staticmethod(ms.release_with)
    resume = staticmethod(ms.resume_with)
    check_release = staticmethod(partial(plan_release, reserve_disk=True))
    reserve = staticmethod(reserve)
    give_back_reserved = staticmethod(ms.give_back_reserved)
    status = staticmethod(ms.status)
    read_devices = staticmethod(ms.read_devices)
    hibernation_obstacles = staticmethod(ms.hibernation_obstacles)
    prepare_backup = staticmethod(ms.prepare_backup)
    written_asleep = staticmethod(written_asleep)


#: The memory of this process.
LOCAL_MEMORY: Memory = _LocalMemory()


def memory_of(engine: object) -> Memory:
    """Return the memory of ``engine``; without an attribute ``memory`` it is that of this process."""
    return cast(Memory, getattr(engine, "memory", LOCAL_MEMORY))


def unwritten_weights(engine: object) -> Collection[str]:
    """Return the weights that no update has written since their content was discarded.

    An engine without an attribute ``unwritten_weights`` does not know; then one update counts as all.
    """
    return cast(Collection[str], getattr(engine, "unwritten_weights", ()))


@runtime_checkable
class Engine(Protocol):
    """An engine that the service can quiesce. Calls come from any thread, and may block unless they say otherwise. The
    service closes admission and drains the engine before it releases memory, and opens admission only when all memory
    is resident and repaired."""

    name: str

    def is_alive(self) -> bool:
        """Whether the engine can still serve (its scheduler runs, its device context works). Must not block."""

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        """Start no new request. Idempotent: the last call's ``reason`` and ``hold`` count. Must not block.

        Up to ``hold`` new requests wait until admission opens (they are not in flight meanwhile); the others are
        refused with AdmissionClosedError(reason). Requests that wait already continue to wait.
        """

    def open_admission(self) -> None:
        """Take requests again: frozen ones continue, held and new ones start. Idempotent. Must not block."""

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        """Wait until no request is in flight; held and frozen requests are not.

        Args:
            timeout_s: deadline, seconds.
            mode: what to do to requests in flight, see ``DrainMode``.
            given_up: ask it every ``DRAIN_POLL_S``: once it is true the release was cancelled, or is about to drain
                with a stronger mode, and this drain ends as after ``timeout_s``. A method without this parameter
                cannot ask; the release is then cancelled after its drain.

        Raises:
            DrainTimeoutError: some still were after ``timeout_s``. Nothing is frozen that was not before.
        """

    def flush_cache(self) -> None:
        """Forget every cached prefix. Touches no device memory: it is called while that may be released."""

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> Collection[str] | None:
        """Repair the engine after ``tags`` were resumed, of which ``lost`` came back without their content.

        Forget prefixes cached in a lost ``kv_cache``, and recompute requests frozen over it from their tokens. Called
        before admission opens; called again with the same tags if it raised.

        Returns:
            Those of ``lost`` that have their content again. Admission stays closed until the content of the others is
            written, if they are ``weights`` or a release discarded content that their regions would have kept.
        """


@runtime_checkable
class GeneratingEngine(Engine, Protocol):
    """An engine that also answers ``POST /generate``."""

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Serve one request: ``text`` or ``input_ids``, ``sampling_params{max_new_tokens, temperature}``.

        Returns:
            ``text``, ``output_ids`` and ``meta_info``.

        Raises:
            AdmissionClosedError: the engine takes no requests now.
            ValueError: the request is invalid, and why.
        """


@runtime_checkable
class VerifiableEngine(Engine, Protocol):
    """An engine whose weights can be verified by the tokens that it computes from them."""

    def verify_tokens(self) -> list[int]:
        """Return the tokens that greedy decoding appends to a fixed prompt; a handful is enough.

        Called before a release and after a resume, while all memory is resident, admission is closed and no request is
        in flight; frozen ones continue afterwards as if nothing had been. Each call does the same computation: from
        the prompt's first token, bypassing cached prefixes (or forgetting them), in the same batch shape. Does not open
        admission, and leaves nothing of the prompt in a cache that requests use. Blocks.

        Raises:
            Any error: the tokens could not be computed, and why.
        """


@runtime_checkable
class UpdatableEngine(Engine, Protocol):
    """An engine whose weights can be overwritten in place. Neither call overlaps a release or a resume. With an
    attribute ``updates_asleep`` that is true they are called, too, while the weights are released: their tensors are on
    host memory then."""

    def update_weights_from_disk(
        self, model_path: str, *, flush_cache: bool = True, abort_all_requests: bool = False
    ) -> int:
        """Overwrite the weights by those of a checkpoint folder of the same shape. Returns the tensors written.

        Raises:
            ValueError, OSError: the folder does not fit or cannot be read, and why; nothing was written.
        """

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
    ) -> int:
        """Overwrite the weights that the payload of each rank names. Returns the tensors written.

        Raises:
            ValueError: a payload cannot be read or does not fit, and why; nothing was written.
        """


@runtime_checkable
class DataParallelEngine(Engine, Protocol):
    """A server of data-parallel engines, of which some can be released while the others serve. Its ``memory`` is a
    ``WatchedMemory``, which says for each rank what engine it is of."""

    def check_dp_ranks(self, dp_ranks: Sequence[int]) -> None:
        """Raise UnsupportedError or BadRequestError if these engines do not exist, or cannot be released alone."""

    def exclude(self, dp_ranks: Collection[int]) -> None:
        """From now on give new requests to the other engines only, and have ``open_admission`` open only those. Called
        before each call that opens or closes admission. Must not block."""

    def drain(
        self,
        timeout_s: float,
        mode: DrainMode = "wait",
        given_up: Callable[[], bool] = never,
        dp_ranks: Collection[int] = (),
    ) -> None:
        """As ``Engine.drain``; of these engines alone, if any are given."""


@dataclass(frozen=True)
class CachePages:
    """The pages of a KV cache: what its allocator hands out, numbered from 0.

    Attributes:
        total: how many the largest cache has.
        kept: how many the cache has now: the first ``kept`` have memory.
        used: how many requests in flight use.
        needed: all that are in use are among the first ``needed``.
        page_bytes: device memory of a page, all layers together.
        page_tokens: tokens that a page holds.
        recomputed: prefixes computed again since the start, as the cache had no room to keep them.
        reused: how many hold prefixes that requests have found there in the last 20 to 40 seconds.
    """

    total: int
    kept: int
    used: int
    needed: int
    page_bytes: int
    page_tokens: int
    recomputed: int = 0
    reused: int = 0


@runtime_checkable
class ResizableEngine(Engine, Protocol):
    """An engine whose KV cache can be made smaller and larger while it serves. Calls do not overlap one another."""

    def kv_cache(self) -> CachePages:
        """Return what the KV cache has now. Must not block."""

    def limit_kv_cache(
        self, pages: int, timeout_s: float, mode: CacheMode = "wait", given_up: Callable[[], bool] = never
    ) -> None:
        """Hand out only the first ``pages`` pages, at most those that are kept, and wait until no other is in use.

        Args:
            timeout_s: deadline, seconds.
            mode: ``wait`` until requests end, or ``preempt`` them: they are computed again.
            given_up: ask it every ``DRAIN_POLL_S``: once it is true, the call ends as after ``timeout_s``.

        Raises:
            DrainTimeoutError: some were still in use after ``timeout_s``. The limit is as before.
        """

    def resize_kv_cache(self, pages: int) -> CachePages:
        """Back only the first ``pages`` pages with memory (``memsaver_core.resize``), and hand out these. No other is
        in use, and the memory of the cache is resident. A cached prefix on a page that goes is forgotten. Return what
        the cache has then.

        Raises:
            OutOfDeviceMemoryError: the device has too little free memory; the cache is as before.
        """
