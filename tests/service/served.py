"""Serves the test engine in a process of its own until standard input ends.

Prints the server's address first. Each line of standard input is an order for its driver, answered by the number of
calls so far: ``fail CALL KIND`` makes the next such call fail in this way, ``hold CALL`` holds it, ``heal`` ends both,
and ``count CALL`` does nothing else. With ``bare``, the engine has only weights and a KV cache. With ``mounts PROCESS``
it sees the file systems of that process. With ``trainer BYTES``, the process is a co-tenant that holds this much of the
device instead.
"""

from __future__ import annotations

import ctypes
import sys

import torch

import memsaver_core as ms
from memsaver_core import _native, process


def serve(bare: bool) -> None:
    from tensor_engine import Memory, TensorEngine

    from memsaver_server import attach

    engine = TensorEngine(Memory(bare=bare))
    with attach(engine) as attachment:
        print(attachment.url, flush=True)
        for line in sys.stdin:
            print(obey(process.saver(), *line.split()), flush=True)


def obey(driver: _native.Saver, order: str, call: str = "", kind: str = "") -> int:
    if order == "fail":
        driver.fail(call, kind=kind)
    elif order == "hold":
        driver.delay(call, 3600)
    elif order == "heal":
        driver.heal()
    return driver.counts().get(call, 0)


def share_mounts(process: int) -> None:
    with open(f"/proc/{process}/ns/mnt") as mounts:
        assert ctypes.CDLL(None).setns(mounts.fileno(), 0) == 0


def hold(size: int) -> None:
    with ms.region("trainer"):
        held = torch.ones(size, dtype=torch.uint8, device=ms.torch_device())
    print(held.numel(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1:2] == ["trainer"]:
        hold(int(sys.argv[2]))
    else:
        if sys.argv[1:2] == ["mounts"]:
            share_mounts(int(sys.argv[2]))
        serve(bare=sys.argv[1:2] == ["bare"])
