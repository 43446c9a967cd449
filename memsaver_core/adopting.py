"""Finds the tensors that a program holds, and moves them under tags with all tensors that share their memory."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from memsaver_core import process
from memsaver_core.contract.policies import PolicyLike
from memsaver_core.regions import adopt
from memsaver_core.storages import is_plain, objects_of

#: How many bytes move at once. The device needs room for a copy of these, or of one larger tensor.
BATCH_BYTES = 256 << 20

_Place = tuple[str, "PolicyLike | None", torch.device]


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that have the memory of ``tensor``: those that it wraps, or itself."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for part in (getattr(tensor, name) for name in names):
            if isinstance(part, Tensor):  # the attributes of a DTensor include its device mesh
                yield from parts(part)
    else:
        yield tensor


def tensors_in(owner: object) -> Iterator[tuple[str, Tensor]]:
    """Yield (attribute, tensor) for tensors in attributes of ``owner``, also in containers and inner optimizers."""
    waiting: list[tuple[str, Any]] = list(vars(owner).items())
    seen = {id(owner)}
    while waiting:
        attribute, value = waiting.pop()
        if isinstance(value, Tensor):
            yield attribute, value
        elif id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, dict):
                waiting += ((attribute, each) for each in value.values())
            elif isinstance(value, (list, tuple, set)):
                waiting += ((attribute, each) for each in value)
            elif hasattr(value, "step") and hasattr(value, "param_groups"):
                waiting += vars(value).items()


def tags_of(tensors: Iterable[Tensor]) -> dict[torch.UntypedStorage, str]:
    """Return the storages of ``tensors`` that are in regions, each once, with their tags."""
    saver, found = process.saver(), {}
    for part in (part for tensor in tensors for part in parts(tensor) if is_plain(part)):
        storage = part.untyped_storage()
        if storage.nbytes() and saver.owns(storage.data_ptr()):
            found[storage.data_ptr()] = storage
    return {storage: str(saver.backup_of(storage.data_ptr(), 1, 0)["tag"]) for storage in found.values()}


def adopt_shared(tagged: Iterable[tuple[Tensor, str, PolicyLike | None]]) -> list[Tensor]:
    """Move each tensor under its tag and policy; return those of a kind that cannot be moved.

    Of tensors that share memory the first one decides. Every other tensor of the process that shares the
    memory, for example in a state dict, moves along. What is under a tag already stays, and so does host memory if
    memsaver manages a device's. After an error (the device may lack room for a copy of what moves at once) some tensors
    have moved; each has its content, and the call can be repeated.
    """
    managed, saver = process.torch_device().type, process.saver()
    storages: dict[int, tuple[_Place, list[Tensor]]] = {}  # each with the tensors that share it
    left = []
    for tensor, tag, restore in tagged:
        for part in parts(tensor):
            if part.device.type != managed:
                continue
            if not is_plain(part):
                left.append(tensor)
            elif part.untyped_storage().nbytes() and not saver.owns(part.untyped_storage().data_ptr()):
                place = (tag, restore, part.device)
                storages.setdefault(part.untyped_storage()._cdata, (place, []))[1].append(part)
    for tensor in filter(is_plain, all_tensors()) if storages else ():
        if tensor.device.type == managed and tensor.untyped_storage()._cdata in storages:
            storages[tensor.untyped_storage()._cdata][1].append(tensor)
    batches: dict[_Place, list[Tensor]] = {}
    sizes: Counter[_Place] = Counter()
    for place, tensors in storages.values():
        batches.setdefault(place, []).extend(tensors)
        sizes[place] += tensors[0].untyped_storage().nbytes()
        if sizes[place] >= BATCH_BYTES:
            _adopt(place, batches.pop(place))
            del sizes[place]
    for place, tensors in batches.items():
        _adopt(place, tensors)
    return left


def all_tensors() -> list[Tensor]:
    """Return the tensors of this process that Python's collector knows. Undoes ``gc.freeze()``, and does not repeat it:
    that would also hide what becomes garbage later."""
    gc.unfreeze()
    return objects_of(Tensor)


def _adopt(place: _Place, tensors: list[Tensor]) -> None:
    tag, restore, device = place
    old = [tensor.untyped_storage() for tensor in tensors]
    _synchronize(device)  # other streams may still write what is to be copied
    adopt(tensors, tag, restore=restore)
    _synchronize(device)  # other streams may be given the old memory once it is free
    del old


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
