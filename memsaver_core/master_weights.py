"""16-bit parameters that an optimizer makes again from its fp32 masters, so that a release need not keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from memsaver_core import process
from memsaver_core.adopting import tensors_in
from memsaver_core.contract.errors import BackupError, UnsupportedError

#: Makes parameters again.
Remake = Callable[[], object]

#: The method by which an optimizer makes them: DeepSpeed's and Megatron-core's.
_METHODS = ("update_lp_params", "_copy_main_params_to_model_params")
#: Any key will do: digests are compared within a process.
_DIGEST_KEY = (1, 2, 3, 4)


def made_from_masters(optimizers: Iterable[Any]) -> set[int]:
    """Return the ids of the tensors that optimizers with masters have, and of the parameters made from the masters."""
    known: set[int] = set()
    for optimizer in _with_masters(optimizers):
        known.update(id(tensor) for _, tensor in tensors_in(optimizer))
        # A rank of Megatron-core's distributed optimizer has the masters of a part; its buffers list all parameters.
        known.update(id(each) for buffer in getattr(optimizer, "buffers", ()) for each in buffer.params)
    return known


def remake_of(models: Iterable[Any], optimizers: Iterable[Any]) -> Remake:
    """Return a function that makes parameters again; all ranks must call it, and this, together."""
    # Megatron-core's: each rank makes a part of the parameters, and all parts are gathered as for a forward pass.
    parallel = [
        each for each in models if getattr(getattr(each, "ddp_config", None), "use_distributed_optimizer", False)
    ]
    makers = _with_masters(optimizers)

    def gather() -> None:
        for each in parallel:
            each.start_param_sync(force_sync=True)

    def remake() -> None:
        for each in makers:
            getattr(each, next(name for name in _METHODS if hasattr(each, name)))()
        gather()

    gather()
    return remake


def _with_masters(optimizers: Iterable[Any]) -> list[Any]:
    chained = [each for optimizer in optimizers for each in getattr(optimizer, "chained_optimizers", (optimizer,))]
    return [each for each in chained if any(hasattr(each, name) for name in _METHODS)]


class Copies:
    """Parameters that are made again instead of kept. ``gone``: a release has discarded them."""

    def __init__(self, storages: list[torch.UntypedStorage], remake: Remake) -> None:
        """Raises UnsupportedError if ``storages`` is empty, or the parameters made again differ from what they were."""
        if not storages:
            raise UnsupportedError(
                "no parameters can be made again: no optimizer of Megatron-core or DeepSpeed has masters of 16-bit "
                "parameters. Keep the parameters, or give a function that makes them; nothing was released"
            )
        self._storages, self._remake = storages, remake
        self.gone = False
        self._digest = self._read()
        remake()
        if self._read() != self._digest:
            raise UnsupportedError(
                "the parameters were not what the optimizer makes from its masters, and are overwritten with that, "
                "as its next step would have done. A caller that writes them must write the masters, too, or keep the "
                "parameters; nothing was released"
            )

    def make_again(self) -> None:
        """Make the parameters again if they are ``gone``. Raises BackupError if they differ from what they were."""
        if not self.gone:
            return
        self._remake()
        if self._read() != self._digest:
            raise BackupError("the parameters that the optimizer has made again differ from those before the release")
        self.gone = False

    def _read(self) -> list[object]:
        saver = process.saver()
        saver.synchronize()
        digests: list[object] = []
        for storage in self._storages:
            whole = storage.nbytes() // 16 * 16  # a digest's unit
            if whole:
                digests.append(saver.digest(storage.device.index or 0, storage.data_ptr(), whole, _DIGEST_KEY))
            digests.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[whole:].tolist())
        return digests
