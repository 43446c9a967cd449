"""Regions: blocks of code whose allocations carry a tag."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from memsaver_core import process
from memsaver_core.contract.errors import ConfigurationError
from memsaver_core.contract.policies import COMMUNICATORS, PolicyLike, policy_for
from memsaver_core.storages import is_plain, rebase

Adoptable = TypeVar("Adoptable", bound="torch.Tensor | torch.nn.Module | Iterable[torch.Tensor]")


def region(
    tag: str, *, restore: PolicyLike | None = None, device: int | None = None, chunk_bytes: int = 0
) -> AbstractContextManager[Any]:
    """Put every tensor that torch allocates inside under ``tag``.

    On CUDA a region applies to the thread that enters it; on the host driver also to parameters and buffers of modules
    made inside, whichever thread loads them. Regions nest: the innermost tag applies. With memsaver disabled this does
    nothing. Raises ConfigurationError if the tag or policy is invalid, or the driver that the settings name cannot be
    used; ForkedProcessError in a process forked from one that uses memsaver.

    Args:
        tag: any name; ``weights``, ``kv_cache``, ``cuda_graph`` and ``workspace`` have default policies.
        restore: what a resume must restore of the content; by default the policy of the tag, else ``discard``.
        device: index of the device; the current one by default (the first on the host driver).
        chunk_bytes: the memory comes in pieces of at most this size (rounded up to what the driver maps, 2 MiB on
            CUDA), so that ``resize`` can give a part of it back. Each piece costs the driver some 60 us in a release
            with its resume: 32 MiB are a good size. By default pieces are as large as possible.
    """
    if not tag or not isinstance(tag, str):
        raise ConfigurationError(f"a tag is a name, not {tag!r}")
    if tag == COMMUNICATORS:
        raise ConfigurationError(f"the tag {tag!r} is reserved for what NCCL holds; choose another name")
    try:
        tag.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"the tag {tag!r} has an unpaired surrogate, which no answer can carry") from None
    if chunk_bytes < 0:
        raise ConfigurationError(f"chunk_bytes is a size, not {chunk_bytes}")
    policy = policy_for(tag, restore).value
    if not process.enabled():
        return nullcontext()
    saver = process.saver()
    return process.backend().region(saver, device, tag, policy, chunk_bytes)


def adopt(obj: Adoptable, tag: str, *, restore: PolicyLike | None = None) -> Adoptable:
    """Move existing tensors under ``tag``, in place, and return ``obj``: a tensor, a module with its parameters and
    buffers, or several tensors.

    The tensor objects stay, each on its device. Their addresses change once, so adopt before a CUDA graph captures
    them. Tensors that share memory still share it afterwards, if all of them are given. A tensor that is under a tag
    already stays where it is. With memsaver disabled this does nothing.

    Raises:
        ConfigurationError: a tensor is of a kind that cannot move; otherwise as ``region``. Nothing has moved.
        torch.OutOfMemoryError, OutOfDeviceMemoryError: there is no room for a copy of all. Nothing has moved.
    """
    if not process.enabled():
        return obj
    if isinstance(obj, torch.Tensor):
        tensors: list[torch.Tensor] = [obj]
    elif isinstance(obj, torch.nn.Module):
        tensors = [*obj.parameters(), *obj.buffers()]
    else:
        tensors = list(obj)
    saver = process.saver()
    storages: dict[int, torch.UntypedStorage] = {}
    with torch.no_grad():
        for tensor in tensors:
            if not is_plain(tensor):
                raise ConfigurationError(
                    f"only plain strided tensors can be adopted, not this {type(tensor).__name__} (a subclass, sparse, "
                    "quantized, on a meta device, or a lazy conjugate or negative: resolve_conj() or resolve_neg() it)"
                )
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage._cdata in storages or saver.owns(storage.data_ptr()):
                continue
            with region(tag, restore=restore, device=tensor.device.index):
                moved = torch.empty(storage.nbytes(), dtype=torch.uint8, device=tensor.device).untyped_storage()
            moved.copy_(storage, non_blocking=False)
            storages[storage._cdata] = moved
    rebase(tensors, storages)
    return obj
