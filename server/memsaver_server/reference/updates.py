"""Weight updates: read and checked first, then written, so that all ranks can agree in between."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from memsaver_server.reference import checkpoint
from memsaver_server.reference.runner import ModelRunner


class WeightUpdate:
    """An update of one rank's part of the weights. Each is read by one call and written by `write`."""

    def __init__(self, runner: ModelRunner, dtype: torch.dtype | None) -> None:
        self._runner = runner
        self._dtype = dtype
        self._parts: dict[str, Tensor] = {}

    def read_folder(self, folder: Path) -> None:
        """Read a checkpoint folder.

        Raises:
            ValueError: its model has other tensors.
            RuntimeError: the weights are released.
        """
        given = dict(checkpoint.tensors_of(checkpoint.load_checkpoint(folder, self._dtype)))
        missing = sorted(set(dict(checkpoint.tensors_of(self._runner.model))) - set(given))
        if missing:
            raise ValueError(f"{folder} lacks {', '.join(missing[:8])}; nothing was written")
        self._check(given)

    def read_payload(self, payload: Sequence[str], load_format: str | None) -> None:
        """Read the payload of a request.

        Raises:
            ValueError: it is not safetensors, or names tensors that the model lacks.
            RuntimeError: the weights are released.
        """
        self._check(checkpoint.parse_payload(payload, load_format))

    def write(self) -> list[str]:
        """Write what was read, and return the names of the tensors. Between two steps only."""
        parts, self._parts = self._parts, {}
        checkpoint.write_tensors(self._runner.model, parts)
        return list(parts)

    def _check(self, given: dict[str, Tensor]) -> None:
        self._parts = checkpoint.check_update(self._runner.model, given, self._runner.partition)
