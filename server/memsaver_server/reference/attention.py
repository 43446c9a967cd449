"""Attention over a static cache of slots. Each request has a slot, and each row of a batch its own position; in
transformers' ``StaticCache`` all rows of a batch have the same position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

#: The name by which transformers' models find `slot_attention`.
ATTENTION_NAME = "memsaver_slots"

#: Keys and values.
Pair = tuple[Tensor, Tensor]


class SlotCache(Cache):  # type: ignore[misc,unused-ignore]
    """Keys and values of all slots: per layer ``[slots, heads, length, dim]``, and scratch memory for a batch, which
    layers of one shape may share. Before each forward pass its ``slots`` ``[batch]`` and ``positions``
    ``[batch, tokens]`` are set: as tensors, so that one captured graph serves any of them."""

    slots: Tensor
    positions: Tensor

    def __init__(self, layers: Sequence[Pair], scratch: Sequence[Pair]) -> None:
        super().__init__(layers=[])
        self._layers, self._scratch = layers, scratch

    def behind(self, slots: int) -> list[Tensor]:
        """Return the parts that lie behind the first ``slots`` slots: contiguous, no copies."""
        return [part[slots:] for pair in self._layers for part in pair]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Pair:
        (keys, values), (key_scratch, value_scratch) = self._layers[layer_idx], self._scratch[layer_idx]
        # Positions beyond a request's own have weight zero, and zero times NaN is NaN: without this, an overflow in one
        # request would reach the next request in the same slot.
        finite = torch.nan_to_num(value_states)
        return self._store(keys, key_states, key_scratch), self._store(values, finite, value_scratch)

    def _store(self, store: Tensor, states: Tensor, scratch: Tensor) -> Tensor:
        store[self.slots[:, None], :, self.positions] = states.transpose(1, 2).to(store.dtype)
        gathered = scratch[: self.slots.shape[0]]
        torch.index_select(store.flatten(1), 0, self.slots, out=gathered.flatten(1))
        return gathered


def distances(positions: Tensor, length: int) -> Tensor:
    """Return how many positions each cached key is before each query, ``[batch, 1, tokens, length]``; negative if it is
    after. transformers passes it on unchanged as the attention mask."""
    cached = torch.arange(length, device=positions.device, dtype=torch.int32)
    return positions.to(torch.int32)[:, None, :, None] - cached


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers' interface defines it; ``attention_mask`` is what ``distances`` returns. Query
    heads that share a key head are stacked along the query axis, so that keys and values are not repeated. Raises
    NotImplementedError if the model needs another kind of attention."""
    for unsupported in ("s_aux", "position_bias"):
        if other.get(unsupported) is not None:
            raise NotImplementedError(f"{type(module).__name__} passes {unsupported}, which slots do not support")
    batch, heads, tokens, dim = query.shape
    shared = key.shape[1]
    group = heads // shared
    stacked = query.reshape(batch, shared, group * tokens, dim)
    scores = torch.matmul(stacked, key.transpose(2, 3)) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = attention_mask < 0
    if sliding_window is not None:
        hidden = hidden | (attention_mask >= sliding_window)
    scores = scores.view(batch, shared, group, tokens, -1).masked_fill_(hidden[:, :, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    out = torch.matmul(weights.view(batch, shared, group * tokens, -1), value)
    return out.view(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, slot_attention)
