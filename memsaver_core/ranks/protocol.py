"""Messages between the service and the ranks of an engine. The engine's own channel (``collective_rpc`` of vLLM, a
broadcast of SGLang) carries what ``REQUESTS.encode`` and ``ANSWERS.encode`` return: data for JSON, with a version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Generic, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from memsaver_core.contract import errors
from memsaver_core.contract.errors import ConfigurationError, MemsaverError
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import MemoryRequest, Verb
from memsaver_core.contract.status import CommunicatorStatus, DeviceMemory, Status
from memsaver_core.manifests import WeightsKey

#: Raised with every change of a message; the service and all ranks must have the same.
VERSION = 10

#: A message as plain data.
Plain = dict[str, Any]

_Message = TypeVar("_Message")


@dataclass(frozen=True)
class Request:
    """A message of the service to a rank: one of the classes below."""


@dataclass(frozen=True)
class Introduce(Request):
    """Ask for an ``Introduction``."""


@dataclass(frozen=True)
class Prepare(Request):
    """Check whether an operation is possible, and what it would do: ask for a ``Plan``. Changes nothing. ``exact``
    leaves out what torch holds free, even if there is room to back it up; to find it takes time."""

    operation: Verb
    memory: MemoryRequest
    exact: bool = False


@dataclass(frozen=True)
class Move(Request):
    """Release or resume now, with what the engine does at a wake-up; does not hibernate, whatever ``memory`` says."""

    operation: Verb
    memory: MemoryRequest


@dataclass(frozen=True)
class Reserve(Request):
    """Take in advance what an operation needs: a resume's device memory, the disk space of a release's backups."""

    operation: Verb
    memory: MemoryRequest


@dataclass(frozen=True)
class GiveBackReserved(Request):
    """Give back what ``Reserve`` took and no operation has used."""


@dataclass(frozen=True)
class MoveCommunicators(Request):
    """Suspend (in a release) or resume the communicators ``names``, together with all other ranks, each of which has
    said in its plan that it can. Reported as the tag ``communicators``. ``begin`` starts it and returns at once: NCCL
    works while tags are moved. The same message without it waits for the end."""

    operation: Verb
    names: tuple[str, ...]
    timeout_s: float
    begin: bool = False


@dataclass(frozen=True)
class HibernationStep(Request):
    """One step of a hibernation or of its end: the ranks take each step together. Reported as a phase of that name.
    ``lock`` blocks device calls, ``checkpoint`` gives the context back; ``restore`` brings it back, ``unlock`` lets
    device calls go on. A rank that is past a step already does nothing."""

    step: Literal["lock", "checkpoint", "restore", "unlock"]


@dataclass(frozen=True)
class ExpectRelease(Request):
    """Release ``memory`` when the engine next puts this rank to sleep, in place of what the engine asks for."""

    memory: MemoryRequest


@dataclass(frozen=True)
class TakeOutcome(Request):
    """Ask, once, what became of the expected release. No report: the rank was not put to sleep."""


@dataclass(frozen=True)
class SleepNow(Request):
    """Put this rank to sleep at ``level`` and release ``memory``, for an engine that counts it as asleep already."""

    memory: MemoryRequest
    level: int


@dataclass(frozen=True)
class Resize(Request):
    """Back only the first ``pages`` pages of the KV cache with memory; no other is in use."""

    pages: int


@dataclass(frozen=True)
class WriteAsleep(Request):
    """Take one step of an update of ``tag``, whose memory is released: all ranks take each before any takes the next.
    ``memsaver_core.updates`` describes them; ``drop`` may come after each. ``processes`` are the ranks of this host.
    ``source`` has model and revision of what the update loads, if engines may share it. Answered by ``taken``."""

    step: Literal["find", "lend", "fill", "keep", "commit", "drop"]
    tag: str
    processes: int = 1
    source: WeightsKey | None = None


@dataclass(frozen=True)
class ProgressLocation:
    """Where a rank's progress record is: a file descriptor of a process, and the mark by which it is recognized."""

    pid: int
    fd: int
    mark: int


@dataclass(frozen=True)
class Introduction:
    """A rank, the devices that it uses, and what prevents its hibernation; empty if memsaver is not in use there."""

    devices: tuple[DeviceMemory, ...] = ()
    obstacles: tuple[str, ...] = ()
    pid: int | None = None
    progress: ProgressLocation | None = None


@dataclass(frozen=True)
class Plan:
    """What an operation would do on one rank: the pinned memory for its backups, what NCCL holds and whether that can
    be suspended, and what prevents a hibernation that was asked for."""

    host_bytes_needed: int = 0
    communicators: tuple[CommunicatorStatus, ...] = ()
    obstacles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Failure:
    """An error of a rank: its class in ``memsaver_core.contract.errors``, the fields of that class, and the phase that
    failed, empty outside of an operation."""

    error: str
    message: str
    attributes: Mapping[str, str | bool | int | float | Sequence[str | int]] = field(default_factory=dict)
    phase: str = ""

    @classmethod
    def of(cls, error: BaseException, phase: str = "") -> Failure:
        """Describe ``error``. One that is not memsaver's becomes a ``MemsaverError`` that names its class."""
        if not isinstance(error, MemsaverError):
            return cls("MemsaverError", f"{type(error).__name__}: {error}", {}, phase)
        attributes = {each.name: getattr(error, each.name) for each in fields(error)}
        return cls(type(error).__name__, str(error), attributes, phase)

    def to_error(self, before: str = "", after: str = "") -> MemsaverError:
        """Return the error, of its class if the contract has it, with its message between ``before`` and ``after``."""
        kind = getattr(errors, self.error, MemsaverError)
        message = before + self.message + after
        is_known = isinstance(kind, type) and issubclass(kind, MemsaverError)
        if is_known and set(self.attributes) == {each.name for each in fields(kind)}:
            error: MemsaverError = kind.__new__(kind, message)  # a constructor may word the message itself
            vars(error).update(self.attributes)
            return error
        return MemsaverError(message)


@dataclass(frozen=True)
class Answer:
    """What one rank answers to any request: its status (None: memsaver is not in use there), and what was asked for, or
    the error."""

    status: Status | None
    introduction: Introduction | None = None
    plan: Plan | None = None
    report: OperationReport | None = None
    failure: Failure | None = None
    taken: str = ""


class Codec(Generic[_Message]):
    """Messages of some types to plain data and back."""

    def __init__(self, *types: type[_Message]) -> None:
        self._adapters = {each.__name__: TypeAdapter(each) for each in types}

    def encode(self, message: _Message) -> Plain:
        name = type(message).__name__
        return {"version": VERSION, "type": name, "fields": self._adapters[name].dump_python(message, mode="json")}

    def decode(self, data: Plain) -> _Message:
        """Return the message in ``data``; raise ConfigurationError if it is of another version, or no such message."""
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise ConfigurationError(
                f"got a message of rank protocol {version}, but this process has {VERSION}; install the same version "
                "of memsaver for the service and for every process of the engine"
            )
        try:
            return self._adapters[data["type"]].validate_python(data["fields"])
        except (KeyError, ValidationError) as error:
            raise ConfigurationError(f"a message of rank protocol {VERSION} is invalid: {error}") from None


REQUESTS: Codec[Request] = Codec(*Request.__subclasses__())
ANSWERS: Codec[Answer] = Codec(Answer)
