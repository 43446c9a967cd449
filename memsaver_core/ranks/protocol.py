"""Messages between the service and the ranks of an engine.

The engine's own channel (``collective_rpc`` of vLLM, a broadcast of SGLang) carries what the ``encode`` functions
return: JSON-able data with the version of this protocol.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, Union

from pydantic import Field, TypeAdapter, ValidationError

from memsaver_core import errors
from memsaver_core.errors import ConfigurationError, MemsaverError
from memsaver_core.options import ReleaseOptions, ResumeOptions
from memsaver_core.reports import DeviceMemory, OperationReport, Status

#: Raised with every change of a message; the service and all ranks must have the same.
VERSION = 1

#: A message as plain data.
Plain = dict[str, Any]

_Message = TypeVar("_Message")


@dataclass(frozen=True)
class Introduce:
    """Ask for an ``Introduction``."""

    kind: Literal["introduce"] = "introduce"


@dataclass(frozen=True)
class Release:
    """Release now. With ``options.hibernate`` the context goes last."""

    options: ReleaseOptions
    kind: Literal["release"] = "release"


@dataclass(frozen=True)
class Resume:
    """Resume now, and do what the engine does at a wake-up."""

    options: ResumeOptions
    kind: Literal["resume"] = "resume"


@dataclass(frozen=True)
class ExpectRelease:
    """Release ``options`` when the engine next puts this rank to sleep, in place of what the engine asks for."""

    options: ReleaseOptions
    kind: Literal["expect_release"] = "expect_release"


@dataclass(frozen=True)
class TakeOutcome:
    """Ask for the report of the expected release, which is then forgotten. No report: the rank was not put to sleep."""

    kind: Literal["take_outcome"] = "take_outcome"


@dataclass(frozen=True)
class SleepNow:
    """Put this rank to sleep at ``level`` and release ``options`` in it, for an engine that believes it is asleep."""

    options: ReleaseOptions
    level: int
    kind: Literal["sleep_now"] = "sleep_now"


Request = Union[Introduce, Release, Resume, ExpectRelease, TakeOutcome, SleepNow]  # noqa: UP007 (as an annotation)


@dataclass(frozen=True)
class ProgressLocation:
    """Where a rank's progress record is: a file descriptor of a process, and the mark by which it is recognized."""

    pid: int
    fd: int
    mark: int


@dataclass(frozen=True)
class Introduction:
    """A rank.

    Attributes:
        devices: readings of the devices that it uses.
        obstacles: what prevents its hibernation.
        pid: its process, or None if memsaver is not in use there.
        progress: its progress record, or None if memsaver is not in use there.
    """

    devices: tuple[DeviceMemory, ...] = ()
    obstacles: tuple[str, ...] = ()
    pid: int | None = None
    progress: ProgressLocation | None = None


@dataclass(frozen=True)
class Failure:
    """An error of a rank.

    Attributes:
        error: the name of its class in ``memsaver_core.errors``.
        message: its message.
        attributes: the attributes that its class documents.
        phase: the phase that failed, or an empty string outside an operation.
    """

    error: str
    message: str
    attributes: Mapping[str, str | bool | int | float | list[str | int]] = field(default_factory=dict)
    phase: str = ""

    @classmethod
    def of(cls, error: BaseException, phase: str = "") -> Failure:
        """Describe ``error``. One that is not memsaver's becomes a ``MemsaverError`` that names its class."""
        known = isinstance(error, MemsaverError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        plain = {
            name: value
            for name, value in vars(error).items()
            if not name.startswith("_") and isinstance(value, (str, int, float, list))
        }
        return cls(type(error).__name__ if known else "MemsaverError", message, plain, phase)

    def to_error(self, prefix: str = "") -> MemsaverError:
        """Return the error again, of the same class, its message after ``prefix``."""
        kind = getattr(errors, self.error, MemsaverError)
        if not (isinstance(kind, type) and issubclass(kind, MemsaverError)):
            kind = MemsaverError
        error: MemsaverError = kind.__new__(kind)
        RuntimeError.__init__(error, prefix + self.message)
        for name, value in self.attributes.items():
            setattr(error, name, value)
        return error


@dataclass(frozen=True)
class Answer:
    """What one rank answers to any request.

    Attributes:
        status: what it holds now, or None if memsaver is not in use there.
        introduction: to ``Introduce``.
        report: of the operation that the request asked for.
        failure: the error that ended the request.
    """

    status: Status | None
    introduction: Introduction | None = None
    report: OperationReport | None = None
    failure: Failure | None = None


_REQUEST: TypeAdapter[Request] = TypeAdapter(Annotated[Request, Field(discriminator="kind")])
_ANSWER: TypeAdapter[Answer] = TypeAdapter(Answer)


def encode_request(request: Request) -> Plain:
    """Return ``request`` as plain data."""
    return {"version": VERSION, "message": _REQUEST.dump_python(request, mode="json")}


def decode_request(message: Plain) -> Request:
    """Return the request that ``message`` holds.

    Raises:
        ConfigurationError: it is of another version, or no request.
    """
    return _decoded(_REQUEST, message)


def encode_answer(answer: Answer) -> Plain:
    """Return ``answer`` as plain data."""
    return {"version": VERSION, "message": _ANSWER.dump_python(answer, mode="json")}


def decode_answer(message: Plain) -> Answer:
    """Return the answer that ``message`` holds.

    Raises:
        ConfigurationError: it is of another version, or no answer.
    """
    return _decoded(_ANSWER, message)


def _decoded(adapter: TypeAdapter[_Message], message: Plain) -> _Message:
    version = message.get("version") if isinstance(message, dict) else None
    if version != VERSION:
        raise ConfigurationError(
            f"a message of rank protocol {version} arrived where {VERSION} is spoken; install the same version of "
            "memsaver for the service and for every process of the engine"
        )
    try:
        return adapter.validate_python(message["message"])
    except (KeyError, ValidationError) as error:
        raise ConfigurationError(f"a message of rank protocol {VERSION} cannot be read: {error}") from None
