"""Sharing tensors with other processes, on the host driver."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor

import memsaver_core as ms

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host driver's regions")


@pytest.fixture(params=["file_descriptor", "file_system"])
def strategy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways in which torch shares host memory."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(request.param)
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.usefixtures("strategy")
@pytest.mark.guards("sharing a tensor by CUDA IPC failed")
def test_other_tensors_are_shared_as_ever() -> None:
    """Including a copy made outside of any region, which the error recommends."""
    with ms.region("t-shared", restore="host"):
        tensor = torch.arange(5000.0)
    for mine in (torch.arange(5000.0), tensor.clone()):
        kind, arguments = reduce_tensor(mine.share_memory_())
        theirs = kind(*arguments)
        theirs[7] = -1
        assert mine.is_shared()
        assert mine[7] == -1


@pytest.mark.guards("sharing a tensor by CUDA IPC failed")
def test_a_forked_child_shares_what_is_its_own() -> None:
    """For example a data loader's worker, which sends its batches through shared memory."""
    with ms.region("t-forked"):
        torch.zeros(10)

    def child(pipe: Connection) -> None:
        pipe.send(torch.arange(100.0).share_memory_().is_shared())

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=child, args=(theirs,))
    process.start()
    theirs.close()
    assert ours.recv() is True
    process.join()
