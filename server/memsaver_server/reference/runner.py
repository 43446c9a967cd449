"""Runs one rank's part of a model on one device, by captured CUDA graphs if there are any."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import memsaver_core as ms
from memsaver_core import process
from memsaver_core.updates import filled_tags
from memsaver_server.reference import weights
from memsaver_server.reference.attention import Pair, SlotCache, distances
from memsaver_server.reference.builtin_model import small_checkpoint

#: The spare slot, which no request gets. Slot ``n`` has the index ``n + 1`` in the cache, so this one is the first.
_SPARE = -1

#: Tokens to compute: the slot, the position of the first of them in it, and the tokens.
Row = tuple[int, int, list[int]]


@dataclass
class Options:
    """What an engine serves, and how. Raises ValueError if an option is invalid; it says which, and what is valid."""

    model: str | Path | None = None  # a checkpoint folder (config.json, safetensors); None: a small built-in Qwen2
    random_weights: str | Path | None = None  # a config.json to serve with random weights, instead of ``model``
    #: Of rank 0; on CUDA the other ranks have the devices after it, on the host the same one. None: memsaver's first.
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None  # of weights and KV cache; None: the checkpoint's
    kv_cache_bytes: int | None = None  # of each rank; None: 1 GiB on a GPU, 64 MiB on the host
    max_len: int | None = None  # tokens of prompt and output, per request; None: 2048 on a GPU, 512 on the host
    batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)  # requests computed at once; padded to the next of these
    enforce_eager: bool = False  # run without CUDA graphs
    seed: int = 0  # of the random weights
    tensor_parallel: int = 1  # ranks among which the model is divided

    def __post_init__(self) -> None:
        if self.model is not None and self.random_weights is not None:
            raise ValueError("give either model or random_weights, not both")
        if not self.batch_sizes or min(self.batch_sizes) < 1:
            raise ValueError(f"batch_sizes must name positive numbers, not {list(self.batch_sizes)}")
        ranks, last = self.tensor_parallel, self.device_of(self.tensor_parallel - 1)
        if last.type == "cuda" and (needed := last.index + 1) > (there := torch.cuda.device_count()):
            if not there:
                raise ValueError("torch finds no NVIDIA GPU; see memsaver doctor, or set MEMSAVER_DRIVER=host")
            raise ValueError(f"tensor_parallel={ranks} needs {needed} devices; there are {there}")
        self.path = Path(self.random_weights or self.model or small_checkpoint())
        if ranks != 1:
            weights.check_divisible(weights.load_config(self.path), ranks)

    def device_of(self, rank: int) -> torch.device:
        first = ms.torch_device() if self.device is None else torch.device(self.device)
        return torch.device("cuda", (first.index or 0) + rank) if first.type == "cuda" else first


class ModelRunner:
    """A model, its slots, and the static inputs and outputs of its steps, each in its region. Prompts are computed in
    chunks of one shape, next tokens in batches of a few shapes, padded with rows on a spare slot. On a CUDA device
    ``graphs`` has one for each shape: (rows, tokens of a row). After a step, ``logits`` has those of each row's next
    token. ``unwritten_weights`` names parameters that were discarded, and that no update has written since.

    Only the thread that makes a runner may use it: regions apply to one thread, and so does a cuBLAS handle, whose
    workspace is in a region.
    """

    def __init__(self, options: Options, rank: int = 0) -> None:
        """Load the model and capture its graphs; several ranks do so at the same time. Raises ValueError if the options
        do not fit the model, RuntimeError if a graph cannot be captured."""
        self.ranks = options.tensor_parallel
        self._device = options.device_of(rank)
        on_gpu = self._device.type == "cuda"
        self.chunk = 256 if on_gpu else 64
        self._batch_sizes = sorted(set(options.batch_sizes))
        self.max_batch = self._batch_sizes[-1]
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None
        self._on_stream: Any = torch.cuda.stream(self._stream) if on_gpu else nullcontext()
        self._update: dict[str, Tensor] = {}
        self.unwritten_weights: frozenset[str] = frozenset()
        with torch.no_grad(), self._on_stream:
            seed = None if options.random_weights is None else options.seed
            part = weights.load_part(options.path, self._device, options.dtype, seed, rank, self.ranks)
            self.model, self.partition = part
            ms.adopt(self.model, "weights")  # a region does not apply to what other threads loaded
            self._buffers = {name: buffer.detach().cpu().clone() for name, buffer in self.model.named_buffers()}
            ids = self.model.generation_config.eos_token_id
            self.stop_ids = frozenset(() if ids is None else ids if isinstance(ids, list) else [ids])
            lengths, sizes = (2048, 2**30) if on_gpu else (512, 2**26)
            self._allocate(options.max_len or lengths, options.kv_cache_bytes or sizes)
            if on_gpu:
                with ms.region("workspace"):  # for what libraries allocate at their first use
                    for shape in self._inputs:
                        self._step(shape)
                    torch.cuda.current_stream(self._device).synchronize()
                if not options.enforce_eager:
                    self._capture()
        if self.ranks > 1:
            ms.prepare_backup()  # if there is one rank, the service does this

    def compute(self, rows: Sequence[Row]) -> list[int]:
        """Return the likeliest next tokens of up to ``max_batch`` rows of one token, or of one row of up to a chunk."""
        tokens = self.chunk if len(rows[0][2]) > 1 else 1
        batch = next(size for size in self._batch_sizes if size >= len(rows)) if tokens == 1 else 1
        # A chunk is padded after its tokens; those positions are overwritten before anything attends to them.
        inputs = [[slot + 1, start, len(ids) - 1, *ids, *[0] * (tokens - len(ids))] for slot, start, ids in rows]
        inputs += [[_SPARE + 1, 0, 0, 0]] * (batch - len(rows))
        with self._on_stream:
            self._inputs[batch, tokens].copy_(torch.tensor(inputs))
            self._step((batch, tokens))
            return list(self._likeliest[: len(rows)].tolist())

    def verify_tokens(self) -> list[int]:
        """Return the 8 tokens that follow a fixed prompt of less than a chunk. Uses the spare slot."""
        ids = [token % self.vocabulary for token in range(1, 17)]
        answer = self.compute([(_SPARE, 0, ids)])
        for position in range(len(ids), len(ids) + 7):
            answer += self.compute([(_SPARE, position, answer[-1:])])
        return answer

    def read_update(self, folder: str = "", payload: Sequence[str] = (), load_format: str | None = None) -> None:
        """Read a checkpoint folder, or the payload of a request, for ``write_update``. Raises ValueError or OSError if
        it does not fit the model or cannot be read, RuntimeError if the weights are released."""
        if folder and "weights" in filled_tags:
            self._update = self.model.state_dict()
            return
        if folder:
            whole = weights.load_checkpoint(Path(folder)).state_dict()
        else:
            whole = weights.read_payload(payload, load_format)
        self._update = weights.check_update(self.model, whole, self.partition, complete=bool(folder))

    def write_update(self) -> int:
        """Write the update that was read over the model's tensors; return how many. Only between two steps."""
        parts, self._update = self._update, {}
        self.model.load_state_dict(parts, strict=False)
        self.check()
        own = self.model.state_dict(keep_vars=True)
        written = {own[name] for name in parts}  # tied tensors have several names
        self.unwritten_weights = frozenset(name for name in self.unwritten_weights if own[name] not in written)
        return len(parts)

    def repair(self, lost: Sequence[str]) -> None:
        """Restore what the tags ``lost`` had; of the weights only what is computed at load: updates write the rest."""
        with torch.no_grad(), self._on_stream:
            if "weights" in lost:
                self.unwritten_weights = frozenset(name for name, _ in self.model.named_parameters())
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(self._buffers[name])
            if "cuda_graph" in lost:
                torch.arange(self.chunk, out=self._offsets)
                if self.graphs:
                    self.graphs.clear()
                    self._capture()
            self.check()

    def resize(self, slots: int) -> None:
        """Back only the first ``slots`` slots and the spare one with memory. Only between two steps. Raises as
        ``memsaver_core.resize``."""
        ms.resize("kv_cache", unused=self._cache.behind(slots + 1))

    def check(self) -> None:
        """Wait for the device; raise the error of its context, if there is one."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        self.graphs.clear()
        del self.model, self._cache, self._inputs, self._offsets, self.logits, self._likeliest
        gc.collect()  # models have reference cycles
        process.backend().forget_pools()
        process.backend().empty_cache()

    def _step(self, shape: tuple[int, int]) -> None:
        """Compute the static outputs from the static inputs of ``shape``, by its graph if it has one."""
        if shape in self.graphs:
            self.graphs[shape].replay()
            return
        batch, tokens = shape
        inputs = self._inputs[shape]
        self._cache.slots = inputs[:, 0].contiguous()  # index_select is slow with a strided index
        self._cache.positions = positions = inputs[:, 1:2] + self._offsets[:tokens]
        last = inputs[0, 2:3]  # the token of a chunk whose logits are needed
        keep = {"logits_to_keep": last} if tokens > 1 else {}
        logits = self._forward(inputs[:, 3:], positions, self._cache, self.length, **keep)
        if logits.shape[1] > 1:  # the model does not know logits_to_keep
            logits = logits.index_select(1, last)
        self.logits[:batch].copy_(logits[:, -1])
        self._likeliest[:batch].copy_(torch.argmax(self.logits[:batch], dim=-1))

    def _forward(self, tokens: Tensor, positions: Tensor, cache: Any, length: int, **keep: Any) -> Any:
        return self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=distances(positions, length),
            past_key_values=cache,
            use_cache=True,
            **keep,
        ).logits

    def _allocate(self, max_len: int, kv_cache_bytes: int) -> None:
        """Find out what the model's layers store, by computing one token; allocate slots and the static tensors."""
        most = int(getattr(self.model.config, "max_position_embeddings", max_len))
        self.length = min(max_len, most) // self.chunk * self.chunk
        if self.length < self.chunk:
            raise ValueError(f"max_len must be at least {self.chunk} tokens for this engine and model, not {max_len}")
        probe, token = DynamicCache(), torch.zeros(1, 1, dtype=torch.long, device=self._device)
        with ms.region("workspace"):  # for what libraries allocate at their first use
            self.vocabulary = int(self._forward(token, token, probe, 1).shape[-1])
        if not probe.layers or not all(each.is_initialized for each in probe.layers):
            raise ValueError(f"{type(self.model).__name__} cannot be served: it did not use the cache given to it")
        #: For each layer: the heads, and the elements of a key and of a value.
        shapes = [(each.keys.shape[1], each.keys.shape[-1], each.values.shape[-1]) for each in probe.layers]
        dtype = self.model.get_input_embeddings().weight.dtype
        self.slot_bytes = sum(heads * (key + value) for heads, key, value in shapes) * self.length * dtype.itemsize
        self.slots = kv_cache_bytes // self.slot_bytes - 1  # besides the spare one
        if self.slots < 1:
            raise ValueError(
                f"kv_cache_bytes = {kv_cache_bytes} is too small: a slot of {self.length} tokens takes "
                f"{self.slot_bytes} bytes and two are the least; give {2 * self.slot_bytes} bytes, or a smaller max_len"
            )

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self._device)

        def pair(count: int, shape: tuple[int, int, int]) -> Pair:
            heads, key, value = shape
            keys, values = (zeros(count, heads, self.length, dim, dtype=dtype) for dim in (key, value))
            return keys, values

        # The cache's memory comes and goes in pieces; on the host a slot's keys in a layer of the built-in model.
        with ms.region("kv_cache", chunk_bytes=32 << 20 if self._device.type == "cuda" else 256 << 10):
            layers = [pair(self.slots + 1, shape) for shape in shapes]
        with ms.region("workspace"):
            scratch = {shape: pair(self.max_batch, shape) for shape in set(shapes)}
        self._cache = SlotCache(layers, [scratch[shape] for shape in shapes])
        # The largest first, whose memory the graphs of the smaller ones use again.
        steps = [(1, self.chunk), *((batch, 1) for batch in reversed(self._batch_sizes))]
        with ms.region("cuda_graph"):
            self._inputs = {(batch, tokens): zeros(batch, 3 + tokens) for batch, tokens in steps}
            self._offsets = torch.arange(self.chunk, device=self._device)
            self.logits = zeros(self.max_batch, self.vocabulary, dtype=torch.float32)
            self._likeliest = zeros(self.max_batch)

    def _capture(self) -> None:
        pool = ms.GraphPool("cuda_graph")  # one for all: only one graph replays at a time
        for shape in self._inputs:
            graph = torch.cuda.CUDAGraph()
            with ms.region("cuda_graph"):  # the random generator's state for graphs
                graph.register_generator_state(torch.cuda.default_generators[self._device.index or 0])
            try:
                with ms.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    self._step(shape)
            except RuntimeError as error:
                raise RuntimeError(
                    f"capturing the step of {shape[0]} x {shape[1]} tokens as a CUDA graph failed ({error}); "
                    "enforce_eager=True serves the model without graphs"
                ) from error
            self.graphs[shape] = graph
