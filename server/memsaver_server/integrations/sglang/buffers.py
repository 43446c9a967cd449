"""Buffers of models, which no weight update writes: copied before a release, written back if weights were lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

import memsaver_core as ms


class Buffers:
    """Host copies of the buffers of some models. In the scheduler's thread."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def save(self, models: Iterable[Any]) -> None:
        """Copy the buffers of ``models``, if their memory is resident."""
        if any(tag.released_bytes for tag in ms.status().tags if tag.tag == "weights"):
            return
        shared = {id(buffer): buffer for model in models for buffer in model.buffers()}
        self._copies = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in shared.values()]

    def repair(self, lost: Sequence[str]) -> None:
        """Write the copies back if the weights are among the tags that came back without content."""
        if "weights" in lost:
            with torch.inference_mode():
                for buffer, content in self._copies:
                    buffer[...] = content
