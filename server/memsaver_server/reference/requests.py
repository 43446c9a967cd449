"""A request in the engine."""

from __future__ import annotations

import time
import uuid
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
