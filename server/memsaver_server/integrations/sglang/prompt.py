"""The verification prompt, as a request of SGLang's own that no client sent."""

from __future__ import annotations

import importlib
import uuid
from array import array
from concurrent.futures import Future
from types import ModuleType
from typing import Any

#: Tokens that every vocabulary has.
PROMPT = range(10, 26)
LENGTH = 8


class VerificationPrompt:
    """One computation of the tokens that follow ``PROMPT``.

    Attributes:
        request: what the scheduler is sent.
        tokens: done once they are computed; greedy, from the prompt's first token.
    """

    def __init__(self, scheduler: Any, messages: ModuleType) -> None:
        self._scheduler = scheduler
        sampling = importlib.import_module("sglang.srt.sampling.sampling_params")
        parameters = sampling.SamplingParams(max_new_tokens=LENGTH, temperature=0.0, ignore_eos=True)
        parameters.normalize(None)
        kind = messages.TokenizedGenerateReqInput
        values = {
            # SGLang drops the answers to its health checks if nobody waits for them.
            "rid": f"HEALTH_CHECK_memsaver_{uuid.uuid4().hex}", "input_text": None, "input_ids": array("q", PROMPT),
            "input_embeds": None, "mm_inputs": None, "token_type_ids": None, "sampling_params": parameters,
            "return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "token_ids_logprob": None,
            "stream": False,
        }  # fmt: skip
        fields = getattr(kind, "__struct_fields__", None) or kind.__dataclass_fields__
        self.request = kind(**{name: value for name, value in values.items() if name in fields})
        self.tokens: Future[list[int]] = Future()
        self._running: Any = None

    def note(self) -> None:
        """The scheduler has processed what it received. In its thread."""
        if self._running is None:
            waiting = [each for each in self._scheduler.waiting_queue if each.rid == self.request.rid]
            self._running = waiting[0] if waiting else None
        elif self._running.finished() and not self.tokens.done():
            self.tokens.set_result([int(token) for token in self._running.output_ids])
