"""The reference engine: any Hugging Face causal language model, served in one process, or one for each rank."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from memsaver_server.engine import memory_of
from memsaver_server.reference.builtin_model import byte_level
from memsaver_server.reference.ranks import RankGroup
from memsaver_server.reference.requests import Request, Sampling
from memsaver_server.reference.runner import ModelRunner, Options
from memsaver_server.reference.scheduler import Scheduler


class TransformersEngine(Scheduler):
    """Implements ``GeneratingEngine``, ``UpdatableEngine`` and ``VerifiableEngine`` by transformers, with weights, KV
    cache, graphs and workspaces in regions. The interpreter closes it at its exit. With several ranks, this process is
    rank 0 and starts the others, and ``memory`` is that of all; with one rank, this is a ``ResizableEngine``, too."""

    name = "transformers"
    updates_asleep = True

    def __init__(self, model: str | Path | None = None, **given: Any) -> None:
        """Load the model and capture its graphs; return once requests can be served. For ``given`` and ValueError see
        ``Options``. Raises RuntimeError if a graph cannot be captured, RanksFailedError if a rank ends or is silent."""
        options = Options(model, **given)
        self.device = options.device_of(0)
        self.model_name = str(options.path) if options.random_weights or model else options.path.name
        self._tokenizer = byte_level() if options.random_weights is not None else _load_tokenizer(options.path)
        self._group: RankGroup | None = None
        if options.tensor_parallel == 1:
            super().__init__(partial(ModelRunner, options))
        else:
            group = self._group = RankGroup(options)
            try:
                super().__init__(group.make_runner, group.load)
            except BaseException as error:
                self.fail(error)
                group.close()
                raise
            self.memory = group.memory
            self.resize_kv_cache = None  # type: ignore[assignment]  # each rank has a part of the cache
            group.failed.add_done_callback(lambda _: self.fail(group.error()))
        atexit.register(self.close)

    def is_alive(self) -> bool:
        return super().is_alive() and memory_of(self).status().state != "failed"

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> Collection[str]:
        """See ``Engine``. Lost graphs are captured again; lost weights are left to an update."""
        if lost:
            self.call(partial(self.runner.repair, lost))
        if "kv_cache" in lost:
            self.call(self.forget_cache)
        return [tag for tag in lost if tag != "weights"]

    def verify_tokens(self) -> list[int]:
        return self.call(self.runner.verify_tokens)

    @property
    def unwritten_weights(self) -> frozenset[str]:
        return self.runner.unwritten_weights

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """See ``GeneratingEngine``; ``rid`` names the request. Also raises EngineDeadError."""
        return self._answer(await asyncio.wrap_future(self.submit(request)))

    def update_weights_from_disk(
        self, model_path: str | Path, *, flush_cache: bool = True, abort_all_requests: bool = False
    ) -> int:
        """See ``UpdatableEngine``; raises RuntimeError if the weights are released and not lent host memory."""
        return self._update(flush_cache, abort_all_requests, folder=str(Path(model_path).absolute()))

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = True,
        abort_all_requests: bool = False,
    ) -> int:
        """As from disk, with one payload for all ranks: base64 of a **safetensors** image of whole tensors. The pickles
        that SGLang's clients send are refused: reading one runs code of its sender."""
        return self._update(flush_cache, abort_all_requests, payload=serialized_named_tensors, load_format=load_format)

    def submit(self, request: dict[str, Any]) -> Future[Request]:
        """Queue a request for ``generate``, from any thread. Cancelling the future ends the request."""
        return self.enqueue(self._parse(request))

    def describe(self) -> dict[str, Any]:
        return {
            "model": self.model_name,
            "device": str(self.device),
            "ranks": self.runner.ranks,
            "slots": self.runner.slots,
            "max_len": self.runner.length,
            "max_batch": self.runner.max_batch,
            "graph_batch_sizes": sorted(batch for batch, tokens in self.runner.graphs if tokens == 1),
        }

    def end_waits(self) -> None:
        """Kill the other ranks, which ends every wait for them. From any thread. After it, only call ``close``."""
        if self._group is not None:
            self._group.kill("the engine was shut down")

    def close(self) -> None:
        """Stop the scheduler, end the other ranks and free device memory. Requests in flight fail. Idempotent."""
        if self._group is not None:
            self.memory.close()
        super().close()
        if self._group is not None:
            self._group.close()
        atexit.unregister(self.close)

    def _update(self, flush_cache: bool, abort_all_requests: bool, **source: Any) -> int:
        """Have all ranks read an update, and write it once all have. Returns how many tensors were written. The service
        makes one update at a time."""

        def write() -> int:
            written = self.runner.write_update()
            if flush_cache:
                self.forget_cache()
            return written

        self.runner.read_update(**source)
        if abort_all_requests:
            self.abort_all()
        return self.call(write)

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
        vocabulary = self.runner.vocabulary
        if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocabulary for i in ids):
            raise ValueError(f"the prompt must be a list of one or more ids from 0 to {vocabulary - 1}")
        if len(ids) >= self.runner.length:
            raise ValueError(f"the prompt has {len(ids)} tokens; with its output it must fit {self.runner.length}")
        name = {"name": request["rid"]} if isinstance(request.get("rid"), str) else {}
        return Request(ids, Sampling.parse(request.get("sampling_params")), **name)

    def _answer(self, request: Request) -> dict[str, Any]:
        decode = self._tokenizer.decode if self._tokenizer is not None else lambda *_, **__: ""
        text = decode(request.output, skip_special_tokens=request.sampling.skip_special_tokens)
        return {"text": text, "output_ids": request.output, "meta_info": request.meta_info()}


def _load_tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
