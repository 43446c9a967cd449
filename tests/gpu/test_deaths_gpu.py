"""Processes that are killed during a release or a resume: the device gets all their memory back."""

from __future__ import annotations

import signal
import uuid

import pytest
import torch

import memsaver_core as ms
from tests.gpu.children import ON_CUDA
from tests.programs import output_of, run_python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or ms.driver_name() != "cuda", reason="needs an NVIDIA GPU and the CUDA driver"
    ),
]

MIB = 1 << 20
GIB = 1 << 30

#: Kills itself when some of the operation's copies are done and others are not; exits normally if it was too late.
KILLED = """
import os, signal, sys, threading, time
import torch, memsaver_core as ms
operation = sys.argv[1]
with ms.region("weights", restore="host"):
    held = [torch.full((1 << 30,), i + 1, dtype=torch.uint8, device="cuda") for i in range(8)]
if operation == "resume":
    ms.release()

def watch():
    while not time.sleep(0.0005):  # the copies take 100 ms and more
        now = ms.status().progress
        if now.operation == operation and 0 < now.done_bytes < now.total_bytes:
            os.kill(os.getpid(), signal.SIGKILL)

threading.Thread(target=watch, daemon=True).start()
getattr(ms, operation)()
"""

CYCLE = """
import torch, memsaver_core as ms
with ms.region("weights", restore="host"):
    held = [torch.full((1 << 30,), i + 1, dtype=torch.uint8, device="cuda") for i in range(8)]
ms.release()
ms.resume()
assert all(bool((tensor == i + 1).all()) for i, tensor in enumerate(held))
"""


@pytest.mark.parametrize("operation", ["release", "resume"])
@pytest.mark.guards("a process was killed in the middle of an operation")
def test_killed_in_the_middle(operation: str) -> None:
    """The device has all of it back, a co-tenant's content is intact, and a new process runs a full cycle."""
    tag = f"t-{uuid.uuid4().hex[:8]}"
    with ms.region(tag, restore="host"):
        ours = torch.arange(64 * MIB, dtype=torch.int32, device="cuda")
    before = torch.cuda.mem_get_info()[0]
    assert run_python(KILLED, operation, **ON_CUDA).returncode == -signal.SIGKILL
    assert torch.cuda.mem_get_info()[0] >= before - 64 * MIB
    ms.release([tag])
    output_of(CYCLE, **ON_CUDA)
    ms.resume([tag])
    assert bool((ours == torch.arange(64 * MIB, dtype=torch.int32, device="cuda")).all())
