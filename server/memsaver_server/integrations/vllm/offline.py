"""vLLM's ``LLM``, which generates in the threads of its callers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from memsaver_core.ranks.connection import started
from memsaver_core.ranks.protocol import Plain
from memsaver_server.engine import DrainMode
from memsaver_server.gate import Gate
from memsaver_server.integrations.vllm.api_server import greedy, log_failure, wait_for_pause
from memsaver_server.integrations.vllm.engine_cores import processes

_T = TypeVar("_T")

#: The methods by which an ``LLM`` generates.
CALLS = ("generate", "chat", "beam_search", "encode", "embed", "classify", "score", "reward", "wait_for_completion")


class OfflineClient:
    """An ``LLM``, whose calls must not overlap: they run in the order in which they were begun. One that hangs keeps
    those after it waiting, and nobody else."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._lock = threading.Lock()  # held during each call, generation included
        self._beginning = threading.Lock()
        self._last: Future[Any] = started(lambda: None)
        self._wake_up: Future[None] = self._last

    @property
    def processes(self) -> dict[str, int]:
        return processes(self._llm.llm_engine.engine_core)

    def start(self, message: Plain) -> Future[list[Plain]]:
        return self._begin(lambda: self._llm.collective_rpc("memsaver", args=(message,)))

    def sleep(self, level: int) -> Future[None]:
        return self._begin(lambda: self._llm.sleep(level, "keep"))

    def pause(self, mode: DrainMode, timeout_s: float, given_up: Callable[[], bool]) -> None:
        vllm_mode = "keep" if mode == "wait" else mode  # the gate is drained: no call generates
        pausing = self._begin(lambda: self._llm.sleep(0, vllm_mode))
        wait_for_pause(pausing, timeout_s, given_up, lambda: ["a call of the LLM that has not returned"])

    def wake_up(self, tags: list[str] | None) -> None:
        """Have vLLM resume ``tags``, all if None. Does not block: what generates next waits for it."""
        self._wake_up = self.run_scheduler(tags)
        self._wake_up.add_done_callback(log_failure)

    def run_scheduler(self, tags: list[str] | None) -> Future[None]:
        """As ``wake_up``; the result tells its end."""
        return self._begin(lambda: self._llm.wake_up(tags))

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Run the block, in which the ``LLM`` generates, alone and after the last wake-up.

        Raises:
            Exception: what the wake-up raised: an engine that is paused would not return.
        """
        self._wake_up.result()
        with self._lock:
            yield

    def generate(self, prompt: Sequence[int], count: int) -> Future[list[int]]:
        """Compute the ``count`` tokens that greedy decoding appends to ``prompt``, without cached prefixes."""
        call = getattr(self._llm.generate, "__wrapped__", self._llm.generate)  # not by the gate, which is closed

        def generated() -> list[int]:
            self._llm.reset_prefix_cache()
            [output] = call([{"prompt_token_ids": list(prompt)}], greedy(count), use_tqdm=False)
            self._llm.reset_prefix_cache()
            return list(output.outputs[0].token_ids)

        return self._begin(generated)

    def pending(self) -> list[str]:
        """Return nothing: an offline engine generates only inside its callers' calls, which are drained."""
        return []

    def reset_prefix_cache(self) -> None:
        self._begin(lambda: self._llm.reset_prefix_cache()).result()

    forget_prefixes = reset_prefix_cache

    def _begin(self, call: Callable[[], _T]) -> Future[_T]:
        """Begin a call. A thread for each: one that hangs must not keep the process from ending."""

        def in_turn(before: Future[Any]) -> _T:
            wait([before])
            with self._lock:
                return call()

        with self._beginning:
            begun = started(functools.partial(in_turn, self._last))
            self._last = begun
        return begun

    def model_name(self) -> str:
        return str(getattr(getattr(self._llm.llm_engine, "model_config", None), "model", ""))

    def is_alive(self) -> bool:
        return not getattr(getattr(self._llm.llm_engine.engine_core, "resources", None), "engine_dead", False)


def gate_calls(llm: Any, gate: Gate, client: OfflineClient) -> None:
    """Make each call by which ``llm`` generates one request of ``gate``, and one of ``client``'s calls."""
    thread = threading.local()

    def gated(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def enter(*args: Any, **kwargs: Any) -> Any:
            if getattr(thread, "inside", False):  # one of these calls another
                return call(*args, **kwargs)
            with gate.request(name), client.generating():
                thread.inside = True
                try:
                    return call(*args, **kwargs)
                finally:
                    thread.inside = False

        return enter

    for name in CALLS:
        if hasattr(llm, name):
            setattr(llm, name, gated(name, getattr(llm, name)))
