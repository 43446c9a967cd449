"""A process of its own: serves the test engine until its standard input ends. Prints the server's address first.

A line ``CALL KIND`` on standard input makes the next such call of the driver fail in this way. Run with
``bare`` its engine has weights and a KV cache alone; with ``trainer BYTES`` it is a co-tenant instead, which holds so
much of the device until its standard input ends.
"""

from __future__ import annotations

import sys

import torch

import memsaver_core as ms
from memsaver_core import _process


def serve(bare: bool) -> None:
    from tensor_engine import Memory, TensorEngine

    from memsaver_server import attach

    engine = TensorEngine(Memory(bare=bare))
    with attach(engine) as attachment:
        print(attachment.url, flush=True)
        for line in sys.stdin:
            call, kind = line.split()
            _process.saver().fail(call, kind=kind)
            print("planned", flush=True)


def hold(size: int) -> None:
    with ms.region("trainer"):
        held = torch.ones(size, dtype=torch.uint8, device=ms.torch_device())
    print(held.numel(), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    if sys.argv[1:2] == ["trainer"]:
        hold(int(sys.argv[2]))
    else:
        serve(bare=sys.argv[1:2] == ["bare"])
