"""One request for tokens: what was asked, how far it is, what it answers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: Sampling parameters that this engine leaves undone, and the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "min_p": (None, 0, 0.0),
    "min_new_tokens": (None, 0),
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "repetition_penalty": (None, 1, 1.0),
    "stop": (None, "", []),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "logit_bias": (None, {}),
}

#: A smaller temperature is taken for 0, as vLLM does.
_LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: how many tokens at most.
        temperature: 0, or less than 1e-5, takes the likeliest token always; above that draws from the distribution.
        top_p: draws from the likeliest tokens that together have this probability.
        top_k: draws from that many likeliest tokens; -1 from all.
        seed: makes the draws repeatable; None draws differently each time.
        stop_token_ids: end after one of these, besides the model's own.
        ignore_eos: go on after the model's own end of text.
        skip_special_tokens: leave special tokens out of the text.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @classmethod
    def parse(cls, given: Any) -> Sampling:
        """Read a request's ``sampling_params``. Names that no sampler knows are ignored.

        Raises:
            ValueError: a value is out of its range, or asks for something that this engine would leave undone.
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ValueError(f"sampling_params must be an object, not {type(given).__name__}")
        for name, neutral in _NEUTRAL.items():
            if name in given and given[name] not in neutral:
                raise ValueError(f"sampling_params.{name} = {given[name]!r} is not supported by this engine")
        seed = given.get("seed", given.get("sampling_seed"))
        stops = given.get("stop_token_ids") or ()
        if not isinstance(stops, (list, tuple)):
            raise ValueError("sampling_params.stop_token_ids must be a list of whole numbers")
        return cls(
            max_new_tokens=_whole("max_new_tokens", given.get("max_new_tokens"), 128, 1),
            temperature=_number("temperature", given.get("temperature"), 0.0, 0.0, 100.0),
            top_p=_number("top_p", given.get("top_p"), 1.0, 1e-6, 1.0),
            top_k=_whole("top_k", given.get("top_k"), -1, -1),
            seed=None if seed is None else _whole("seed", seed, 0, 0) % 2**63,
            stop_token_ids=frozenset(_whole("stop_token_ids", stop, 0, 0) for stop in stops),
            ignore_eos=bool(given.get("ignore_eos", False)),
            skip_special_tokens=bool(given.get("skip_special_tokens", True)),
        )


class Sampler:
    """Draws one request's tokens."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator: torch.Generator | None = None

    @property
    def greedy(self) -> bool:
        return self._sampling.temperature < _LEAST_TEMPERATURE or self._sampling.top_k == 1

    def pick(self, logits: Tensor) -> int:
        """Draw a token from ``logits`` ``[vocabulary]``, whatever they are; what is no number is the least likely."""
        if self.greedy:
            return int(torch.argmax(logits))
        if self._generator is None:
            self._generator = torch.Generator(logits.device)
            if self._sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self._sampling.seed)
        # A draw among weights that are no numbers ends the context of a GPU, and with it the engine. So the scores are
        # finite first (a model that lost its weights has others), and then at most 0, where the likeliest are.
        finite = torch.nan_to_num(logits.float(), nan=torch.finfo(torch.float32).min)
        scores, order = torch.sort(finite, descending=True)
        scores = (scores - scores[0]) / self._sampling.temperature
        if self._sampling.top_k > 0:
            scores[self._sampling.top_k :] = float("-inf")
        weights = torch.softmax(scores, dim=-1)
        if self._sampling.top_p < 1.0:
            weights[torch.cumsum(weights, dim=-1) - weights > self._sampling.top_p] = 0.0
        return int(order[torch.multinomial(weights, 1, generator=self._generator)])


@dataclass(eq=False)
class Request:
    """A request in the engine. Only the scheduler changes it once it was submitted.

    Attributes:
        prompt: ids asked for.
        output: ids answered so far.
        cached: positions of prompt and output whose keys and values are in the slot.
        reused: positions of the prompt that were there already when the request came.
        slot: its slot, or -1 while it has none.
        held: waits for admission to open again; a drain does not wait for it.
        finish: why it ends, once it does, in the words of SGLang's ``finish_reason``.
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
        """Whether more than the last token still has to be computed."""
        return self.cached < len(self.prompt) + len(self.output) - 1 or not self.output

    def abort(self, message: str) -> None:
        self.finish = {"type": "abort", "message": message}

    def accept(self, token: int, stops: frozenset[int], limit: int) -> None:
        """Take the next token; ``limit`` is how many positions a slot has."""
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


def _number(name: str, value: Any, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"sampling_params.{name} must be a number from {low:g} to {high:g}, not {value!r}")
    return float(value)


def _whole(name: str, value: Any, default: int, low: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"sampling_params.{name} must be a whole number of at least {low}, not {value!r}")
    return value
