"""Attention over a static cache of slots: each request has a slot, each row of a batch a position of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

#: The name under which transformers' models find `slot_attention`.
ATTENTION_NAME = "memsaver_slots"


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores for each token: heads and elements of a key, and of a value."""

    heads: int
    key_dim: int
    value_dim: int


class ShapeProbe(Cache):  # type: ignore[misc,unused-ignore]
    """A cache that keeps nothing and notes what each layer wanted to store."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, LayerShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.shapes[layer_idx] = LayerShape(key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


class SlotCache(Cache):  # type: ignore[misc,unused-ignore]
    """Keys and values of all slots, per layer ``[slots, heads, length, dim]``, and scratch for one batch of them.

    The slots of a batch are named by a tensor, so that one captured graph serves any of them. A position that was
    never written is never attended; see `slot_attention`.
    """

    def __init__(
        self,
        layers: Sequence[tuple[Tensor, Tensor]],
        scratch: dict[tuple[int, int], tuple[Tensor, Tensor]],
    ) -> None:
        """``scratch`` holds, for each (heads, dim) that occurs, room for the keys and for the values of a batch."""
        super().__init__(layers=[])
        self._layers = tuple(layers)
        self._scratch = scratch
        self._slots: Tensor = torch.empty(0)
        self._rows: dict[int, Tensor] = {}

    @property
    def length(self) -> int:
        """Positions in a slot."""
        return int(self._layers[0][0].shape[2])

    def begin(self, positions: Tensor, slots: Tensor) -> None:
        """Aim the forward pass that follows at ``slots`` ``[batch]`` and ``positions`` ``[batch, tokens]``."""
        self._slots = slots
        self._rows = {}
        for heads in {int(keys.shape[1]) for keys, _ in self._layers}:
            head = torch.arange(heads, device=slots.device)
            rows = (slots[:, None, None] * heads + head[None, :, None]) * self.length + positions[:, None, :]
            self._rows[heads] = rows.reshape(-1)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._layers[layer_idx]
        # A position beyond a request's own is masked by a weight of zero, and zero times NaN is NaN: what an overflow
        # left in a slot would reach the slot's next tenant.
        finite = torch.nan_to_num(value_states)
        return self._store(keys, key_states, 0), self._store(values, finite, 1)

    def _store(self, store: Tensor, states: Tensor, which: int) -> Tensor:
        heads, length, dim = store.shape[1:]
        store.view(-1, dim).index_copy_(0, self._rows[heads], states.to(store.dtype).reshape(-1, dim))
        batch = self._slots.shape[0]
        gathered = self._scratch[heads, dim][which][:batch]
        torch.index_select(
            store.view(store.shape[0], -1), 0, self._slots, out=gathered.view(batch, heads * length * dim)
        )
        return gathered

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def distances(positions: Tensor, length: int) -> Tensor:
    """How far back each cached position lies from each query, ``[batch, 1, tokens, length]``; negative is the future.

    It takes the place of the attention mask, which transformers hands to `slot_attention` untouched: causality and
    any layer's sliding window can be told from it.
    """
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
    """Attention as transformers' attention interface wants it; ``attention_mask`` is what `distances` returns.

    Query heads that share a key head are stacked along the query axis, so keys and values are not repeated for them.

    Raises:
        NotImplementedError: the model wants a kind of attention that would come out wrong.
    """
    for unsupported in ("s_aux", "position_bias"):
        if other.get(unsupported) is not None:
            raise NotImplementedError(f"{type(module).__name__} passes {unsupported}, which slot_attention cannot do")
    batch, heads, tokens, dim = query.shape
    shared = key.shape[1]
    group = heads // shared
    scale = dim**-0.5 if scaling is None else scaling
    stacked = query.reshape(batch, shared, group * tokens, dim)
    scores = torch.matmul(stacked, key.transpose(2, 3)) * scale
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
