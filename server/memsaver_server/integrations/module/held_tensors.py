"""The tensors that modules hold, and moving them under tags, in place."""

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

#: How much moves at once. The device needs room for so much twice, and for a larger tensor alone.
BATCH_BYTES = 256 << 20

_TABLES = ("_parameters", "_buffers", "_modules")

Kind = Literal["parameter", "persistent buffer", "buffer", "attribute"]


@dataclass(frozen=True)
class Held:
    """A tensor that a module holds.

    Attributes:
        name: as ``named_parameters`` and ``named_buffers`` have it; entries of containers are numbered.
        tensor: the tensor.
        kind: a ``buffer`` is one that no state dict has; an ``attribute`` the module has not registered.
    """

    name: str
    tensor: Tensor
    kind: Kind


def held_by(modules: Iterable[nn.Module]) -> list[Held]:
    """Return what the modules and all their submodules hold, in lists, tuples and dictionaries too."""
    held: list[Held] = []
    for root in modules:
        for prefix, module in root.named_modules():
            dot = f"{prefix}." if prefix else ""
            passing = module._non_persistent_buffers_set
            for name, parameter in module.named_parameters(dot[:-1], recurse=False, remove_duplicate=False):
                held.append(Held(name, parameter, "parameter"))
            for name, buffer in module.named_buffers(dot[:-1], recurse=False, remove_duplicate=False):
                kind: Kind = "buffer" if name[len(dot) :] in passing else "persistent buffer"
                held.append(Held(name, buffer, kind))
            for name, value in list(vars(module).items()):
                if name not in _TABLES:
                    found = _tensors_in(value, dot + name, set())
                    held.extend(Held(where, tensor, "attribute") for where, tensor in found)
    return held


def check(held: Iterable[Held]) -> None:
    """Check that what is held has memory, where memsaver can manage it. Host memory beside device memory is no error.

    Raises:
        ConfigurationError: it has not; the message names the tensors.
    """
    held = list(held)
    managed = ms.torch_device().type
    for each in held:
        if isinstance(each.tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ConfigurationError(f"{each.name} is not initialized yet: call the module once before it is attached")
    empty = [each.name for each in held if each.tensor.device.type == "meta"]
    if empty:
        raise ConfigurationError(f"{_some(empty)} on the meta device: load the weights before the module is attached")
    foreign = [each for each in held if each.tensor.device.type not in (managed, "cpu")]
    if foreign:
        raise ConfigurationError(
            f"{_some([each.name for each in foreign])} on {foreign[0].tensor.device}, but memsaver's "
            f"{ms.driver_name()} driver manages {managed} memory; move the module there, or set MEMSAVER_DRIVER"
        )
    if held and all(each.tensor.device.type != managed for each in held):
        raise ConfigurationError(
            f"{_some([each.name for each in held])} in host memory: move the module to the device before it is "
            f"attached, model.to({str(ms.torch_device())!r})"
        )


@dataclass
class _Shared:
    """The tensors that share one storage."""

    tag: str
    restore: ms.RestorePolicy | str | None
    device: torch.device
    nbytes: int
    tensors: list[Tensor] = field(default_factory=list)


def move(held: Iterable[tuple[Held, str, ms.RestorePolicy | str | None]]) -> None:
    """Move each under its tag and policy. Of tensors that share memory the first decides for all of them.

    Whatever else in the process shares the memory moves along: a state dict that somebody keeps, say. What is under a
    tag already stays where it is, and so does host memory where memsaver manages a device's. On an error part of the
    tensors have moved; each has its content, and the call can be repeated.

    Raises:
        torch.OutOfMemoryError: the device lacks room for a second copy of what moves at once.
    """
    managed = ms.torch_device().type
    storages: dict[int, _Shared] = {}
    left = []
    for each, tag, restore in held:
        for tensor in _parts(each.tensor):
            if tensor.device.type != managed:
                continue
            if not ms.is_plain(tensor):
                left.append(each.name)
                continue
            shared = _Shared(tag, restore, tensor.device, tensor.untyped_storage().nbytes())
            storages.setdefault(tensor.untyped_storage()._cdata, shared).tensors.append(tensor)
    if left:
        logger.warning(
            "%s of a kind that cannot be moved: released only if made inside a region. Load the module inside "
            'memsaver_core.region("weights")',
            _some(left),
        )
    for tensor in _live_tensors():
        if tensor.device.type == managed and tensor.untyped_storage()._cdata in storages:
            storages[tensor.untyped_storage()._cdata].tensors.append(tensor)
    batches: dict[tuple[str, Any, torch.device], list[_Shared]] = {}
    for shared in storages.values():
        key = (shared.tag, shared.restore, shared.device)
        batch = batches.setdefault(key, [])
        batch.append(shared)
        if sum(each.nbytes for each in batch) >= BATCH_BYTES:
            _adopt(batches.pop(key))
    for batch in batches.values():
        _adopt(batch)


def _adopt(batch: list[_Shared]) -> None:
    first = batch[0]
    tensors = [tensor for each in batch for tensor in each.tensors]
    old = [tensor.untyped_storage() for tensor in tensors]
    _synchronize(first.device)  # another stream may still write what is to be copied
    ms.adopt(tensors, first.tag, restore=first.restore, device=first.device.index)
    _synchronize(first.device)  # and may be given the old memory as soon as it is free
    del old


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tensors_in(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
        seen.add(id(value))
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors_in(entry, f"{name}.{key}", seen)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that have the memory: of a subclass that wraps others, those."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for name in names:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _live_tensors() -> list[Tensor]:
    # is_plain() goes by exact type, not isinstance(): a lazy object's __class__ may run code.
    return [each for each in gc.get_objects() if ms.is_plain(each)]


def _some(names: list[str]) -> str:
    """``a, b and 3 more are``"""
    if len(names) == 1:
        return f"{names[0]} is"
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more} are"
