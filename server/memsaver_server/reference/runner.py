"""Runs one model on one device, by captured CUDA graphs if there are any."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import memsaver_core as ms
from memsaver_server.reference.attention import LayerShape, ShapeProbe, SlotCache, distances
from memsaver_server.reference.checkpoint import check_in_region
from memsaver_server.reference.requests import Row
from memsaver_server.reference.sampling import Sampler, Sampling
from memsaver_server.reference.tensor_parallel import Partition

_cuda: Any = torch.cuda  # typed in some versions of torch, and not in others

#: The tokens of the verification prompt, and of the answer to it; together less than a chunk.
_VERIFY_PROMPT = 16
_VERIFY_TOKENS = 8


class ModelRunner:
    """A model, its slots, and the static inputs and outputs of its steps, each in its region.

    Prompts are computed in chunks of one shape and tokens in batches of few shapes, padded with rows on a spare slot.
    On a CUDA device each shape is captured as a graph once.

    Belongs to the thread that makes it: regions are per thread, and so are cuBLAS handles, whose workspaces they take.
    """

    def __init__(
        self,
        make_model: Callable[[], tuple[Any, Partition]],
        *,
        device: torch.device,
        kv_cache_bytes: int,
        max_len: int,
        chunk: int,
        batch_sizes: Sequence[int],
        use_graphs: bool,
    ) -> None:
        """``make_model`` returns the model, in host memory or on the device, and which part of it this rank holds.

        Raises:
            ValueError: the options do not fit the model; the message says which and what would.
            RuntimeError: a part of the model is outside its region.
        """
        self._device = device
        self.chunk = chunk
        self._batch_sizes = sorted(set(batch_sizes))
        self.max_batch = self._batch_sizes[-1]
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._stream = _cuda.Stream(device) if device.type == "cuda" else None
        with torch.no_grad(), self._on_stream():
            self.model, self.partition = self._place(make_model)
            self._buffers = {name: buffer.detach().cpu().clone() for name, buffer in self.model.named_buffers()}
            self._kv_dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
            self.length = self._fit_length(max_len)
            self.stop_ids = _stop_ids(self.model)
            self._keeps_logits = "logits_to_keep" in inspect.signature(self.model.forward).parameters
            shapes, self.vocabulary = self._probe()
            self.slots = self._fit_slots(shapes, kv_cache_bytes)
            self._allocate(shapes)
            self._warm_up()
            if use_graphs:
                self._capture()

    @property
    def captured(self) -> list[int]:
        """The batch sizes that have a graph."""
        return sorted(batch for batch, tokens in self._graphs if tokens == 1)

    # Steps.

    def prefill(self, slot: int, tokens: Sequence[int], start: int, sampler: Sampler | None) -> int | None:
        """Compute ``tokens`` (at most a chunk) from ``start``; return the next token if ``sampler`` is given."""
        with self._on_stream():
            self._prompt.copy_(torch.tensor([[*tokens, *[0] * (self.chunk - len(tokens))]]))
            # The padding is after the prompt, and is overwritten before anything attends to it.
            self._prompt_positions.copy_(torch.arange(start, start + self.chunk)[None])
            self._prompt_slot.fill_(slot)
            self._prompt_last.fill_(len(tokens) - 1)
            self._step(1, self.chunk)
            return None if sampler is None else self._pick([sampler])[0]

    def decode(self, rows: Sequence[Row]) -> list[int]:
        """Compute one token for each row and return the tokens that follow."""
        batch = next(size for size in self._batch_sizes if size >= len(rows))
        spare = [Row(self.slots, 0, 0, rows[0].sampler)] * (batch - len(rows))
        inputs = torch.tensor([[row.token, row.position, row.slot] for row in (*rows, *spare)])
        with self._on_stream():
            self._tokens[:batch].copy_(inputs[:, :1])
            self._positions[:batch].copy_(inputs[:, 1:2])
            self._row_slots[:batch].copy_(inputs[:, 2])
            self._step(batch, 1)
            return self._pick([row.sampler for row in rows])

    def verify_tokens(self) -> list[int]:
        """Return the tokens that follow a fixed prompt. Uses the spare slot, which no request has."""
        greedy = Sampler(Sampling())
        prompt = [token % self.vocabulary for token in range(1, _VERIFY_PROMPT + 1)]
        token = self.prefill(self.slots, prompt, 0, greedy)
        assert token is not None
        tokens = [token]
        while len(tokens) < _VERIFY_TOKENS:
            position = len(prompt) + len(tokens) - 1
            tokens += self.decode([Row(self.slots, position, tokens[-1], greedy)])
        return tokens

    def repair(self, lost: Sequence[str]) -> None:
        """Restore what came back without content under the tags ``lost``.

        Not the weights, which the caller overwrites, but what is computed at load and in no update.
        """
        with torch.no_grad(), self._on_stream():
            if "weights" in lost:
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(self._buffers[name])
            if "cuda_graph" in lost and self._graphs:
                self._graphs.clear()
                self._capture()
            self.check()

    def check(self) -> None:
        """Raise the error that the device's context is in, if any."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Free all device memory."""
        self._graphs.clear()
        for name in list(vars(self)):
            if isinstance(vars(self)[name], (Tensor, nn.Module, SlotCache)):
                delattr(self, name)

    def _step(self, batch: int, tokens: int) -> None:
        graph = self._graphs.get((batch, tokens))
        if graph is not None:
            graph.replay()
        elif tokens == 1:
            self._forward(self._tokens[:batch], self._positions[:batch], self._row_slots[:batch], None)
        else:
            self._forward(self._prompt, self._prompt_positions, self._prompt_slot, self._prompt_last)

    def _forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, last: Tensor | None) -> None:
        """Compute static outputs from static inputs; ``last`` is the token whose logits are needed, None: all."""
        self._cache.begin(positions, slots)
        keep: dict[str, Any] = {"logits_to_keep": last} if last is not None and self._keeps_logits else {}
        logits = self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=distances(positions, self.length),
            past_key_values=self._cache,
            use_cache=True,
            **keep,
        ).logits
        if last is not None and not keep:
            logits = logits.index_select(1, last)
        batch = tokens.shape[0]
        self._logits[:batch].copy_(logits[:, -1])
        self._likeliest[:batch].copy_(torch.argmax(self._logits[:batch], dim=-1))

    def _pick(self, samplers: Sequence[Sampler]) -> list[int]:
        likeliest: list[int] = self._likeliest[: len(samplers)].tolist()
        return [
            token if sampler.greedy else sampler.pick(self._logits[row])
            for row, (sampler, token) in enumerate(zip(samplers, likeliest, strict=True))
        ]

    # Construction.

    def _place(self, make_model: Callable[[], tuple[Any, Partition]]) -> tuple[Any, Partition]:
        gc.collect()  # garbage of an earlier engine must not be freed while bytes are counted
        before = next((tag.bytes for tag in ms.status().tags if tag.tag == "weights"), 0)
        with ms.region("weights"):
            model, partition = make_model()
            model = model.to(self._device)
        # A region on the host driver does not see what other threads loaded.
        ms.adopt(model, "weights")
        check_in_region(model, "weights", before)
        return model, partition

    def _fit_length(self, max_len: int) -> int:
        """Return ``max_len`` limited by the model, in whole chunks."""
        most = int(getattr(self.model.config, "max_position_embeddings", max_len))
        length = min(max_len, most) // self.chunk * self.chunk
        if length < self.chunk:
            raise ValueError(f"max_len must be at least {self.chunk} tokens for this engine and model, not {max_len}")
        return length

    def _probe(self) -> tuple[list[LayerShape], int]:
        """Find out by one token what the model's layers store, and the size of its vocabulary."""
        probe = ShapeProbe()
        position = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        # On the host no library keeps memory of a first step.
        with ms.region("workspace") if self._device.type == "cuda" else contextlib.nullcontext():
            logits = self.model(
                input_ids=position,
                position_ids=position,
                attention_mask=distances(position, 1),
                past_key_values=probe,
                use_cache=True,
            ).logits
        if sorted(probe.shapes) != list(range(len(probe.shapes))) or not probe.shapes:
            raise ValueError(f"{type(self.model).__name__} cannot be served: it did not use the cache given to it")
        return [probe.shapes[layer] for layer in range(len(probe.shapes))], int(logits.shape[-1])

    def _fit_slots(self, shapes: Sequence[LayerShape], kv_cache_bytes: int) -> int:
        """Return how many slots fit, besides the spare one."""
        per_slot = sum(s.heads * (s.key_dim + s.value_dim) for s in shapes) * self.length * self._kv_dtype.itemsize
        slots = kv_cache_bytes // per_slot - 1
        if slots < 1:
            raise ValueError(
                f"kv_cache_bytes = {kv_cache_bytes} is too small: a slot of {self.length} tokens takes {per_slot} "
                f"bytes and two are the least; give {2 * per_slot} bytes, or a smaller max_len"
            )
        return int(slots)

    def _allocate(self, shapes: Sequence[LayerShape]) -> None:
        length, batch, slots = self.length, self.max_batch, self.slots + 1
        values = functools.partial(torch.zeros, dtype=self._kv_dtype, device=self._device)
        ids = functools.partial(torch.zeros, dtype=torch.long, device=self._device)
        with ms.region("kv_cache"):
            layers = [
                (values(slots, s.heads, length, s.key_dim), values(slots, s.heads, length, s.value_dim)) for s in shapes
            ]
        kinds = {(s.heads, dim) for s in shapes for dim in (s.key_dim, s.value_dim)}
        with ms.region("workspace"):
            scratch = {(n, dim): (values(batch, n, length, dim), values(batch, n, length, dim)) for n, dim in kinds}
        self._cache = SlotCache(layers, scratch)
        with ms.region("cuda_graph"):
            self._tokens = ids(batch, 1)
            self._positions = ids(batch, 1)
            self._row_slots = ids(batch).fill_(self.slots)
            self._prompt = ids(1, self.chunk)
            self._prompt_positions = torch.arange(self.chunk, device=self._device)[None].clone()
            self._prompt_slot = ids(1).fill_(self.slots)
            self._prompt_last = ids(1)
            self._logits = torch.zeros(batch, self.vocabulary, dtype=torch.float32, device=self._device)
            self._likeliest = ids(batch)

    def _warm_up(self) -> None:
        """Run each shape once, so that what libraries allocate at first use is under ``workspace``."""
        if self._device.type != "cuda":
            return
        with ms.region("workspace"):
            for batch, tokens in self._shapes():
                self._step(batch, tokens)
            torch.cuda.current_stream(self._device).synchronize()

    def _capture(self) -> None:
        pool = ms.GraphPool("cuda_graph")  # one for all: only one graph replays at a time
        for batch, tokens in self._shapes():
            graph = torch.cuda.CUDAGraph()
            with ms.region("cuda_graph"):  # the random generator's state for graphs
                graph.register_generator_state(torch.cuda.default_generators[self._device.index or 0])
            try:
                with ms.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                    self._step(batch, tokens)
            except RuntimeError as error:
                raise RuntimeError(
                    f"capturing the step of {batch} x {tokens} tokens as a CUDA graph failed ({error}); "
                    "enforce_eager=True serves the model without graphs"
                ) from error
            self._graphs[batch, tokens] = graph

    def _shapes(self) -> list[tuple[int, int]]:
        """Return (batch, tokens) of every step, the largest first: smaller ones reuse its memory."""
        return [(1, self.chunk), *((batch, 1) for batch in reversed(self._batch_sizes))]

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield


def _stop_ids(model: Any) -> frozenset[int]:
    configs = (getattr(model, "generation_config", None), model.config)
    given = next((ids for each in configs if (ids := getattr(each, "eos_token_id", None)) is not None), ())
    return frozenset(given if isinstance(given, (list, tuple)) else [given])
