"""What a rank does with its own scheduler, in the scheduler's thread, in the same iteration as every other rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import memsaver_core as ms


class Work(ABC):
    """The methods that return nothing are names of commands."""

    def __init__(self) -> None:
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # each with its copy on the host

    @abstractmethod
    def is_still(self) -> bool:
        """Whether no request computes, and no copy of the cache or of weights is under way."""

    @abstractmethod
    def has_nothing_to_do(self) -> bool:
        """Whether the event loop would do nothing until it receives something."""

    @abstractmethod
    def in_flight(self) -> list[str]:
        """Return the names of the requests in flight; also called from other threads."""

    @abstractmethod
    def models(self) -> Iterable[Any]:
        """Return the models whose weights are released."""

    @abstractmethod
    def flush(self) -> None:
        """Forget every cached prefix."""

    def save_buffers(self) -> None:
        """Copy the models' buffers, which no weight update writes, if their memory is resident."""
        if any(tag.released_bytes for tag in ms.status().tags if tag.tag == "weights"):
            return
        shared = {id(buffer): buffer for model in self.models() for buffer in model.buffers()}
        self._buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in shared.values()]

    def repair(self, lost: Sequence[str]) -> None:
        """Write back the buffers of ``lost`` weights, and forget the prefixes of a lost cache."""
        if "weights" in lost:
            with torch.inference_mode():
                for buffer, content in self._buffers:
                    buffer[...] = content
        if "kv_cache" in lost:
            self.flush()
