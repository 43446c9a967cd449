"""Finding torch's objects in this process, and moving tensors onto other storages."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

_T = TypeVar("_T")


def objects_of(wanted: type[_T]) -> list[_T]:
    """Return the objects of a type that Python's collector knows, except those that ``gc.freeze()`` has hidden."""
    objects = gc.get_objects()
    # By type, not isinstance(): a lazy object's __class__ may run code, and there are hundreds of thousands of objects.
    # Nor are types compared: a metaclass may do that in its own way.
    kinds = {id(kind): kind for kind in map(type, objects)}
    found = {number for number, kind in kinds.items() if issubclass(kind, wanted)}
    return [each for each in objects if id(type(each)) in found]


def is_plain(tensor: object) -> bool:
    """Return whether this is an ordinary strided tensor, which ``adopt`` can move. Not a fake, sparse, meta or wrapper
    tensor, and not a lazy conjugate or negative, whose bit a move would lose."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and tensor.layout is torch.strided  # type: ignore[attr-defined]
        and tensor.device.type in ("cpu", "cuda")  # type: ignore[attr-defined]
        and not tensor.is_quantized  # type: ignore[attr-defined]
        and not tensor.is_conj()  # type: ignore[attr-defined]
        and not tensor.is_neg()  # type: ignore[attr-defined]
    )


def is_movable(tensor: object) -> bool:
    """Return whether ``rebase`` can move a tensor; engines have separate classes of parameters."""
    return is_plain(tensor) or (issubclass(type(tensor), torch.nn.Parameter) and is_plain(tensor.data))  # type: ignore[attr-defined]


def rebase(tensors: Iterable[torch.Tensor], storages: dict[int, torch.UntypedStorage]) -> None:
    """Put each tensor on the storage that ``storages`` maps its present one to (keyed by ``_cdata``), if any. Offsets,
    sizes and strides stay, and tensors that shared a storage still do."""
    for tensor in tensors:
        if (storage := storages.get(tensor.untyped_storage()._cdata)) is not None:
            place(tensor, Place.of(tensor)._replace(storage=storage))


class Place(NamedTuple):
    """Where the content of a tensor lies."""

    storage: torch.UntypedStorage
    offset: int | torch.SymInt
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        return cls(tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())


def place(tensor: torch.Tensor, at: Place) -> None:
    """Put a tensor elsewhere, perhaps on another kind of device. It stays the same object."""
    with _disable_current_modes(), torch.no_grad():
        moved = torch.empty(0, dtype=tensor.dtype, device=at.storage.device).set_(*at)
        with torch.inference_mode(tensor.is_inference()):
            tensor.data = moved
