"""Runs Python programs in forks of a process that has imported what takes seconds: ``fork_server.py PATH [MODULE...]``.

It listens on the Unix socket PATH until standard input ends; ``forks`` has the calls. It has one thread, and never
makes a saver or a context. A request is a connection, a line of JSON and descriptors. ``arguments`` asks for a program,
as the interpreter's arguments, with its ``environment`` and ``folder``; the descriptors are its standard input, output
and error. It is answered by the program's process id and, once it has ended, by its wait status and its CPU seconds.
``native`` asks for a fork that has loaded memsaver, too, with that native module of the tests' own (the product's, if
empty), and is answered by the path of its socket.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import importlib.util
import io
import json
import os
import select
import signal
import socket
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.native.site import sitecustomize

THEIRS = (
    "anyio._backends._asyncio",
    "fastapi",
    "httpx",
    "prometheus_client",
    "pydantic_settings",
    "rich.console",
    "schemathesis.openapi",
    "schemathesis.pytest.plugin",
    "torch._dynamo",
    "torch._subclasses.schema_check_mode",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "typer",
    "uvicorn.protocols.http.h11_impl",
)
OURS = (
    "memsaver_server.attachment",
    "memsaver_server.cli.commands",
    "memsaver_server.app",
    "memsaver_server.engine.controller",
    "memsaver_server.fleet.controller",
    "memsaver_server.reference.engine",
)
#: Whose routes are made before any program is, which needs them.
ROUTED = ("routes", "engine.controller", "fleet.controller")
#: What the interpreter or a library reads when it is loaded: a program that wants another value must start by itself.
READ_WHEN_LOADED = (
    "GLIBC_",
    "HF_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "PYTHON",
    "TORCHDYNAMO_",
    "TRANSFORMERS_",
)
#: Those whose value a fork can still take.
TAKEN = ("OMP_NUM_THREADS", "PYTHONFAULTHANDLER", "PYTHONPATH", "PYTHONUNBUFFERED")
#: What a fork is to do, and what it is to do then.
Step = Callable[[], "Step | None"]


class ForkServer:
    def __init__(self, path: str) -> None:
        self._path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(128)
        #: By process descriptor: the process, and the connection over which it was asked for.
        self._programs: dict[int, tuple[int, socket.socket]] = {}
        #: By native module.
        self._loaded: dict[str, str] = {}

    def serve(self) -> Step | None:
        """Return once standard input has ended and, in a fork, with what it is to do."""
        gc.collect()
        gc.freeze()  # the collector does not touch loaded objects, so forks do not copy their pages
        for finalizer in weakref.finalize._registry.values():  # type: ignore[attr-defined]
            finalizer.atexit = False  # torch's would take apart, at each program's end, what goes with the process
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(0, select.POLLIN)
        while True:
            for ready, _ in poll.poll():
                if ready == 0:
                    for process, _ in self._programs.values():
                        os.kill(process, signal.SIGKILL)
                    return None
                if ready in self._programs:
                    poll.unregister(ready)
                    self._report(ready)
                    continue
                connection, request, descriptors = self._receive()
                if not request:
                    continue
                if "native" in request:
                    if step := self._load(connection, request["native"]):
                        return step
                    continue
                process = os.fork()
                if process == 0:
                    self._close()
                    connection.close()
                    return partial(run, request, descriptors)
                for each in descriptors:
                    os.close(each)
                send(connection, process)
                descriptor = os.pidfd_open(process)
                self._programs[descriptor] = process, connection
                poll.register(descriptor, select.POLLIN)

    def _receive(self) -> tuple[socket.socket, dict[str, Any], list[int]]:
        """The next request, with its connection and descriptors; empty if who made it has ended."""
        connection, _ = self._listener.accept()
        text, descriptors, *_ = socket.recv_fds(connection, 1 << 16, 3)
        while not text.endswith(b"\n"):
            part = connection.recv(1 << 16)
            if not part:
                return connection, {}, descriptors
            text += part
        return connection, json.loads(text), descriptors

    def _load(self, connection: socket.socket, native: str) -> Step | None:
        path = f"{self._path}.{len(self._loaded)}"
        if native not in self._loaded:
            loaded = ForkServer(path)
            if os.fork() == 0:
                self._close()
                connection.close()
                return partial(serve_loaded, loaded, native)
            loaded._close()
            self._loaded[native] = path
        send(connection, self._loaded[native])
        connection.close()
        return None

    def _report(self, descriptor: int) -> None:
        process, connection = self._programs.pop(descriptor)
        _, status, used = os.wait4(process, 0)
        os.close(descriptor)
        send(connection, [status, used.ru_utime + used.ru_stime])
        connection.close()

    def _close(self) -> None:
        self._listener.close()
        for descriptor, (_, connection) in self._programs.items():
            os.close(descriptor)
            connection.close()


def send(connection: socket.socket, answer: object) -> None:
    with suppress(OSError):  # who asked may have ended
        connection.sendall(f"{json.dumps(answer)}\n".encode())


def serve_loaded(server: ForkServer, native: str) -> Step | None:
    if native:
        sitecustomize.install(native)
    for name in OURS:
        importlib.import_module(name)
    routes, engine, fleet = (sys.modules[f"memsaver_server.{name}"] for name in ROUTED)
    for capabilities in ((), ("generate",), ("update",), ("generate", "update")):
        routes.routers_of(engine.EngineController.models, frozenset(capabilities))
    routes.routers_of(fleet.FleetController.models, fleet.FleetController.capabilities)
    return server.serve()


def run(request: dict[str, Any], descriptors: list[int]) -> None:
    """Be the program that was asked for."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["folder"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    arguments: list[str] = request["arguments"]
    take(request["environment"], unbuffered=arguments[0] == "-u")
    if arguments[0] == "-u":
        arguments = arguments[1:]
    if arguments[0] == "-P":  # what it leaves out is installed as editable here
        arguments = arguments[1:]
    main = ModuleType("__main__")
    if arguments[0] == "-c":
        folder, sys.argv = "", ["-c", *arguments[2:]]
        code = compile(arguments[1], "<string>", "exec")
    elif arguments[0] == "-m":
        folder = os.getcwd()
        sys.path.insert(0, folder)
        spec = importlib.util.find_spec(arguments[1])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{arguments[1]}.__main__")
        del sys.path[0]
        assert spec is not None, arguments
        assert spec.origin is not None, arguments
        main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
        sys.argv = [spec.origin, *arguments[2:]]
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    else:
        folder, main.__file__, sys.argv = os.path.dirname(os.path.abspath(arguments[0])), arguments[0], arguments
        code = compile(Path(arguments[0]).read_bytes(), arguments[0], "exec")
    sys.path.insert(0, folder)
    sys.modules["__main__"] = main
    # What is loaded is taken down at a program's end, in 0.3 s, only if its environment asks for that, or if it shares
    # memory, which C's functions at exit give up.
    status = 0
    try:
        exec(code, main.__dict__)
    except SystemExit as exit:
        if not isinstance(exit.code, int | None):
            raise
        status = exit.code or 0
    if "TESTS_END_WHOLE" in os.environ or "/dev/shm/memsaver-" in Path("/proc/self/maps").read_text():
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def take(environment: dict[str, str], *, unbuffered: bool) -> None:
    """Be as if started with an environment, and with the present standard input, output and error."""
    for name in sorted({*os.environ, *environment}):
        if name.startswith(READ_WHEN_LOADED) and name not in TAKEN and os.environ.get(name) != environment.get(name):
            os.write(2, f"a fork cannot take {name}={environment.get(name)}: start the program by itself\n".encode())
            os._exit(70)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    unbuffered = unbuffered or bool(environment.get("PYTHONUNBUFFERED"))
    replace("stdin", io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False))))
    replace("stdout", output(1, "strict", unbuffered, by_line=os.isatty(1)))
    replace("stderr", output(2, "backslashreplace", unbuffered, by_line=True))
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


def replace(name: str, stream: io.TextIOWrapper) -> None:
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)


def output(descriptor: int, errors: str, unbuffered: bool, *, by_line: bool) -> io.TextIOWrapper:
    raw = io.FileIO(descriptor, "w", closefd=False)
    binary = raw if unbuffered else io.BufferedWriter(raw)
    return io.TextIOWrapper(binary, errors=errors, line_buffering=by_line, write_through=unbuffered)


def main() -> Step | None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with who started it
    server = ForkServer(sys.argv[1])
    for name in sys.argv[2:] or THEIRS:
        with suppress(ModuleNotFoundError):  # it may be an environment of another engine's tests
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1
    del sys.path[0]  # the folder that it was started in
    print(flush=True)  # it can be asked
    return server.serve()


if __name__ == "__main__":
    step: Step | None = main
    while step is not None:  # not a call from a call, so that a program's traceback is its own
        step = step()
