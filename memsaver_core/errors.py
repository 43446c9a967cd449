"""What can go wrong, as types that a caller can tell apart.

Every message says what happened, to what, and what to do. None of these errors leaves an allocation in between:
each is either mapped with its content or released with what its policy owes.
"""

from __future__ import annotations


class MemsaverError(RuntimeError):
    """Base of every error that memsaver raises."""


class ConfigurationError(MemsaverError, ValueError):
    """A setting or argument cannot be used: the message names it and what it accepts."""


class UnknownTagError(MemsaverError, LookupError):
    """A tag was named that no region has used.

    Attributes:
        unknown: the tags that were asked for and do not exist.
        known: the tags that exist.
    """

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

    def __init__(self, message: str, needed_bytes: int = 0, free_bytes: int = 0) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        super().__init__(message)


class DriverError(MemsaverError):
    """A driver call failed.

    Attributes:
        call: the driver's name of the call, e.g. ``cuMemMap``.
        code: the driver's name of the error, e.g. ``CUDA_ERROR_INVALID_VALUE``.
        tag: the tag in work, or ``""``.
        bytes: the bytes in work, or 0.
    """

    def __init__(self, message: str, call: str = "", code: str = "", tag: str = "", bytes: int = 0) -> None:
        self.call = call
        self.code = code
        self.tag = tag
        self.bytes = bytes
        super().__init__(message)


class ContextLostError(DriverError):
    """The device context is lost (an illegal address, a hardware error). No call can succeed in this process."""


class BackupError(MemsaverError):
    """A backup cannot be restored: a file is missing or damaged, or content differs from its digest.

    Attributes:
        tag: the tag whose content is concerned.
        address: first address of the range.
        bytes: size of the range.
    """

    def __init__(self, message: str, tag: str = "", address: int = 0, bytes: int = 0) -> None:
        self.tag = tag
        self.address = address
        self.bytes = bytes
        super().__init__(message)


class UnsupportedError(MemsaverError):
    """What was asked for cannot be done in this process as it is; the message says why. Nothing was changed."""


class ForkedProcessError(MemsaverError):
    """The saver was used in a process forked after it had been initialized. Start such processes with ``spawn``."""
