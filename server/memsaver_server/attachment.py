"""Serves an engine from a thread of the engine's process."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import uvicorn
from fastapi import FastAPI

from memsaver_core import communicators
from memsaver_core.contract.errors import ConfigurationError, MemsaverError
from memsaver_server.address import place
from memsaver_server.app import create_app
from memsaver_server.engine import Engine, memory_of
from memsaver_server.engine.lifecycle import Lifecycle
from memsaver_server.http.auth import check_address
from memsaver_server.http.connection_limits import LimitedProtocol
from memsaver_server.port_holders import port_holders
from memsaver_server.settings import Settings, warn_of_misspelt_variables
from memsaver_server.threads import reserved_heap, start_thread

logger = logging.getLogger("memsaver")
_Path: TypeAlias = "str | os.PathLike[str]"

#: Connections that may wait in the kernel to be accepted.
BACKLOG = 2048
#: Connections that are accepted in one iteration of the event loop.
ACCEPTED_AT_ONCE = 8
#: Time for responses in progress when the server is closed, seconds.
GRACE_S = 5


class Attachment(AbstractContextManager["Attachment"]):
    """A running server.

    Attributes:
        address: ``(host, port)``, or the path of the Unix socket.
        url: ``http://host:port``, ``https://host:port`` or ``unix:///path``.
    """

    def __init__(self, server: _Server, bound: socket.socket, thread: threading.Thread) -> None:
        self._server = server
        self._controller = server.config.app.state.memsaver.controller  # type: ignore[union-attr]
        self._thread = thread
        name = bound.getsockname()
        self._path = name if isinstance(name, str) else None
        self._inode = os.stat(name).st_ino if isinstance(name, str) else 0
        self.address: tuple[str, int] | str = name if isinstance(name, str) else (name[0], name[1])
        scheme = "https" if server.config.is_ssl else "http"
        self.url = f"unix://{name}" if isinstance(name, str) else f"{scheme}://{place(name[0], name[1])}"

    def close(self) -> None:
        """Stop accepting connections, let responses in progress end for ``GRACE_S``, remove the socket. Idempotent.

        An operation in progress continues. The engine is left as it is.
        """
        if self._path is not None:
            with suppress(FileNotFoundError):
                # Another server may have replaced the file; while our socket is open its inode is not reused.
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)
            self._path = None
        self._controller.close()  # it ends the streams, which would keep the server running
        self._server.should_exit = True
        self._thread.join()

    @property
    def lifecycle(self) -> Lifecycle:
        """The state machine behind the routes, for the program that runs the engine."""
        return self._controller.lifecycle  # type: ignore[no-any-return]

    def __exit__(self, *_error: object) -> None:
        self.close()


def attach(
    engine: Engine,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    uds: _Path | None = None,
    settings: Settings | None = None,
    ssl_keyfile: _Path | None = None,
    ssl_certfile: _Path | None = None,
) -> Attachment:
    """Serve ``engine`` from a thread of this process; return once requests are answered.

    Installs no signal handler and configures no logging. Unless MEMSAVER_PREPARE_BACKUP is off, a thread pins the host
    memory that a release of everything needs.

    Args:
        host: the address to bind; any other than loopback needs a key.
        port: the port to bind; 0 chooses a free one.
        uds: bind this Unix socket instead, with mode 0600.
        settings: the default is the environment's.
        ssl_keyfile, ssl_certfile: serve HTTPS with this private key and certificate (PEM), which may be one file.

    Raises:
        ConfigurationError: the address needs a key or cannot be bound, or a file named here or by ``settings`` is bad.
    """
    settings = settings or Settings()
    communicators.warn_of_registered_graphs()
    make_app = partial(create_app, engine, settings)
    attachment = serve_app(make_app, settings, host, port, uds, ssl_keyfile=ssl_keyfile, ssl_certfile=ssl_certfile)
    memory_of(engine).prepare_backup()  # so that the first release is fast
    return attachment


def serve_app(
    make_app: Callable[[], FastAPI],
    settings: Settings,
    host: str = "127.0.0.1",
    port: int = 0,
    uds: _Path | None = None,
    *,
    ssl_keyfile: _Path | None = None,
    ssl_certfile: _Path | None = None,
) -> Attachment:
    """Serve the application of ``make_app``, whose ``state.memsaver`` is a ``Service``. The other arguments, and the
    errors, are those of ``attach``."""
    warn_of_misspelt_variables()
    if ssl_certfile or ssl_keyfile:
        _check_certificate(ssl_certfile, ssl_keyfile)
    bound = _bind(host, port, uds, settings)
    config = uvicorn.Config(
        make_app(),
        http=LimitedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        # How many connections asyncio accepts in one iteration. It logs a traceback for each when file descriptors run
        # out: more would delay a probe. The backlog of the socket itself is set in startup().
        backlog=ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=GRACE_S,
        ssl_keyfile=ssl_keyfile,
        ssl_certfile=ssl_certfile,
    )
    server = _Server(config)
    try:
        thread = start_thread("memsaver-http", partial(server.serve_here, bound))
    except MemsaverError:
        bound.close()
        raise
    server.settled.wait()
    if server.failure is not None:
        bound.close()
        raise MemsaverError(f"the server did not start: {server.failure}") from server.failure
    return Attachment(server, bound, thread)


def check_place(host: str, port: int, uds: _Path | None, settings: Settings) -> None:
    """Raise ConfigurationError if ``attach`` could not bind here, before anything that takes long."""
    _bind(host, port, uds, settings).close()
    if uds is not None:
        os.unlink(uds)


class _Server(uvicorn.Server):
    """uvicorn, on a thread other than the main one so that it installs no signal handlers."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.failure: BaseException | None = None
        self.settled = threading.Event()

    @reserved_heap()
    def serve_here(self, bound: socket.socket) -> None:
        """Serve on this thread until stopped."""
        try:
            # Not server.run(), which may set the event loop policy of the process.
            asyncio.run(self.serve(sockets=[bound]))
        except BaseException as error:
            logger.exception("the server stopped")
            self.failure = error
        finally:
            self.settled.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            for each in sockets or ():
                each.listen(BACKLOG)
        self.settled.set()


def _check_certificate(certfile: _Path | None, keyfile: _Path | None) -> None:
    if not certfile:
        raise ConfigurationError("a private key alone is not enough for HTTPS: give its certificate, too")
    try:
        # With an empty password, so that OpenSSL does not ask for one on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile, password="")
    except OSError as error:  # an SSLError is one
        raise ConfigurationError(
            f"cannot use the certificate {os.fspath(certfile)!r} with the private key "
            f"{'in it' if keyfile is None else repr(os.fspath(keyfile))}: {error}; give PEM files that belong "
            "together, the key without a password"
        ) from None


def _bind(host: str, port: int, uds: _Path | None, settings: Settings) -> socket.socket:
    if uds is not None:
        return _bind_unix(os.fspath(uds))
    check_address(host, settings)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        held = f", by {' and '.join(holders)}" if (holders := port_holders(port)) else ""
        why = f"{error.strerror}{held}; choose another address or port 0"
        raise ConfigurationError(f"cannot bind {host}:{port}: {why}") from None
    return bound


def _bind_unix(path: str) -> socket.socket:
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            if probe.connect_ex(path) == errno.ECONNREFUSED:  # its server has ended
                os.unlink(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(path)
        # No client can connect before listen().
        os.chmod(path, 0o600)
    except OSError as error:
        bound.close()
        raise ConfigurationError(f"cannot bind {path!r}: {error}; choose another path") from None
    return bound
