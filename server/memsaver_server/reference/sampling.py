"""How a request's tokens are chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: Sampling parameters that this engine does not support, and the values that have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
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

#: Smaller temperatures count as 0, as in vLLM.
_LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Sampling:
    """A request's sampling parameters, as SGLang and vLLM name them.

    Attributes:
        temperature: below 1e-5 decoding is greedy.
        top_k: -1: all tokens.
        seed: None: another one each time.
        stop_token_ids: end after one of these, besides the model's own.
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
        """Read a request's ``sampling_params``. Unknown names are ignored.

        Raises:
            ValueError: a value is out of range, or needs something that this engine does not support.
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            raise ValueError(f"sampling_params must be an object, not {type(given).__name__}")
        for name, neutral in NEUTRAL.items():
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
        """Draw a token from ``logits`` ``[vocabulary]``; NaN is the least likely."""
        if self.greedy:
            return int(torch.argmax(logits))
        if self._generator is None:
            self._generator = torch.Generator(logits.device)
            if self._sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self._sampling.seed)
        # torch.multinomial with NaN among the weights corrupts the CUDA context, and a model that lost its weights
        # computes NaN: so scores are made finite, and then at most 0.
        finite = torch.nan_to_num(logits.float(), nan=torch.finfo(torch.float32).min)
        scores, order = torch.sort(finite, descending=True)
        scores = (scores - scores[0]) / self._sampling.temperature
        if self._sampling.top_k > 0:
            scores[self._sampling.top_k :] = float("-inf")
        weights = torch.softmax(scores, dim=-1)
        if self._sampling.top_p < 1.0:
            weights[torch.cumsum(weights, dim=-1) - weights > self._sampling.top_p] = 0.0
        return int(order[torch.multinomial(weights, 1, generator=self._generator)])


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
