"""Tensors of regions are not shared with other processes."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.multiprocessing.reductions import reduce_tensor

import memsaver_core as ms

from .kinds import on_cuda, on_host


def send(tensor: torch.Tensor) -> None:
    ForkingPickler(io.BytesIO()).dump(tensor)


def send_storage(tensor: torch.Tensor) -> None:
    ForkingPickler(io.BytesIO()).dump(tensor.untyped_storage())


def share_module(tensor: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.register_buffer("buffer", tensor)
    module.share_memory()


def share_storage_on_cuda(tensor: torch.Tensor) -> None:
    tensor.untyped_storage()._share_cuda_()


#: Ways to share a tensor, and the device on which each of them leads to shared memory or CUDA IPC.
WAYS = [
    *(
        pytest.param(way, "cpu", marks=on_host)
        for way in (send, send_storage, torch.Tensor.share_memory_, share_module)
    ),
    *(pytest.param(way, "cuda", marks=on_cuda) for way in (send, reduce_tensor, share_storage_on_cuda)),
]


@pytest.fixture(params=["file_descriptor", "file_system"])
def _strategy(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways in which torch shares host memory."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(request.param)
    yield
    torch.multiprocessing.set_sharing_strategy(before)


@pytest.mark.usefixtures("_strategy")
@pytest.mark.parametrize(("share", "device"), WAYS)
@pytest.mark.parametrize("released", [False, True])
@pytest.mark.guards("sharing a tensor by CUDA IPC failed")
def test_a_tensor_of_a_region_is_not_shared(
    share: Callable[[torch.Tensor], object], device: str, released: bool, tag: str
) -> None:
    """The error names the tensor's region and what to do; the tensor keeps its address and content."""
    with ms.region(tag, restore="host"):
        tensor = torch.arange(5000.0, device=device)
    address = tensor.data_ptr()
    size = r"\(20000 bytes at " if device == "cpu" else ""  # torch's CUDA allocator may give a larger block
    if released:
        ms.release([tag])
    with pytest.raises(ms.UnsupportedError, match=rf"region '{tag}' {size}.*clone\(\)"):
        share(tensor[10:20])
    ms.release([tag])
    ms.resume([tag])
    assert tensor.data_ptr() == address
    assert torch.equal(tensor.cpu(), torch.arange(5000.0))
