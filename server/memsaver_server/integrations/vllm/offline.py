"""vLLM's ``LLM``, which generates in the threads of its callers."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from memsaver_core.ranks.connection import started
from memsaver_core.ranks.protocol import Plain
from memsaver_server.engine import DrainMode
from memsaver_server.gate import Gate
from memsaver_server.integrations.vllm.api_server import greedy
from memsaver_server.integrations.vllm.engine_cores import processes

_T = TypeVar("_T")

#: The methods by which an ``LLM`` generates.
CALLS = ("generate", "chat", "beam_search", "encode", "embed", "classify", "score", "reward", "wait_for_completion")


class OfflineClient:
    """An ``LLM``, whose calls must not overlap; ``lock`` is held during each, generation included."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.lock = threading.Lock()

    @property
    def processes(self) -> dict[str, int]:
        return processes(self._llm.llm_engine.engine_core)

    def start(self, message: Plain) -> Future[list[Plain]]:
        return self._started(lambda: self._llm.collective_rpc("memsaver", args=(message,)))

    def sleep(self, level: int) -> Future[None]:
        return self._started(lambda: self._llm.sleep(level, "keep"))

    def pause(self, mode: DrainMode, timeout_s: float, given_up: Callable[[], bool]) -> None:
        with self.lock:
            self._llm.sleep(0, "keep" if mode == "wait" else mode)  # the gate is drained: no call generates

    def wake_up(self, tags: list[str] | None) -> None:
        with self.lock:
            self._llm.wake_up(tags)

    run_scheduler = wake_up

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the ``count`` tokens that greedy decoding appends to ``prompt``, without cached prefixes."""
        call = getattr(self._llm.generate, "__wrapped__", self._llm.generate)  # not by the gate, which is closed
        with self.lock:
            self._llm.reset_prefix_cache()
            [output] = call([{"prompt_token_ids": list(prompt)}], greedy(count), use_tqdm=False)
            self._llm.reset_prefix_cache()
            return list(output.outputs[0].token_ids)

    def pending(self) -> list[str]:
        """Return nothing: an offline engine generates only inside its callers' calls, which are drained."""
        return []

    def reset_prefix_cache(self) -> None:
        with self.lock:
            self._llm.reset_prefix_cache()

    forget_prefixes = reset_prefix_cache

    def _started(self, call: Callable[[], _T]) -> Future[_T]:
        """Begin a call. A thread for each: one that hangs must not keep the process from ending."""

        def locked() -> _T:
            with self.lock:
                return call()

        return started(locked)

    def model_name(self) -> str:
        return str(getattr(getattr(self._llm.llm_engine, "model_config", None), "model", ""))

    def is_alive(self) -> bool:
        return not getattr(getattr(self._llm.llm_engine.engine_core, "resources", None), "engine_dead", False)


def gate_calls(llm: Any, gate: Gate, lock: threading.Lock) -> None:
    """Make each call by which ``llm`` generates one request of ``gate``, with ``lock`` held."""
    thread = threading.local()

    def gated(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def enter(*args: Any, **kwargs: Any) -> Any:
            if getattr(thread, "inside", False):  # one of these calls another
                return call(*args, **kwargs)
            with gate.request(name), lock:
                thread.inside = True
                try:
                    return call(*args, **kwargs)
                finally:
                    thread.inside = False

        return enter

    for name in CALLS:
        if hasattr(llm, name):
            setattr(llm, name, gated(name, getattr(llm, name)))
