"""The reference engine: any Hugging Face causal language model, served in one process, or one for each rank."""

from __future__ import annotations

import asyncio
import atexit
import functools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

import memsaver_core as ms
from memsaver_server.engine import DrainMode, check_drain_mode, memory_of, never
from memsaver_server.ranks import RankMemory
from memsaver_server.reference import checkpoint, tokenizer
from memsaver_server.reference.builtin_model import small_checkpoint
from memsaver_server.reference.options import EngineOptions
from memsaver_server.reference.rank_group import LeadingRunner, RankGroup, RanksFailedError
from memsaver_server.reference.requests import Request
from memsaver_server.reference.runner import ModelRunner
from memsaver_server.reference.sampling import Sampling
from memsaver_server.reference.scheduler import Scheduler
from memsaver_server.reference.tensor_parallel import Place, check_alone, check_divisible
from memsaver_server.reference.updates import WeightUpdate

_GIB = 2**30


class TransformersEngine:
    """Serves a causal language model by transformers, with weights, KV cache, graphs and workspaces in regions.

    Implements ``GeneratingEngine``, ``UpdatableEngine`` and ``VerifiableEngine``. Close it when done; the interpreter's
    exit closes it too.

    Attributes:
        model_name: the folder or configuration file served, or the built-in model's name.
        unwritten_weights: names of the parameters that no update has written since their content was discarded.
    """

    name = "transformers"

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        random_weights: str | Path | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kv_cache_bytes: int | None = None,
        max_len: int | None = None,
        batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
        enforce_eager: bool = False,
        seed: int = 0,
        tensor_parallel: int = 1,
    ) -> None:
        """Load the model and capture its graphs; return when it can serve.

        Args:
            model: a checkpoint folder (config.json and safetensors); None: a small built-in Qwen2.
            random_weights: a config.json to serve with random weights, instead of ``model``.
            device: None: the first device of memsaver's driver.
            dtype: of weights and KV cache; None: the checkpoint's.
            kv_cache_bytes: of each rank; None: 1 GiB on a GPU, 64 MiB on the host.
            max_len: tokens of prompt and output together, per request; None: 2048 on a GPU, 512 on the host.
            batch_sizes: requests computed at once; other numbers are padded to the next of these.
            enforce_eager: run without CUDA graphs.
            seed: of the random weights.
            tensor_parallel: the number of ranks among which the model is divided. Rank 0 is this process; it starts the
                others, on CUDA on the devices after its own, on the host driver on the same one.

        Raises:
            ValueError: an option is invalid; the message says which, and what is valid.
            RuntimeError: the model was not allocated in its region, or a graph could not be captured.
            RanksFailedError: the process of a rank has ended.
        """
        if model is not None and random_weights is not None:
            raise ValueError("give either model or random_weights, not both")
        if not batch_sizes or min(batch_sizes) < 1:
            raise ValueError(f"batch_sizes must name positive numbers, not {list(batch_sizes)}")
        self.device = torch.device(device) if device is not None else ms.torch_device()
        self._check_devices(tensor_parallel)
        on_gpu = self.device.type == "cuda"
        path = Path(random_weights or model or small_checkpoint())
        if random_weights is not None:
            self._tokenizer: tokenizer.Tokenizer | None = tokenizer.Tokenizer(tokenizer.byte_level())
        else:
            self._tokenizer = tokenizer.load_tokenizer(path)
        self.model_name = str(path) if random_weights or model else path.name
        self._options = EngineOptions(
            model=str(path),
            random_weights=random_weights is not None,
            device=str(self.device),
            dtype=str(dtype).removeprefix("torch.") if dtype is not None else "",
            kv_cache_bytes=kv_cache_bytes or (_GIB if on_gpu else 64 * 2**20),
            max_len=max_len or (2048 if on_gpu else 512),
            chunk=256 if on_gpu else 64,
            batch_sizes=tuple(batch_sizes),
            use_graphs=on_gpu and not enforce_eager,
            seed=seed,
        )
        self._group: RankGroup | None = None
        if tensor_parallel > 1:
            check_divisible(checkpoint.load_config(path), tensor_parallel)
            check_alone()
            self._start_ranks(tensor_parallel)
        else:
            self._scheduler = Scheduler(lambda: self._options.make_runner(Place()))
        self._runner = self._scheduler.runner
        self._update = WeightUpdate(self._runner, dtype)
        self._updating = threading.Lock()
        self.unwritten_weights: frozenset[str] = frozenset()
        atexit.register(self.close)

    def _check_devices(self, ranks: int) -> None:
        if ranks < 1:
            raise ValueError(f"tensor_parallel must be at least 1, not {ranks}")
        needed = (self.device.index or 0) + ranks
        if self.device.type == "cuda" and needed > torch.cuda.device_count():
            raise ValueError(f"tensor_parallel={ranks} needs {needed} devices; there are {torch.cuda.device_count()}")

    def _start_ranks(self, ranks: int) -> None:
        group = self._group = RankGroup(self._options, ranks, self._ranks_failed)

        def make_runner() -> ModelRunner:
            group.join(self.device)
            return self._options.make_runner(Place(0, ranks), functools.partial(LeadingRunner, group))

        def load() -> None:
            self._scheduler = Scheduler(make_runner)
            group.await_ready()

        try:
            group.load(load)
            if ms.core_settings().prepare_backup:
                ms.prepare_backup()  # as the other ranks do
            #: The memory of all ranks.
            self.memory = RankMemory(group.channel)
        except BaseException as error:
            self.close()
            if group.failure is not None and not isinstance(error, ValueError):
                raise group.failure from error
            raise

    def _ranks_failed(self, why: str, error: RanksFailedError) -> None:
        if hasattr(self, "memory"):
            self.memory.fail(why)
        if hasattr(self, "_scheduler"):
            self._scheduler.fail(error)

    # The methods of ``Engine``.

    def is_alive(self) -> bool:
        return self._scheduler.alive and memory_of(self).status().state != "failed"

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        self._scheduler.close_admission(reason, hold)

    def open_admission(self) -> None:
        self._scheduler.open_admission()

    def drain(self, timeout_s: float, mode: DrainMode = "wait", given_up: Callable[[], bool] = never) -> None:
        """See ``Engine``. Frozen requests continue from the KV cache if it was kept, else by computing it again.

        Raises:
            DrainTimeoutError: it took longer; the engine continues as before.
            ValueError: the mode is unknown.
        """
        check_drain_mode(mode)
        self._scheduler.drain(timeout_s, mode, given_up)

    def flush_cache(self) -> None:
        self._scheduler.forget_prefixes()

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> Collection[str]:
        """See ``Engine``. Lost graphs are captured anew.

        Lost weights have to be written by `update_weights_from_disk` or `update_weights_from_tensor`; what the model
        computes at load besides them is restored here.
        """
        if lost:
            self._scheduler.call(lambda: self._repair(lost))
        return [tag for tag in lost if tag != "weights"]

    def verify_tokens(self) -> list[int]:
        return self._scheduler.call(self._runner.verify_tokens)

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """See ``Engine``; ``rid`` names the request.

        Raises:
            AdmissionClosedError: the engine takes no requests now.
            ValueError: the request cannot be served; the message says why.
            EngineDeadError: the engine is dead.
        """
        return self._answer(await asyncio.wrap_future(self.submit(request)))

    def update_weights_from_disk(
        self, model_path: str | Path, *, flush_cache: bool = True, abort_all_requests: bool = False
    ) -> int:
        """See ``Engine``.

        Raises:
            ValueError: the folder's model has other tensors; nothing was written.
            RuntimeError: the weights are released.
        """
        folder = str(Path(model_path).absolute())
        with self._updating:
            self._update.read_folder(Path(folder))
            self._ask_others("read_folder", folder=folder)
            return self._write(flush_cache, abort_all_requests)

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
    ) -> int:
        """See ``Engine``. The request has SGLang's shape, but with one payload for all ranks: it names whole tensors.

        The payload is base64 of a **safetensors** image. SGLang's clients send pickles, whose reading runs code of the
        sender; those are refused.

        Raises:
            ValueError: the payload is not safetensors, or names tensors that the model lacks; nothing was written.
            RuntimeError: the weights are released.
        """
        with self._updating:
            self._update.read_payload(serialized_named_tensors, load_format)
            self._ask_others("read_payload", payload=list(serialized_named_tensors), load_format=load_format)
            return self._write(flush_cache, abort_all_requests)

    # For programs in this process.

    def submit(self, request: dict[str, Any]) -> Future[Request]:
        """Queue a request of `generate`, from any thread. Cancelling the future ends it."""
        return self._scheduler.submit(self._parse(request))

    def generate_sync(self, request: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        """As `generate`, without an event loop."""
        return self._answer(self.submit(request).result(timeout_s))

    def abort_all(self) -> None:
        """End every request in flight with the tokens that it has."""
        self._scheduler.abort("aborted by request")

    def describe(self) -> dict[str, Any]:
        """Return what is served and how, for logs."""
        return {
            "model": self.model_name,
            "device": str(self.device),
            "ranks": self._runner.partition.place.ranks,
            "slots": self._runner.slots,
            "max_len": self._runner.length,
            "max_batch": self._runner.max_batch,
            "graph_batch_sizes": self._runner.captured,
        }

    def end_waits(self) -> None:
        """Kill the other ranks, from any thread, which ends what waits for them. Only `close` may follow."""
        if self._group is not None:
            self._group.kill("the engine was shut down")

    def close(self) -> None:
        """Stop the scheduler, end the other ranks and free all device memory. Requests in flight fail. Idempotent."""
        if hasattr(self, "memory"):
            self.memory.close()
        if hasattr(self, "_scheduler"):
            self._scheduler.close()
        if self._group is not None:
            self._group.close()
        atexit.unregister(self.close)

    def _ask_others(self, name: str, **fields: Any) -> None:
        """Have the other ranks do what this one has done, and wait until they have."""
        if self._group is not None:
            self._group.ask(name, **fields)

    def _write(self, flush_cache: bool, abort_all_requests: bool) -> int:
        """Write the update that all ranks have read."""
        if abort_all_requests:
            self.abort_all()

        def write() -> int:
            self._ask_others("write")
            written = self._update.write()
            self.unwritten_weights -= checkpoint.names_of_same(self._runner.model, written)
            if flush_cache:
                self._scheduler.forget_cache()
            return len(written)

        return self._scheduler.call(write)

    def _repair(self, lost: Sequence[str]) -> None:
        self._runner.repair(lost)
        if "weights" in lost:
            self.unwritten_weights = frozenset(name for name, _ in self._runner.model.named_parameters())
        if "kv_cache" in lost:
            self._scheduler.forget_cache()

    def _parse(self, request: dict[str, Any]) -> Request:
        text, ids = request.get("text"), request.get("input_ids")
        if (text is None) == (ids is None):
            raise ValueError("give either text or input_ids")
        if text is not None:
            if not isinstance(text, str):
                raise ValueError(f"text must be a string, not {type(text).__name__}; send one request for each prompt")
            if self._tokenizer is None:
                raise ValueError("the checkpoint has no tokenizer: send input_ids instead of text")
            ids = self._tokenizer.encode(text)
        vocabulary = self._runner.vocabulary
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocabulary for i in ids):
            raise ValueError(f"the prompt must be a list of one or more ids from 0 to {vocabulary - 1}")
        if len(ids) >= self._runner.length:
            raise ValueError(f"the prompt has {len(ids)} tokens; with its output it must fit {self._runner.length}")
        parsed = Request(prompt=ids, sampling=Sampling.parse(request.get("sampling_params")))
        if isinstance(request.get("rid"), str):
            parsed.name = request["rid"]
        return parsed

    def _answer(self, request: Request) -> dict[str, Any]:
        text = ""
        if self._tokenizer is not None:
            text = self._tokenizer.decode(request.output, request.sampling.skip_special_tokens)
        return {"text": text, "output_ids": request.output, "meta_info": request.meta_info()}
