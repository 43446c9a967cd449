"""Every error that memsaver raises, with its kind, its HTTP status and when a retry may help. Each message says what
happened, to what, and what to do. After any error each allocation has its content, or what its policy requires."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from typing_extensions import dataclass_transform

#: Seconds after which a caller may retry what failed for lack of memory, or because another operation was running.
RETRY_AFTER_S = 1


@dataclass_transform(eq_default=False, field_specifiers=(field,))
@dataclass(eq=False, repr=False)
class MemsaverError(RuntimeError):
    """Base of every error that memsaver raises, each a dataclass: fields after ``message`` are figures and names."""

    kind: ClassVar[str] = "error"  # one word for programs and metrics
    status: ClassVar[int] = 500  # HTTP status of an answer that reports it
    retry_after_s: ClassVar[int | None] = None  # seconds after which a retry may succeed; None if waiting does not help

    message: dataclasses.InitVar[str]

    def __init_subclass__(
        cls, kind: str | None = None, status: int | None = None, retry_after_s: int | None = None
    ) -> None:
        """What a class does not set, it inherits."""
        cls.kind, cls.status = kind or cls.kind, status or cls.status
        cls.retry_after_s = retry_after_s or cls.retry_after_s
        dataclass(eq=False, repr=False)(cls)

    def __post_init__(self, message: str) -> None:
        super().__init__(message)

    def details(self) -> dict[str, Any]:
        """Return the figures and names that a program may want beside the message."""
        public = [each for each in dataclasses.fields(self) if each.metadata.get("answered", True)]
        return {each.name: getattr(self, each.name) for each in public if getattr(self, each.name) is not None}


# -- of the core ----------------------------------------------------------------------------------------------------


class ConfigurationError(MemsaverError, ValueError, kind="bad_request", status=400):
    """A setting or argument is invalid: the message names it and what it accepts."""


class UnknownTagError(MemsaverError, LookupError, kind="unknown_tag", status=400):
    """No region has used the tags ``unknown``; the tags that exist are ``known``."""

    unknown: list[str]
    known: list[str]

    @classmethod
    def check(cls, tags: Sequence[str], known: Collection[str]) -> None:
        """Raise the error if one of ``tags`` is not ``known``."""
        if unknown := [tag for tag in tags if tag not in known]:
            names = sorted(set(known))
            raise cls(
                f"unknown tag{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}; "
                f"the tags that exist are {', '.join(map(repr, names)) or 'none'}",
                unknown,
                names,
            )


class OutOfDeviceMemoryError(MemsaverError, kind="out_of_device_memory", status=503, retry_after_s=RETRY_AFTER_S):
    """The device has too little free memory. What was released stays released, and the call can be repeated."""

    needed_bytes: int = 0  # that the call needs on the device
    free_bytes: int = 0  # that the device had free
    device: int = field(default=-1, metadata={"answered": False})  # its index, which answers do not show


class OutOfHostMemoryError(MemsaverError, kind="out_of_host_memory", status=507):
    """Host memory for a backup is short. Nothing was unmapped, or all is resident again."""

    needed_bytes: int = 0  # that the backup needs
    free_bytes: int = 0  # that may still be used


class DiskFullError(OutOfHostMemoryError, kind="disk_full"):
    """The file system for backups is too small. Nothing was unmapped, or all is resident again."""


class DriverError(MemsaverError, kind="driver_error"):
    """A driver call failed."""

    call: str = ""  # the driver's name of the call, e.g. ``cuMemMap``
    code: str = ""  # the driver's name of the error, e.g. ``CUDA_ERROR_INVALID_VALUE``
    tag: str = ""  # the tag being processed
    bytes: int = 0  # size of the range being processed


class ContextLostError(DriverError, kind="context_lost"):
    """The device context is lost (an illegal address, a hardware error). No call can succeed in this process."""


class BackupError(MemsaverError, kind="backup_error"):
    """A backup cannot be restored: a file is missing or damaged, or content differs from its digest."""

    tag: str = ""  # the tag whose content is concerned
    address: int = 0  # first address of the range
    bytes: int = 0  # size of the range


class UnsupportedError(MemsaverError, kind="unsupported", status=409):
    """This process cannot do what was asked for; the message says why. Nothing was changed."""


class ForkedProcessError(MemsaverError):
    """The saver was used in a process forked after it had been initialized. Start such processes with ``spawn``."""


class GroupFailedError(MemsaverError, kind="rank_failed"):
    """A rank has ended, hangs, or could not undo what it did. The ranks' states differ, or cannot be known."""


# -- of an engine ---------------------------------------------------------------------------------------------------


class AdmissionClosedError(MemsaverError, kind="admission_closed", status=503, retry_after_s=RETRY_AFTER_S):
    """The engine accepts no requests now; the message says why."""


class DrainTimeoutError(MemsaverError, kind="drain_timeout", status=504):
    """The requests ``pending``, by name, did not end in time. The engine continues as before."""

    seconds: float
    pending: Sequence[str]

    def __init__(self, seconds: float, pending: Sequence[str], outcome: str = "nothing was released") -> None:
        self.seconds = seconds
        self.pending = tuple(pending)
        super().__init__(
            f"{len(self.pending)} request(s) still ran after {seconds:g} s: {', '.join(self.pending)}; "
            f"{outcome}. Repeat with a longer timeout_s, or abort them"
        )

    def details(self) -> dict[str, Any]:
        return {"phase": "drain", "pending": list(self.pending)}


class EngineFailedError(MemsaverError, kind="context_lost"):
    """The device context or a rank is lost: no operation can succeed any more."""


class NotResidentError(MemsaverError, kind="not_resident", status=409):
    """The call needs memory that is released. Nothing was done."""

    @classmethod
    def of(cls, tag: str) -> NotResidentError:
        return cls(f"the memory of {tag!r} is released; resume it first")


class WrongWeightsError(MemsaverError, kind="wrong_weights_version", status=409):
    """The weights are not of the version that a resume demands. Nothing was resumed."""


class PauseEndedError(MemsaverError, kind="pause_ended", status=409):
    """Generation was continued while a pause still waited for requests in flight. Generation goes on."""


class MemoryBusyError(MemsaverError, kind="memory_busy", status=504):
    """An operation or a weight update holds the memory in ``phase`` and did not end in time. Nothing was done."""

    phase: str = ""


class NotEnoughToReleaseError(MemsaverError, kind="not_enough_to_release", status=400):
    """``at_least_bytes`` is more than the requested tags hold. Nothing was released."""

    held_bytes: int = 0


class VerificationError(MemsaverError, kind="verification_failed"):
    """The tokens ``got`` after a resume are not those ``expected``. Memory is resident, admission closed."""

    expected: list[int]
    got: list[int]
    phase: str = "verify"


class VerificationUnavailableError(MemsaverError, kind="verification_unavailable", status=400):
    """There is nothing to verify against, or the engine cannot be verified. Nothing was started."""


# -- of operations --------------------------------------------------------------------------------------------------


#: The advice of a conflict to a caller that did not wait. A coordinator removes it from its engines' messages.
OR_WAIT = ', or send "wait": true'


class ConflictError(MemsaverError, kind="conflict", status=409, retry_after_s=RETRY_AFTER_S):
    """Another operation would undo the one that is requested, or is prepared and has to end first."""

    operation: str | None = None  # the other one: release or resume
    operation_id: str | None = None
    client: str | None = None  # if it is prepared: who prepared it
    lease_s: float | None = None  # if it is prepared: how long it stays so without its commit


class TooManyOperationsError(MemsaverError, kind="too_many_operations", status=503, retry_after_s=RETRY_AFTER_S):
    """The queue of operations is full."""


class TooLateToCancelError(MemsaverError, kind="too_late", status=409):
    """The operation has ended, or is unmapping or mapping memory, which is not interrupted."""

    operation_id: str | None = None


class LeaseEndedError(MemsaverError, kind="lease_ended", status=409):
    """An operation cannot be committed: it is not prepared any more, or not yet. Nothing was moved."""

    operation_id: str = ""
    cancelled_by: str | None = None


class IdempotencyKeyError(MemsaverError, kind="idempotency_key_reused", status=422):
    """The id or Idempotency-Key of a request was used before, for another request."""


class OperationCancelledError(MemsaverError, kind="cancelled", status=409):
    """The operation was cancelled. Nothing was unmapped or mapped."""

    cancelled_by: str = ""


class PhaseTimeoutError(MemsaverError, kind="phase_timeout", status=504):
    """An operation has made no progress in ``phase`` for too long, or cannot be interrupted in it. It continues."""

    phase: str = ""
    operation_id: str = ""


class NoThreadError(MemsaverError, kind="no_thread", status=503, retry_after_s=RETRY_AFTER_S):
    """The system starts no thread. Nothing was done."""


# -- of requests over HTTP ------------------------------------------------------------------------------------------


class BadRequestError(MemsaverError, kind="bad_request", status=400):
    """The request is malformed; the message says how."""


class UnauthorizedError(MemsaverError, kind="unauthorized", status=401):
    """The key is missing or wrong; ``reason`` says which, in one word."""

    reason: str = ""


class ForbiddenError(MemsaverError, kind="forbidden", status=403):
    """The caller may not do this, or a browser sent the request for another site; ``reason`` says why, in one word."""

    reason: str = ""


class NotFoundError(MemsaverError, kind="not_found", status=404):
    """The path names something that does not exist."""


class BodyTooLargeError(MemsaverError, kind="body_too_large", status=413):
    """The request's body exceeds the limit."""


class ServerEndsError(MemsaverError, kind="server_ends", status=503):
    """The server shuts down before it can answer."""


# -- of a fleet -----------------------------------------------------------------------------------------------------


class FleetUnknownError(MemsaverError, kind="fleet_unknown", status=503, retry_after_s=RETRY_AFTER_S):
    """The members or the record cannot be read or written. Nothing was done."""


#: The statuses of failures of one engine that its coordinator finds; it names them by kind alone.
_OF_ENGINES = {
    "cannot_prepare": 409,
    "is_coordinator": 409,
    "changed": 409,
    "unreachable": 502,
    "silent": 502,
    "hung": 504,
}


def status_of(kind: str) -> int:
    """Return the HTTP status of an error of this kind; 500 if the kind is unknown."""
    classes = [each for each in globals().values() if isinstance(each, type) and issubclass(each, MemsaverError)]
    known = {each.kind: each.status for each in classes}
    return _OF_ENGINES.get(kind) or known.get(kind, 500)
