"""The stand-in for SGLang on several ranks, each in its own process, with the service on the first.

``python -m tests.service.sglang_ranks`` imports everything once. For each line of JSON on its standard input it forks
the ranks of one engine, and prints their process ids. The first rank takes SGLang's requests and gives their results at
a socket, as pickled objects.
"""

from __future__ import annotations

import json
import math
import multiprocessing.connection
import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import torch._dynamo  # which torch imports at the first use of a region: seconds for each rank
import torch.distributed as dist

import memsaver_core as ms
import memsaver_server
from memsaver_core import process
from memsaver_core.compat import torch_memory_saver
from memsaver_server.integrations.sglang import engine, plugin
from tests.native import injection
from tests.programs import Child

from . import sglang_standin as standin

__all__ = ["engine", "memsaver_server", "torch"]  # imported before the fork


def echo(scheduler: standin.Scheduler) -> None:
    """Answer once all requests before have been received."""
    scheduler.ipc_channels.send_to_tokenizer.answers.put(("echo", None))


def fail_copies(_scheduler: standin.Scheduler) -> None:
    """Make the next copy of kept memory to the host fail."""
    process.saver().fail("copy_to_host")  # type: ignore[attr-defined]


def fail_buffers(scheduler: standin.Scheduler) -> None:
    """Make the next copy of the model's buffers fail."""
    model = scheduler.tp_worker.model_runner.model

    def buffers() -> Any:
        del model.buffers
        raise OSError("no memory on the host")

    model.buffers = buffers


def fail_updates(scheduler: standin.Scheduler) -> None:
    scheduler.update_error = "a shard is missing"


def fail_no_updates(scheduler: standin.Scheduler) -> None:
    scheduler.update_error = ""


def run(rank: int, folder: str, shape: tuple[int, int, int], environment: dict[str, str], backup: bool) -> None:
    """The life of a rank; ``shape``: tensor-parallel ranks, pipeline stages, replicas."""
    tp, pp, dp = shape
    replica, rank = divmod(rank, tp * pp)
    os.environ.update(environment, MEMSAVER_SGLANG=f"{folder}/engine.sock")
    os.environ[plugin.REPLICAS] = f"{folder}/replicas"
    ms.configure(host_device=f"{Path(folder).name}-{replica}-{rank}", host_capacity=1 << 22)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{replica}", rank=rank, world_size=tp * pp)
    made = standin.install(pytest.MonkeyPatch(), torch_memory_saver)
    plugin.register()
    replicas = {"dp_size": dp, "dp_rank": replica}
    ranks = {"tp_size": tp, "pp_size": pp, "tp_rank": rank % tp, "pp_rank": rank // tp}
    scheduler = made(**ranks, **replicas, enable_weights_cpu_backup=backup)
    if rank == 0:
        _exchange(scheduler, Client(f"{folder}/requests.sock"))
    scheduler.run_event_loop()


def _exchange(scheduler: standin.Scheduler, client: Connection) -> None:
    def receive() -> None:
        while True:
            scheduler.received.put(pickle.loads(client.recv_bytes()))

    def answer() -> None:
        while True:
            client.send(scheduler.ipc_channels.send_to_tokenizer.answers.get())

    for each in (receive, answer):
        threading.Thread(target=each, daemon=True).start()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pids = []
        folder, shape, environment, backup = json.loads(line)
        for rank in range(math.prod(shape)):
            if not (pid := os.fork()):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                sys.stdin.close()
                os.dup2(2, 1)  # the tests read standard output to its end
                try:
                    run(rank, folder, shape, environment, backup)
                except BaseException:
                    traceback.print_exc()
                    Client(f"{folder}/requests.sock").close()  # the test may wait for this rank to connect
                finally:
                    os._exit(0)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


class Zygote:
    """The process that forks engines."""

    def __init__(self) -> None:
        self._child = Child("-m", "tests.service.sglang_ranks", MEMSAVER_DRIVER="host", **injection.in_child())

    def fork(self, folder: Path, shape: tuple[int, int, int], backup: bool, environment: dict[str, str]) -> Engine:
        with Listener(str(folder / "requests.sock")) as listener:
            pids = json.loads(self._child.ask(json.dumps([str(folder), shape, environment, backup])))
            return Engine(folder, pids, [listener.accept() for _ in range(shape[2])])

    def close(self) -> None:
        self._child.end()


class Engine:
    """A running engine, and its clients' side.

    Attributes:
        pids: the ranks' process ids.
        uds: where the service listens, once it does.
    """

    def __init__(self, folder: Path, pids: list[int], connections: list[Connection]) -> None:
        self.uds = str(folder / "engine.sock")
        self.pids = pids
        self._handles = [os.pidfd_open(pid) for pid in pids]
        self._connections = connections  # to the first rank of each replica, in any order
        self._answers: dict[str, Any] = {}

    def send(self, request: Any, replica: int | None = None) -> None:
        """Send as SGLang does: to all replicas what is not for one of them."""
        for each in self._connections if replica is None else [self._connections[replica]]:
            each.send_bytes(pickle.dumps(request))  # send() would share the memory of a tensor

    def answer(self, rid: str) -> Any:
        """The result of a request."""
        while rid not in self._answers:
            ready = multiprocessing.connection.wait(self._connections, 600)
            assert ready, f"no result of {rid}"
            for each in self._connections:
                if each in ready:
                    name, output = each.recv()
                    self._answers[name] = output
        return self._answers.pop(rid)

    def kill(self, rank: int) -> None:
        signal.pidfd_send_signal(self._handles[rank], signal.SIGKILL)

    def close(self) -> None:
        for rank, handle in enumerate(self._handles):
            with suppress(ProcessLookupError):
                self.kill(rank)
            os.close(handle)
        for each in self._connections:
            each.close()


if __name__ == "__main__":
    main()
