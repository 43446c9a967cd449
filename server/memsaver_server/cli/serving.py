"""What ``memsaver serve`` and ``memsaver fleet serve`` have in common: where they listen, how they begin and end."""

from __future__ import annotations

import atexit
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from memsaver_server.address import DEFAULT_PORT
from memsaver_server.cli.connection import print_error
from memsaver_server.cli.options import ExitCode, Options
from memsaver_server.log_output import LogStream, hold_standard_files
from memsaver_server.missing_package import missing_package

if TYPE_CHECKING:
    from memsaver_server.settings import Settings


class Listening(Options):
    """Where a server listens: arguments of ``attach`` and ``serve_app``."""

    host: str = typer.Option("127.0.0.1", help="Address to serve on; any other than loopback needs MEMSAVER_API_KEY.")
    port: int = typer.Option(DEFAULT_PORT, help="Port to serve on; 0 chooses a free one.", min=0, max=65535)
    uds: Path | None = typer.Option(None, help="Serve on this Unix socket (mode 0600) instead.", show_default=False)
    ssl_keyfile: Path | None = typer.Option(
        None, help="Private key for HTTPS, if --ssl-certfile lacks it.", show_default=False
    )
    ssl_certfile: Path | None = typer.Option(None, help="Serve HTTPS with this certificate (PEM).", show_default=False)


#: Time at the end for writing what waits for stderr, seconds.
END_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Ended(BaseException):
    """SIGTERM or SIGINT was received."""


@contextmanager
def starting(extra: str) -> Iterator[None]:
    """Begin to serve. Errors inside end the command with a sentence, signals with exit code 0. ``extra`` names the
    extras of the package without which an import fails."""
    hold_standard_files()
    # Possibly nobody reads stderr, and a full pipe would block the thread that writes next.
    sys.stderr = stream = LogStream("stderr", 2)
    atexit.register(stream.wait_written, END_S)
    _end_on_signals()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # shells give 1,024; each caller and engine takes some
    try:
        yield
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        reason = missing_package(error, extra) if isinstance(error, ImportError) else str(error)
        print_error(f"cannot start: {reason}")
        raise typer.Exit(ExitCode.FAILED) from error
    except Ended:
        raise typer.Exit from None


@contextmanager
def until_ended() -> Iterator[None]:
    """Serve until SIGTERM or SIGINT is received. The block announces that requests are answered."""
    try:
        _notify("READY=1")
        yield
        # Wait for a signal, also for one whose handler raised in ``__del__``, where Python drops errors.
        while os.read(_received, 1)[0] not in _SIGNALS:
            pass
        raise Ended
    except Ended:
        _notify("STOPPING=1")


def _notify(state: str) -> None:
    """Send systemd ``state``, for example ``READY=1``, if this is a unit of ``Type=notify``: NOTIFY_SOCKET is set then.
    The protocol is that of sd_notify(3). What cannot be sent is dropped: serving does not depend on it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith(("/", "@")):
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(state.encode(), f"\0{address[1:]}" if address[0] == "@" else address)


def end_at_once(*, failed: bool) -> None:
    """End the process with exit code 0 if the interpreter's own end could hang; nothing else may be left to do.
    That end takes torch and CUDA down. In a hibernated process CUDA waits for a wake-up, for which the device may lack
    memory. NCCL may wait for its own memory that is suspended or, if ranks of the engine ``failed``, for those."""
    from memsaver_core import communicators, hibernation

    if failed or hibernation.is_hibernated() or not communicators.usable():
        sys.stdout.flush()
        if isinstance(sys.stderr, LogStream):
            sys.stderr.wait_written(END_S)
        os._exit(0)


def settings_of(**given: Any) -> Settings:
    """Return the settings of the service, taken from ``given`` or the environment; check the core's, too. Raises
    ConfigurationError if one cannot be used."""
    from memsaver_core.settings import CoreSettings
    from memsaver_server.settings import Settings, warn_of_misspelt_variables

    warn_of_misspelt_variables()
    CoreSettings()
    return Settings(**{name: value for name, value in given.items() if value})


#: The pipe into which the interpreter writes the number of each signal.
_received = -1


def _end_on_signals() -> None:
    """Have SIGTERM and SIGINT raise Ended in the main thread. A second signal ends the process at once."""
    global _received

    def end(_number: int, _frame: FrameType | None) -> None:
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_DFL)
        raise Ended

    _received, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written)
    for one in _SIGNALS:
        signal.signal(one, end)
