"""Requests, their rows in a batch, and the slots of the cache: which are free, and which prefixes they hold."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from memsaver_server.reference.sampling import Sampler, Sampling


@dataclass(eq=False)
class Request:
    """A prompt and its output so far. Once submitted, only the scheduler changes it.

    Attributes:
        cached: positions of prompt and output whose keys and values are in the slot.
        reused: positions of the prompt that were cached before the request came.
        slot: its slot, or -1 while it has none.
        held: waits for admission to open; a drain does not wait for it.
        finish: why it ended, as SGLang's ``finish_reason``.
    """

    prompt: list[int]
    sampling: Sampling
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    output: list[int] = field(default_factory=list)
    cached: int = 0
    reused: int = 0
    slot: int = -1
    held: bool = False
    finish: dict[str, Any] | None = None
    future: Future[Request] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.sampler = Sampler(self.sampling)

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.output

    @property
    def needs_prefill(self) -> bool:
        """Whether more than the last token has to be computed."""
        return self.cached < len(self.prompt) + len(self.output) - 1 or not self.output

    def abort(self, message: str) -> None:
        self.finish = {"type": "abort", "message": message}

    def accept(self, token: int, stops: frozenset[int], limit: int) -> None:
        """Append the next token; ``limit`` is the number of positions of a slot."""
        self.output.append(token)
        ends = self.sampling.stop_token_ids if self.sampling.ignore_eos else self.sampling.stop_token_ids | stops
        if token in ends:
            self.finish = {"type": "stop", "matched": token}
        elif len(self.output) >= self.sampling.max_new_tokens or len(self.prompt) + len(self.output) >= limit:
            self.finish = {"type": "length", "length": len(self.output)}

    def meta_info(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "finish_reason": self.finish,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.output),
            "cached_tokens": self.reused,
            "e2e_latency": time.monotonic() - self.submitted,
        }


@dataclass(frozen=True)
class Row:
    """One request's row in a batch: the token at ``position`` of ``slot``."""

    slot: int
    position: int
    token: int
    sampler: Sampler


class SlotTable:
    """Assigns slots and caches prefixes: a new prompt gets the slot that holds most of its beginning.

    Only whole chunks are cached: a chunk is always computed in the same shape at the same position, so that a reused
    one is bitwise what computing it again would give.
    """

    def __init__(self, slots: int, chunk: int) -> None:
        self._chunk = chunk
        self._held: list[tuple[int, ...]] = [()] * slots
        self._free: dict[int, None] = dict.fromkeys(range(slots))  # in the order of their return

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, ids: Sequence[int]) -> tuple[int, int]:
        """Take a free slot for ``ids``; return it and how many of the ids it holds already.

        At least one chunk is left to compute, which gives the last token's logits.
        """
        limit = (len(ids) - 1) // self._chunk * self._chunk
        best, reused = -1, 0
        for slot in self._free:
            common = self._common(slot, ids, limit)
            if common > reused:
                best, reused = slot, common
        if best < 0:  # one that holds nothing, else the least recently used
            best = next((slot for slot in self._free if not self._held[slot]), next(iter(self._free)))
        del self._free[best]
        self._held[best] = self._held[best][:reused]
        return best, reused

    def remember(self, slot: int, ids: Sequence[int]) -> None:
        """Record that ``slot`` holds the keys and values of ``ids``."""
        self._held[slot] = tuple(ids[: len(ids) // self._chunk * self._chunk])

    def give_back(self, slot: int) -> None:
        self._free[slot] = None

    def forget(self) -> None:
        """Forget what every slot holds."""
        self._held = [()] * len(self._held)

    def _common(self, slot: int, ids: Sequence[int], limit: int) -> int:
        held, common, chunk = self._held[slot], 0, self._chunk
        while common < min(limit, len(held)) and held[common : common + chunk] == tuple(ids[common : common + chunk]):
            common += chunk
        return common
