"""Python programs as forks of a process that has imported torch and transformers: a start takes 0.1 s instead of 4.

``Popen`` and ``run`` are those of ``subprocess``, for programs of this interpreter, and a test can put this module into
its place. What asserts addresses, footprint, peers or imports, and what is loaded or set before Python starts
(LD_PRELOAD), starts by itself. So does what is not on the host driver: CUDA is not for forks.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, CompletedProcess, TimeoutExpired  # noqa: F401
from typing import Any

from tests.native.site import sitecustomize

#: Names the socket of a server that another process has started.
VARIABLE = "TESTS_FORK_SERVER"
_lock = threading.Lock()
_addresses: dict[str | None, str] = {}
#: The processes of programs that run.
_running: set[int] = set()
#: What the programs that have ended took.
_cpu_seconds: list[float] = []


class Popen(subprocess.Popen[Any]):
    """``subprocess.Popen`` for ``[sys.executable, ...]`` on the host driver.

    Args:
        loaded: whether memsaver, too, is loaded when the program begins. It is not if the program itself chooses the
            native module.
        server: of ``started``, in the place of the one that all tests share; it has loaded no memsaver.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        loaded: bool = True,
        server: str = "",
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        text: bool | None = None,
    ) -> None:
        self._loaded = loaded
        self._server = server
        self._connection: socket.socket | None = None
        super().__init__(arguments, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, text=text)

    def _execute_child(
        self,
        args: Sequence[str],
        executable: object,
        preexec_fn: object,
        close_fds: object,
        pass_fds: object,
        cwd: str | Path | None,
        env: Mapping[str, str] | None,
        startupinfo: object,
        creationflags: object,
        shell: object,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        *others: object,
    ) -> None:
        assert args[0] == sys.executable
        environment = dict(os.environ if env is None else env)
        if environment.get("MEMSAVER_DRIVER") != "host":
            same = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            super()._execute_child(*same, *pipes, *others)  # type: ignore[misc]
            return
        request = {"arguments": args[1:], "environment": environment, "folder": str(cwd or os.getcwd())}
        descriptors = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        native = environment.get(sitecustomize.VARIABLE, "") if self._loaded else None
        self._connection = _asked(self._server or address(native), request, descriptors)
        self._answers = self._connection.makefile("r")
        self.pid = json.loads(self._answers.readline())
        self._child_created = True
        _running.add(self.pid)
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, **options: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(**options)  # type: ignore[misc,no-any-return]
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None and self._has_ended(0):
                line = self._answers.readline()
                assert line, "the process that forks programs has ended"
                status, seconds = json.loads(line)
                self.returncode = os.waitstatus_to_exitcode(status)
                _cpu_seconds.append(seconds)
                _running.discard(self.pid)
                self._answers.close()
                self._connection.close()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._connection is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        while self._internal_poll() is None:
            if not self._has_ended(timeout):
                raise TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        poll = select.poll()
        assert self._connection is not None
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(None if timeout is None else max(timeout, 0.0) * 1000))


def run(
    arguments: Sequence[str],
    *,
    input: str | None = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> CompletedProcess[Any]:
    if capture_output:
        options.update(stdout=PIPE, stderr=PIPE)
    if input is not None:
        options["stdin"] = PIPE
    with Popen(arguments, **options) as process:
        try:
            output, error = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    ran = CompletedProcess(process.args, process.returncode, output, error)
    if check:
        ran.check_returncode()
    return ran


def running() -> list[int]:
    """The processes of programs that run, as far as known."""
    return list(_running)


def cpu_seconds() -> float:
    """What the forks took that have ended, which are no children of this process."""
    return sum(_cpu_seconds)


def address(native: str | None) -> str:
    """The socket of a process that forks programs.

    Args:
        native: memsaver's native module that is loaded in it, the product's if empty; None loads no memsaver.
    """
    with _lock:
        if None not in _addresses:
            _addresses[None] = os.environ.get(VARIABLE) or started()
        if native not in _addresses:
            with _asked(_addresses[None], {"native": native}, []) as connection, connection.makefile() as answer:
                _addresses[native] = json.loads(answer.readline())
        return _addresses[native]


def _asked(path: str, request: Mapping[str, object], descriptors: list[int]) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    text = f"{json.dumps(request)}\n".encode()
    if rest := text[socket.send_fds(connection, [text], descriptors) :]:
        connection.sendall(rest)
    return connection


def started(*modules: str, **changes: str) -> str:
    """Start a server, which ends with this process, and return its socket.

    Args:
        modules: what it imports, instead of all that takes seconds to import.
        changes: of its environment.
    """
    folder = tempfile.mkdtemp(prefix="memsaver-forks-")
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", sitecustomize.VARIABLE)
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.fork_server", f"{folder}/socket", *modules],
        stdin=PIPE,
        stdout=PIPE,
        env={**environment, "OMP_NUM_THREADS": "1", **changes},
        cwd=Path(__file__).parents[1],
    )
    starter = os.getpid()

    def end() -> None:
        if os.getpid() == starter:  # and not a fork of it
            server.kill()
            server.communicate()
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    assert server.stdout is not None
    assert server.stdout.readline(), "the process that forks programs did not start"
    return f"{folder}/socket"
