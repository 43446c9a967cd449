"""Ranks of plain torch: processes with one GPU each, in one NCCL group, with a captured all-reduce."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.native.nccl import Ranks
from tests.programs import Child

_PROGRAM = """
import sys, time
import torch
import torch.distributed as dist
import memsaver_core as ms
from memsaver_core import communicators, hibernation
from memsaver_core.communicators.nccl import loaded

ranks, rank, meet = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=meet, rank=rank, world_size=ranks)
with ms.region("weights"):
    numbers = torch.zeros(1 << 20, device="cuda")
total = torch.zeros_like(numbers)
dist.all_reduce(total)  # makes the communicator
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="thread_local"):
    total.copy_(numbers)
    dist.all_reduce(total)

def replayed(number):
    '''The least and the largest sum over all ranks that the graph computes.'''
    numbers.fill_(number + rank)
    graph.replay()
    return float(total.min()), float(total.max())

def reduced(number):
    '''The same without the graph.'''
    sums = torch.full((1000,), float(number + rank), device="cuda")
    dist.all_reduce(sums)
    return float(sums.min()), float(sums.max())

def rate(nbytes):
    '''GB/s of all-reduces of this size, one after the other.'''
    sums = torch.zeros(nbytes // 4, device="cuda")
    dist.all_reduce(sums)
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(20):
        dist.all_reduce(sums)
    torch.cuda.synchronize()
    return 20 * nbytes / 1e9 / (time.monotonic() - began)

def seconds(call):
    began = time.monotonic()
    call()
    return time.monotonic() - began

print("ready", flush=True)
for line in sys.stdin:
    try:
        print(repr(eval(line)), flush=True)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
dist.destroy_process_group()
"""

#: What NCCL needs, so that captured graphs replay after a resume and the process can be checkpointed.
ENVIRONMENT = {"MEMSAVER_DRIVER": "cuda", "NCCL_GRAPH_REGISTER": "0", "NCCL_NVLS_ENABLE": "0"}


def total_over(ranks: int, number: int) -> tuple[float, float]:
    """What ``replayed(number)`` and ``reduced(number)`` give on each of ``ranks``."""
    total = float(sum(number + rank for rank in range(ranks)))
    return total, total


@contextmanager
def started(ranks: int, folder: Path) -> Iterator[Ranks]:
    """Start one process for each of ``ranks`` GPUs."""
    meet = f"file://{folder}/meet"
    with ExitStack() as stack:
        children = []
        for rank in range(ranks):
            child = Child("-c", _PROGRAM, str(ranks), str(rank), meet, inherited=os.environ, **ENVIRONMENT)
            children.append(stack.enter_context(child))
        if [child.read_line() for child in children] != ["ready"] * ranks:
            raise RuntimeError("a rank did not start; its error is above")
        yield Ranks(children)
