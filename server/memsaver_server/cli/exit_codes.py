"""Exit codes of the command line, for scripts."""

from __future__ import annotations

from enum import IntEnum

from memsaver_server.client import ClientError, errors


class ExitCode(IntEnum):
    """The exit codes; 2 is also that of a wrong option or argument."""

    OK = 0
    FAILED = 1
    INVALID = 2
    UNREACHABLE = 3
    UNAUTHORIZED = 4
    CONFLICT = 5
    OUT_OF_MEMORY = 6
    DEADLINE = 7
    NOT_NOW = 8


_BY_ERROR: dict[type[ClientError], ExitCode] = {
    errors.UnreachableError: ExitCode.UNREACHABLE,
    errors.InvalidRequestError: ExitCode.INVALID,
    errors.UnauthorizedError: ExitCode.UNAUTHORIZED,
    errors.ConflictError: ExitCode.CONFLICT,
    errors.DeviceMemoryError: ExitCode.OUT_OF_MEMORY,  # before its base, UnavailableError
    errors.HostMemoryError: ExitCode.OUT_OF_MEMORY,
    errors.DrainDeadlineError: ExitCode.DEADLINE,
    errors.PhaseDeadlineError: ExitCode.DEADLINE,
    errors.UnavailableError: ExitCode.NOT_NOW,
}


def exit_code_for(error: ClientError) -> ExitCode:
    """Return the exit code of a command that ``error`` ends."""
    return next((code for kind, code in _BY_ERROR.items() if isinstance(error, kind)), ExitCode.FAILED)
