"""The tensors that modules hold, and moving them into regions, in place."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

import memsaver_core as ms
from memsaver_core.errors import ConfigurationError

logger = logging.getLogger("memsaver")

#: Bytes moved at once. The device needs room for a copy of them, or of one larger tensor.
BATCH_BYTES = 256 << 20

_TABLES = ("_parameters", "_buffers", "_modules")

Kind = Literal["parameter", "persistent buffer", "buffer", "attribute"]


@dataclass(frozen=True)
class ModuleTensor:
    """A tensor that a module holds.

    Attributes:
        name: as in ``named_parameters`` and ``named_buffers``; entries of containers are numbered.
        kind: a ``buffer`` is in no state dict; an ``attribute`` is not registered with the module.
    """

    name: str
    tensor: Tensor
    kind: Kind


def tensors_of(modules: Iterable[nn.Module]) -> list[ModuleTensor]:
    """Return what the modules and their submodules hold, also in lists, tuples and dictionaries."""
    found: list[ModuleTensor] = []
    for root in modules:
        for prefix, module in root.named_modules():
            dot = f"{prefix}." if prefix else ""
            unsaved = module._non_persistent_buffers_set
            for name, parameter in module.named_parameters(dot[:-1], recurse=False, remove_duplicate=False):
                found.append(ModuleTensor(name, parameter, "parameter"))
            for name, buffer in module.named_buffers(dot[:-1], recurse=False, remove_duplicate=False):
                kind: Kind = "buffer" if name[len(dot) :] in unsaved else "persistent buffer"
                found.append(ModuleTensor(name, buffer, kind))
            for name, value in list(vars(module).items()):
                if name not in _TABLES:
                    held = _tensors_in(value, dot + name, set())
                    found.extend(ModuleTensor(where, tensor, "attribute") for where, tensor in held)
    return found


def check(tensors: list[ModuleTensor]) -> None:
    """Check that the tensors have memory that memsaver can manage. Host memory beside device memory is fine.

    Raises:
        ConfigurationError: they have not; the message names them.
    """
    managed = ms.torch_device().type
    for each in tensors:
        if isinstance(each.tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ConfigurationError(f"{each.name} is not initialized yet: call the module once before it is attached")
    empty = [each.name for each in tensors if each.tensor.device.type == "meta"]
    if empty:
        raise ConfigurationError(f"{listed(empty)} on the meta device: load the weights before the module is attached")
    foreign = [each for each in tensors if each.tensor.device.type not in (managed, "cpu")]
    if foreign:
        raise ConfigurationError(
            f"{listed([each.name for each in foreign])} on {foreign[0].tensor.device}, but memsaver's "
            f"{ms.driver_name()} driver manages {managed} memory; move the module there, or set MEMSAVER_DRIVER"
        )
    if tensors and all(each.tensor.device.type != managed for each in tensors):
        raise ConfigurationError(
            f"{listed([each.name for each in tensors])} in host memory: move the module to the device before it is "
            f"attached, model.to({str(ms.torch_device())!r})"
        )


def listed(names: list[str]) -> str:
    """Return ``a, b and 3 more are``."""
    if len(names) == 1:
        return f"{names[0]} is"
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more} are"


def _tensors_in(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
        seen.add(id(value))
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors_in(entry, f"{name}.{key}", seen)


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
    # is_plain() goes by exact type, not isinstance(): a lazy object's __class__ may run code.
    for tensor in [each for each in gc.get_objects() if ms.is_plain(each)]:
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
