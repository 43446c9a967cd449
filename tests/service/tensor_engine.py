"""A small real implementation of the engine protocol.

It owns torch tensors in memsaver's regions. Every token is computed from its weights, and cached prefixes are read back
from its KV cache: a request that reached released memory would crash the process or give another token.
"""

from __future__ import annotations

import asyncio
import base64
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

import memsaver_core as ms
from memsaver_server import clock
from memsaver_server.engine import DRAIN_POLL_S, AdmissionClosedError, DrainMode, DrainTimeoutError, never

VOCABULARY = 997
ALL_TAGS = ["cuda_graph", "kv_cache", "weights", "workspace"]
MIB = 1 << 20
#: Of the memory that the engines of a test process share: little, as each test writes and copies all of it.
WEIGHTS_BYTES, KV_BYTES, OTHER_BYTES = 2 * MIB, 4 * MIB, MIB // 4


class Memory:
    """The memory of an engine: weights, a KV cache, graph state and a workspace, each in its region.

    A ``bare`` one has no graph state and no workspace there.
    """

    def __init__(
        self, *, bare: bool = False, weights_bytes: int = 8 * MIB, kv_bytes: int = 16 * MIB, other_bytes: int = MIB
    ) -> None:
        device = ms.torch_device()
        with ms.region("weights"):
            self.weights = torch.empty(weights_bytes // 8, dtype=torch.int64, device=device)
        with ms.region("kv_cache"):
            self.kv = torch.empty(kv_bytes // 8, dtype=torch.int64, device=device)
        with nullcontext() if bare else ms.region("cuda_graph"):
            self.graph = torch.empty(other_bytes // 8, dtype=torch.int64, device=device)
        with nullcontext() if bare else ms.region("workspace"):
            self.workspace = torch.empty(other_bytes // 8, dtype=torch.int64, device=device)
        self._loads = 0

    def load(self) -> None:
        """Write the content of a new engine. One word that no token depends on differs, so that no old backup
        matches."""
        generator = torch.Generator().manual_seed(7)
        self.weights.copy_(torch.randint(1, VOCABULARY, self.weights.shape, generator=generator))
        self._loads += 1
        self.weights[-1] = self._loads
        self.kv.zero_()
        self.graph.fill_(31)


class TensorEngine:
    """Computes tokens by arithmetic, with admission, drain, freezing and a prefix cache as a real engine has."""

    name = "tensor engine"

    def __init__(self, memory: Memory) -> None:
        memory.load()
        self.weights, self.kv, self.graph, self.workspace = memory.weights, memory.kv, memory.graph, memory.workspace
        self.tokens_computed = 0
        self.repairs: list[tuple[list[str], list[str]]] = []
        self.alive = True
        self._prefixes: dict[tuple[int, ...], int] = {}
        self._state = threading.Condition()
        self._closed: str | None = None
        self._hold = 0
        self._held = 0
        self._running: dict[str, str] = {}
        self._frozen = False
        self._aborting = False
        self._blocked = False
        self._threads = ThreadPoolExecutor(64, thread_name_prefix="engine")

    # -- the protocol --------------------------------------------------------------------------------------------------

    def is_alive(self) -> bool:
        return self.alive

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        with self._state:
            self._closed, self._hold = reason, hold
            self._state.notify_all()

    def open_admission(self) -> None:
        with self._state:
            self._closed, self._frozen = None, False
            self._state.notify_all()

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        deadline = clock.monotonic() + timeout_s
        with self._state:
            was_frozen = self._frozen
            if mode == "abort":
                self._aborting = True
            elif mode == "keep":
                self._frozen = True
            self._state.notify_all()
            try:
                while self._in_flight():
                    self._state.wait(max(0.0, min(DRAIN_POLL_S, deadline - clock.monotonic())))
                    if self._in_flight() and (given_up() or clock.monotonic() >= deadline):
                        self._frozen = was_frozen
                        self._state.notify_all()
                        raise DrainTimeoutError(timeout_s, self._in_flight())
            finally:
                self._aborting = False

    def flush_cache(self) -> None:
        with self._state:
            self._prefixes.clear()

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        self.repairs.append((list(tags), list(lost)))
        if "kv_cache" in lost:
            self.flush_cache()

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        ids, sampling = request.get("input_ids"), request.get("sampling_params") or {}
        if not isinstance(ids, list) or not ids or not all(isinstance(i, int) and 0 <= i < VOCABULARY for i in ids):
            raise ValueError(f"input_ids must be a list of token numbers below {VOCABULARY}")
        new = sampling.get("max_new_tokens", 4) if isinstance(sampling, dict) else None
        if not isinstance(new, int) or not 0 <= new <= 4096:
            raise ValueError("sampling_params.max_new_tokens must be a number from 0 to 4096")
        name = str(request.get("rid") or uuid.uuid4().hex[:8])
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._serve, name, ids, new)

    def update_weights_from_disk(
        self, model_path: str, *, flush_cache: bool = True, abort_all_requests: bool = False
    ) -> int:
        return self._write(Path(model_path).read_bytes())

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
    ) -> int:
        if len(serialized_named_tensors) != 1:
            raise ValueError("one payload is needed: this engine has one rank")
        return self._write(base64.b64decode(serialized_named_tensors[0]))

    def _write(self, image: bytes) -> int:
        """Overwrite the weights with the only tensor of a safetensors image."""
        try:
            given = safetensors.torch.load(image)["weights"]
        except (safetensors.SafetensorError, KeyError) as error:
            raise ValueError(f"no weights in there: {error}") from None
        self.weights.copy_(given)
        self.flush_cache()
        return 1

    # -- internals ------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    @property
    def held(self) -> int:
        return self._held

    def block(self) -> None:
        """Compute no token until ``unblock``, so that requests stay in flight."""
        with self._state:
            self._blocked = True

    def unblock(self) -> None:
        with self._state:
            self._blocked = False
            self._state.notify_all()

    def wait_until(self, condition: Any, timeout_s: float = 240.0) -> None:
        """Wait until ``condition(self)`` holds; it is checked whenever a request makes progress."""
        with self._state:
            assert self._state.wait_for(lambda: condition(self), timeout_s), "the engine never came to that"

    def in_flight(self) -> list[str]:
        return list(self._running)

    def close(self) -> None:
        """Let all requests go. The memory stays, resident, for the next engine."""
        self.unblock()
        self.open_admission()
        self._threads.shutdown(wait=True)
        ms.resume()

    def _in_flight(self) -> list[str]:
        return [name for name, state in self._running.items() if state == "running"]

    def _enter(self, name: str) -> None:
        with self._state:
            if self._closed is not None:
                if self._held >= self._hold:
                    raise AdmissionClosedError(self._closed)
                self._held += 1
                self._state.notify_all()
                self._state.wait_for(lambda: self._closed is None)
                self._held -= 1
            self._running[name] = "running"
            self._state.notify_all()

    def _serve(self, name: str, ids: list[int], new: int) -> dict[str, Any]:
        self._enter(name)
        started = time.monotonic()
        output: list[int] = []
        finish = "length"
        try:
            while len(output) < new:
                if not self._step(name):
                    finish = "abort"
                    break
                output.append(self._token([*ids, *output]))
        finally:
            with self._state:
                del self._running[name]
                self._state.notify_all()
        about = {"id": name, "finish_reason": {"type": finish}, "completion_tokens": len(output)}
        return {
            "text": " ".join(map(str, output)),
            "output_ids": output,
            "meta_info": {**about, "e2e_latency": time.monotonic() - started},
        }

    def _step(self, name: str) -> bool:
        """Wait until a token may be computed; False if the request must end instead."""
        with self._state:
            while not self._aborting and (self._frozen or self._blocked):
                self._running[name] = "frozen" if self._frozen else "running"
                self._state.notify_all()
                self._state.wait()
            self._running[name] = "running"
            return not self._aborting

    def _token(self, ids: list[int]) -> int:
        """Compute the token after ``ids`` from the weights; sums of known prefixes come from the KV cache."""
        self.tokens_computed += 1
        key = tuple(ids[:-1])
        with self._state:
            slot = self._prefixes.get(key)
            if slot is None:
                slot = self._prefixes[key] = len(self._prefixes) % self.kv.numel()
                self.kv[slot] = sum(int(self.weights[token]) for token in key) + 1
            known = int(self.kv[slot])
            self.workspace[0] = known * int(self.graph[0])
            return (int(self.workspace[0]) + int(self.weights[ids[-1]])) % VOCABULARY


@contextmanager
def tenant(left: int) -> Iterator[None]:
    """Another tenant of the device: while the block runs, so many bytes are free."""
    (device,) = ms.read_devices()
    with ms.region("tenant"):
        memory = torch.ones(device.total_bytes - device.used_bytes - left, dtype=torch.uint8)
    yield
    del memory
