"""Moving tensors into regions, in place."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import memsaver_core as ms
from memsaver_server.integrations.module.module_tensors import ModuleTensor, listed

logger = logging.getLogger("memsaver")

#: Bytes moved at once. The device needs room for a copy of them, or of one larger tensor.
BATCH_BYTES = 256 << 20


@dataclass
class _Storage:
    """A storage, and the tensors that share it."""

    tag: str
    restore: ms.RestorePolicy | str | None
    device: torch.device
    nbytes: int
    tensors: list[Tensor] = field(default_factory=list)


def move(tagged: Iterable[tuple[ModuleTensor, str, ms.RestorePolicy | str | None]]) -> None:
    """Move each tensor under its tag and policy. The first of those that share memory decides for all of them.

    Every other tensor of the process that shares the memory, as in a state dict, moves along. What is under a tag
    already stays, and so does host memory if memsaver manages a device's. After an error some tensors have moved; each
    has its content, and the call can be repeated.

    Raises:
        torch.OutOfMemoryError: the device lacks room for a second copy of what moves at once.
    """
    managed = ms.torch_device().type
    storages: dict[int, _Storage] = {}
    left = []
    for each, tag, restore in tagged:
        for tensor in _parts(each.tensor):
            if tensor.device.type != managed:
                continue
            if not ms.is_plain(tensor):
                left.append(each.name)
                continue
            storage = _Storage(tag, restore, tensor.device, tensor.untyped_storage().nbytes())
            storages.setdefault(tensor.untyped_storage()._cdata, storage).tensors.append(tensor)
    if left:
        logger.warning(
            "%s of a kind that cannot be moved: released only if made inside a region. Load the module inside "
            'memsaver_core.region("weights")',
            listed(left),
        )
    for tensor in _live_tensors():
        if tensor.device.type == managed and tensor.untyped_storage()._cdata in storages:
            storages[tensor.untyped_storage()._cdata].tensors.append(tensor)
    batches: dict[tuple[str, Any, torch.device], list[_Storage]] = {}
    for storage in storages.values():
        key = (storage.tag, storage.restore, storage.device)
        batch = batches.setdefault(key, [])
        batch.append(storage)
        if sum(each.nbytes for each in batch) >= BATCH_BYTES:
            _adopt(batches.pop(key))
    for batch in batches.values():
        _adopt(batch)


def _adopt(batch: list[_Storage]) -> None:
    first = batch[0]
    tensors = [tensor for each in batch for tensor in each.tensors]
    old = [tensor.untyped_storage() for tensor in tensors]
    _synchronize(first.device)  # other streams may still write what is to be copied
    ms.adopt(tensors, first.tag, restore=first.restore, device=first.device.index)
    _synchronize(first.device)  # other streams may be given the old memory once it is free
    del old


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that have the memory: of a subclass that wraps others, those."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _live_tensors() -> list[Tensor]:
    # is_plain() goes by exact type, not isinstance(): a lazy object's __class__ may run code.
    return [each for each in gc.get_objects() if ms.is_plain(each)]
