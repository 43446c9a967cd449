"""Sharing tensors with other processes by CUDA IPC."""

from __future__ import annotations

from multiprocessing.connection import Connection

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor

import memsaver_core as ms

pytestmark = pytest.mark.gpu


@pytest.mark.guards("sharing a tensor by CUDA IPC failed")
def test_the_memory_of_a_graph_is_not_shared() -> None:
    graph = torch.cuda.CUDAGraph()
    with ms.graph(graph, tag="t-shared-graph"):
        output = torch.ones(5000, device="cuda")
    with pytest.raises(ms.UnsupportedError, match="region 't-shared-graph'"):
        reduce_tensor(output)


def receive(pipe: Connection) -> None:
    tensor = pipe.recv()
    tensor += 1
    torch.cuda.synchronize()
    del tensor
    pipe.send("done")


@pytest.mark.guards("sharing a tensor by CUDA IPC failed")
def test_a_copy_is_shared() -> None:
    """As the error recommends: another process writes to a clone made outside any region."""
    with ms.region("t-shared", restore="host"):
        tensor = torch.arange(5000.0, device="cuda")
    copy = tensor.clone()
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs,))
    process.start()
    ours.send(copy)
    assert ours.poll(120)
    assert ours.recv() == "done"
    process.join()
    assert torch.equal(copy.cpu(), torch.arange(5000.0) + 1)
    assert torch.equal(tensor.cpu(), torch.arange(5000.0))
