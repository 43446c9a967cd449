"""The errors that memsaver raises.

Each type carries what the service answers with: ``kind``, one word for programs and metrics; ``status``, the HTTP
status; ``details()``, figures and names beside the message; ``retry_after_s``. Each message says what happened, to
what, and what to do. None of these errors leaves an allocation half done: each one is either mapped with its content or
released with what its policy owes.
"""

from __future__ import annotations

from typing import Any, ClassVar

#: Seconds after which a caller may retry what failed for lack of memory, or because another operation was running.
RETRY_AFTER_S = 1


class MemsaverError(RuntimeError):
    """Base of every error that memsaver raises.

    Attributes:
        kind: the error in one word, for programs and metrics.
        status: HTTP status of an answer that reports it.
        retry_after_s: seconds after which a retry may succeed; None if waiting alone does not help.
    """

    kind: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retry_after_s: ClassVar[int | None] = None
    _detail_names: ClassVar[tuple[str, ...]] = ()

    def details(self) -> dict[str, Any]:
        """Return figures and names that a program may want beside the message."""
        return {name: getattr(self, name) for name in self._detail_names}


class ConfigurationError(MemsaverError, ValueError):
    """A setting or argument is invalid: the message names it and what it accepts."""

    kind = "bad_request"
    status = 400


class UnknownTagError(MemsaverError, LookupError):
    """No region has used this tag.

    Attributes:
        unknown: the tags that were asked for and do not exist.
        known: the tags that exist.
    """

    kind = "unknown_tag"
    status = 400
    _detail_names = ("unknown", "known")

    def __init__(self, unknown: list[str], known: list[str]) -> None:
        self.unknown = unknown
        self.known = known
        super().__init__(
            f"unknown tag{'s' if len(unknown) > 1 else ''} {', '.join(map(repr, unknown))}; "
            f"the tags that exist are {', '.join(map(repr, known)) or 'none'}"
        )


class OutOfDeviceMemoryError(MemsaverError):
    """The device has too little free memory. What was released stays released, and the call can be repeated.

    Attributes:
        needed_bytes: bytes that the call needs on the device.
        free_bytes: bytes that the device had free.
        device: index of the device.
    """

    kind = "out_of_device_memory"
    status = 503
    retry_after_s = RETRY_AFTER_S
    _detail_names = ("needed_bytes", "free_bytes")

    def __init__(self, message: str, needed_bytes: int = 0, free_bytes: int = 0, device: int = -1) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.device = device
        super().__init__(message)


class OutOfHostMemoryError(MemsaverError):
    """Host memory (or disk space) for a backup is short. Nothing was unmapped.

    Attributes:
        needed_bytes: bytes that the backup needs.
        free_bytes: bytes that may still be used.
    """

    kind = "out_of_host_memory"
    status = 507
    _detail_names = ("needed_bytes", "free_bytes")

    def __init__(self, message: str, needed_bytes: int = 0, free_bytes: int = 0) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        super().__init__(message)


class DriverError(MemsaverError):
    """A driver call failed.

    Attributes:
        call: the driver's name of the call, e.g. ``cuMemMap``.
        code: the driver's name of the error, e.g. ``CUDA_ERROR_INVALID_VALUE``.
        tag: the tag being processed, or ``""``.
        bytes: size of the range being processed, or 0.
    """

    kind = "driver_error"
    _detail_names = ("call", "code", "tag", "bytes")

    def __init__(self, message: str, call: str = "", code: str = "", tag: str = "", bytes: int = 0) -> None:
        self.call = call
        self.code = code
        self.tag = tag
        self.bytes = bytes
        super().__init__(message)


class ContextLostError(DriverError):
    """The device context is lost (an illegal address, a hardware error). No call can succeed in this process."""

    kind = "context_lost"


class BackupError(MemsaverError):
    """A backup cannot be restored: a file is missing or damaged, or content differs from its digest.

    Attributes:
        tag: the tag whose content is concerned.
        address: first address of the range.
        bytes: size of the range.
    """

    kind = "backup_error"
    _detail_names = ("tag", "address", "bytes")

    def __init__(self, message: str, tag: str = "", address: int = 0, bytes: int = 0) -> None:
        self.tag = tag
        self.address = address
        self.bytes = bytes
        super().__init__(message)


class UnsupportedError(MemsaverError):
    """This process cannot do what was asked for; the message says why. Nothing was changed."""

    kind = "unsupported"
    status = 409


class ForkedProcessError(MemsaverError):
    """The saver was used in a process forked after it had been initialized. Start such processes with ``spawn``."""
