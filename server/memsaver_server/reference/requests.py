"""A request: its sampling parameters, and its tokens so far."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from pydantic import AliasChoices, BaseModel, Field, ValidationError
from torch import Tensor

from memsaver_server.wrong_fields import wrong_fields

#: Sampling parameters that this engine does not support, with the values that have no effect, which it accepts.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "min_p": (0,), "min_new_tokens": (0,), "frequency_penalty": (0,), "presence_penalty": (0,),
    "repetition_penalty": (1,), "stop": ("", []), "json_schema": (), "regex": (), "ebnf": (), "logit_bias": ({},),
}  # fmt: skip

_Natural = Annotated[int, Field(strict=True, ge=0)]


class Sampling(BaseModel, frozen=True):
    """A request's sampling parameters, as SGLang and vLLM name them; ``top_k`` -1 or 0 stands for all tokens."""

    max_new_tokens: int = Field(128, strict=True, ge=1)
    temperature: float = Field(0.0, strict=True, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(1.0, strict=True, ge=1e-6, le=1, allow_inf_nan=False)
    top_k: int = Field(-1, strict=True, ge=-1)
    seed: _Natural | None = Field(None, validation_alias=AliasChoices("seed", "sampling_seed"))
    stop_token_ids: frozenset[_Natural] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    @classmethod
    def parse(cls, given: Any) -> Sampling:
        """Read a request's ``sampling_params``; None stands for the default, unknown names are ignored. Raises
        ValueError if a value is out of range, or needs something that this engine does not support."""
        if given is not None and not isinstance(given, Mapping):
            raise ValueError(f"sampling_params must be an object, not {type(given).__name__}")
        values = {name: value for name, value in (given or {}).items() if value is not None}
        for name, neutral in NEUTRAL.items():
            if name in values and values[name] not in neutral:
                raise ValueError(f"sampling_params.{name} = {values[name]!r} is not supported by this engine")
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ValueError(f"sampling_params.{wrong_fields(error)}") from None


@dataclass(eq=False)
class Request:
    """A prompt and its output so far, together ``ids``. Once submitted, only the scheduler changes it. Its ``slot``
    (-1: none) holds keys and values of the first ``cached`` ids, of which an earlier request computed ``reused``.
    ``finish`` is None until the request ends; then it is SGLang's ``finish_reason``, or the error to answer with."""

    prompt: list[int]
    sampling: Sampling
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    cached: int = 0
    reused: int = 0
    slot: int = -1
    finish: dict[str, Any] | BaseException | None = None
    future: Future[Request] = field(default_factory=Future)
    submitted: float = field(default_factory=time.monotonic)
    _generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)
        self.greedy = self.sampling.temperature < 1e-5 or self.sampling.top_k == 1  # 1e-5: as in vLLM

    @property
    def output(self) -> list[int]:
        return self.ids[len(self.prompt) :]

    @property
    def needs_prefill(self) -> bool:
        return self.cached < len(self.ids) - 1

    def pick(self, logits: Tensor) -> int:
        """Draw the next token from ``logits`` ``[vocabulary]``; NaN is the least likely."""
        if self.greedy:
            return int(torch.argmax(logits))
        if self._generator is None:
            seed = secrets.randbits(63) if self.sampling.seed is None else self.sampling.seed % 2**63
            self._generator = torch.Generator(logits.device).manual_seed(seed)
        # A model that lost its weights computes NaN, with which torch.multinomial corrupts the CUDA context.
        finite = torch.nan_to_num(logits.float(), nan=torch.finfo(torch.float32).min)
        scores, order = torch.sort(finite, descending=True)
        scores = (scores - scores[0]) / self.sampling.temperature
        if self.sampling.top_k > 0:
            scores[self.sampling.top_k :] = float("-inf")
        weights = torch.softmax(scores, dim=-1)
        if self.sampling.top_p < 1.0:
            weights[torch.cumsum(weights, dim=-1) - weights > self.sampling.top_p] = 0.0
        return int(order[torch.multinomial(weights, 1, generator=self._generator)])

    def accept(self, token: int, stops: frozenset[int], limit: int) -> None:
        """Append the next token; the request ends after one of ``stops``, or at ``limit`` ids, which fill its slot."""
        self.ids.append(token)
        count = len(self.output)
        if token in self.sampling.stop_token_ids or (token in stops and not self.sampling.ignore_eos):
            self.finish = {"type": "stop", "matched": token}
        elif count >= self.sampling.max_new_tokens or len(self.ids) >= limit:
            self.finish = {"type": "length", "length": count}

    def meta_info(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "finish_reason": self.finish,
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.output),
            "cached_tokens": self.reused,
            "e2e_latency": time.monotonic() - self.submitted,
        }
