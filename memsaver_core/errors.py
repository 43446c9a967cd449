"""The errors that memsaver raises.

Each message says what happened, to what, and what to do. None of these errors leaves an allocation half done: each one
is either mapped with its content or released with what its policy owes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

#: Seconds after which a caller may retry what failed for lack of memory, or because another operation was running.
RETRY_AFTER_S = 1


@dataclass(eq=False, repr=False)
class MemsaverError(RuntimeError):
    """Base of every error that memsaver raises. The fields after ``message`` are figures and names beside it."""

    kind: ClassVar[str] = "error"  # one word for programs and metrics
    status: ClassVar[int] = 500  # HTTP status of an answer that reports it
    retry_after_s: ClassVar[int | None] = None  # seconds after which a retry may succeed; None if waiting does not help

    message: dataclasses.InitVar[str]

    def __post_init__(self, message: str) -> None:
        super().__init__(message)

    def details(self) -> dict[str, Any]:
        """Return the figures and names that a program may want beside the message."""
        return {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.name != "device"}


class ConfigurationError(MemsaverError, ValueError):
    """A setting or argument is invalid: the message names it and what it accepts."""

    kind = "bad_request"
    status = 400


class UnknownTagError(MemsaverError, LookupError):
    """No region has used the tags ``unknown``; the tags that exist are ``known``."""

    kind = "unknown_tag"
    status = 400

    def __init__(self, unknown: list[str], known: list[str]) -> None:
        self.unknown = unknown
        self.known = known
        super().__init__(
            f"unknown tag{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}; "
            f"the tags that exist are {', '.join(map(repr, known)) or 'none'}"
        )

    def details(self) -> dict[str, Any]:
        return {"unknown": self.unknown, "known": self.known}


@dataclass(eq=False, repr=False)
class OutOfDeviceMemoryError(MemsaverError):
    """The device has too little free memory. What was released stays released, and the call can be repeated."""

    kind = "out_of_device_memory"
    status = 503
    retry_after_s = RETRY_AFTER_S

    needed_bytes: int = 0  # that the call needs on the device
    free_bytes: int = 0  # that the device had free
    device: int = -1  # its index


@dataclass(eq=False, repr=False)
class OutOfHostMemoryError(MemsaverError):
    """Host memory (or disk space) for a backup is short. Nothing was unmapped."""

    kind = "out_of_host_memory"
    status = 507

    needed_bytes: int = 0  # that the backup needs
    free_bytes: int = 0  # that may still be used


@dataclass(eq=False, repr=False)
class DriverError(MemsaverError):
    """A driver call failed."""

    kind = "driver_error"

    call: str = ""  # the driver's name of the call, e.g. ``cuMemMap``
    code: str = ""  # the driver's name of the error, e.g. ``CUDA_ERROR_INVALID_VALUE``
    tag: str = ""  # the tag being processed
    bytes: int = 0  # size of the range being processed


class ContextLostError(DriverError):
    """The device context is lost (an illegal address, a hardware error). No call can succeed in this process."""

    kind = "context_lost"


@dataclass(eq=False, repr=False)
class BackupError(MemsaverError):
    """A backup cannot be restored: a file is missing or damaged, or content differs from its digest."""

    kind = "backup_error"

    tag: str = ""  # the tag whose content is concerned
    address: int = 0  # first address of the range
    bytes: int = 0  # size of the range


class UnsupportedError(MemsaverError):
    """This process cannot do what was asked for; the message says why. Nothing was changed."""

    kind = "unsupported"
    status = 409


class ForkedProcessError(MemsaverError):
    """The saver was used in a process forked after it had been initialized. Start such processes with ``spawn``."""
