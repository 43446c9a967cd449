"""What an engine serves and how, in the form in which rank 0 hands it to the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from memsaver_server.reference import checkpoint
from memsaver_server.reference.runner import ModelRunner
from memsaver_server.reference.tensor_parallel import Partition, Place, divide


@dataclass(frozen=True)
class EngineOptions:
    """As the arguments of ``TransformersEngine``, with all defaults decided; JSON-able.

    Attributes:
        model: the checkpoint folder, or the configuration file if ``random_weights``.
        device: rank 0's; on CUDA the ranks have consecutive devices from this one on, on the host all have the same.
        dtype: torch's name of it; empty: the checkpoint's.
    """

    model: str
    random_weights: bool
    device: str
    dtype: str
    kv_cache_bytes: int
    max_len: int
    chunk: int
    batch_sizes: tuple[int, ...]
    use_graphs: bool
    seed: int

    @property
    def torch_dtype(self) -> torch.dtype | None:
        return getattr(torch, self.dtype) if self.dtype else None

    def device_of(self, rank: int) -> torch.device:
        first = torch.device(self.device)
        return torch.device("cuda", (first.index or 0) + rank) if first.type == "cuda" else first

    def make_runner(self, place: Place, kind: Callable[..., ModelRunner] = ModelRunner) -> ModelRunner:
        """Return the runner of one rank; if there are several, all make theirs at the same time.

        Raises:
            ValueError, RuntimeError: see ``TransformersEngine``.
        """
        device = self.device_of(place.rank)

        def make_model() -> tuple[Any, Partition]:
            if self.random_weights:
                return checkpoint.create_random(Path(self.model), device, self.torch_dtype, self.seed, place)
            model = checkpoint.load_checkpoint(Path(self.model), self.torch_dtype)
            return model, divide(model, place)

        return kind(
            make_model,
            device=device,
            kv_cache_bytes=self.kv_cache_bytes,
            max_len=self.max_len,
            chunk=self.chunk,
            batch_sizes=self.batch_sizes,
            use_graphs=self.use_graphs,
        )
