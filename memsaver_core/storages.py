"""Moving torch tensors onto other storages."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils._python_dispatch import _disable_current_modes


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


def rebase(tensors: Iterable[torch.Tensor], storages: dict[int, torch.UntypedStorage]) -> None:
    """Put each tensor on the storage that ``storages`` maps its present one to (keyed by ``_cdata``), if any. Offsets,
    sizes and strides stay, and tensors that shared a storage still do."""
    with _disable_current_modes(), torch.no_grad():
        for tensor in tensors:
            if (storage := storages.get(tensor.untyped_storage()._cdata)) is None:
                continue
            moved = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
                storage, tensor.storage_offset(), tensor.size(), tensor.stride()
            )
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = moved
