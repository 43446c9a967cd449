"""The engine port: what the service needs from an engine, and all that it knows of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, cast, runtime_checkable

import memsaver_core
from memsaver_core import PhaseLog
from memsaver_core.reports import DeviceMemory, OperationReport, Status

#: What a drain does to requests in flight. ``wait``: let them end. ``abort``: end them now, each with what it has so
#: far. ``keep``: freeze each where it is, to go on when admission opens.
DrainMode = Literal["wait", "abort", "keep"]


class DrainTimeoutError(Exception):
    """Requests in flight did not end in time. The engine goes on as before.

    Attributes:
        pending: names of the requests that held the drain up.
    """

    def __init__(self, seconds: float, pending: Sequence[str]) -> None:
        self.seconds = seconds
        self.pending = tuple(pending)
        super().__init__(
            f"{len(self.pending)} request(s) still ran after {seconds:g} s: {', '.join(self.pending)}; "
            "nothing was released. Repeat with a longer timeout_s, or abort them"
        )


class AdmissionClosedError(Exception):
    """The engine takes no requests now; the message says why."""


class Memory(Protocol):
    """What holds the engine's memory. Each member promises what the function of that name in ``memsaver_core`` does.

    ``memsaver_core`` itself is one: the memory of this process. An engine whose memory is in other processes brings one
    that reaches them, as its attribute ``memory``: to the service they are one, and all of them or none are released.
    """

    def enabled(self) -> bool: ...

    def check_tags(self, tags: Sequence[str] | None) -> list[str]: ...

    def release(
        self,
        tags: Sequence[str] | None = None,
        *,
        restore: Mapping[str, str] | None = None,
        trim: bool | None = None,
        hibernate: bool = False,
        log: PhaseLog | None = None,
    ) -> OperationReport: ...

    def resume(self, tags: Sequence[str] | None = None, *, log: PhaseLog | None = None) -> OperationReport: ...

    def status(self) -> Status: ...

    def read_devices(self) -> tuple[DeviceMemory, ...]: ...

    def hibernation_obstacles(self) -> list[str]: ...

    def prepare_backup(self) -> None: ...


#: The memory of this process.
LOCAL_MEMORY = cast(Memory, memsaver_core)


def memory_of(engine: object) -> Memory:
    """What holds the memory of ``engine``."""
    return cast(Memory, getattr(engine, "memory", LOCAL_MEMORY))


@runtime_checkable
class Engine(Protocol):
    """An engine that the service can quiesce. Called from the thread of the operation; each call may block unless it
    says otherwise, and each may be called from another thread than the last.

    Admission is closed and the engine drained before any memory goes; admission opens only when all that the engine
    needs is back.
    """

    name: str

    def is_alive(self) -> bool:
        """Whether the engine can still serve (its scheduler runs, its device context works). Answers at once."""

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        """Take no new request into work from now on. Idempotent: the last call's ``reason`` and ``hold`` count.

        Up to ``hold`` new requests wait until admission opens (they are not in flight meanwhile); the others are
        refused with AdmissionClosedError(reason). Requests that wait already go on waiting. Answers at once.
        """

    def open_admission(self) -> None:
        """Take requests again: frozen ones go on, held ones and new ones enter. Idempotent. Answers at once."""

    def drain(self, timeout_s: float, mode: DrainMode = "wait") -> None:
        """Wait until no request is in flight, in the way that ``mode`` says. Held and frozen requests do not count.

        After DrainTimeoutError nothing is frozen that was not before.

        Raises:
            DrainTimeoutError: some still were after ``timeout_s`` seconds.
        """

    def flush_cache(self) -> None:
        """Forget every cached prefix. Touches no device memory: it is called while that may be released."""

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """Make the engine whole after ``tags`` were resumed, of which ``lost`` came back without their content.

        Cached prefixes in a lost ``kv_cache`` are forgotten; requests frozen over it are computed again from their
        tokens. Called before admission opens; called again with the same tags if it raised.
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
            ValueError: the request cannot be served, and why.
        """


@runtime_checkable
class UpdatableEngine(Engine, Protocol):
    """An engine whose weights can be overwritten in place. Neither call overlaps a release or a resume."""

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
