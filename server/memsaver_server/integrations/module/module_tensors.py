"""The tensors that modules hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

import memsaver_core as ms
from memsaver_core.errors import ConfigurationError

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
