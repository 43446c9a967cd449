"""Weights, from a checkpoint, a random generator or an update, and the part of them that one rank holds. transformers'
own tensor parallelism divides a model only while it loads a checkpoint, and differs between the supported versions."""

from __future__ import annotations

import base64
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

import memsaver_core as ms
from memsaver_core.lending import lent_tags
from memsaver_server.reference.attention import ATTENTION_NAME

#: The types in which updates may carry weights; a cast from any other would give useless values.
UPDATE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

#: Styles in a tensor-parallel plan that leave a weight whole on each rank: of norms, and of a tied embedding.
_WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")


@dataclass(frozen=True)
class Partition:
    """The part of a model that ``rank`` of ``ranks`` holds. ``dims`` maps the name of a tensor to the dimension along
    which it is divided, or to -1 if the parts of all ranks are added up: then rank 0 holds it, and the others zeros.
    Every rank holds all of a tensor that is not in ``dims``."""

    rank: int
    ranks: int
    dims: Mapping[str, int]

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the tensor ``name``, a view or zeros; raise ValueError if it cannot be divided."""
        dim = self.dims.get(name)
        if dim is None:
            return whole
        if dim == -1:
            return whole if self.rank == 0 else torch.zeros_like(whole)
        if dim >= whole.dim() or whole.shape[dim] % self.ranks:
            raise ValueError(f"{name} of shape {list(whole.shape)} cannot be divided among {self.ranks} ranks")
        return whole.chunk(self.ranks, dim)[self.rank]

    def whole_shape(self, name: str, part: Tensor) -> list[int]:
        shape, dim = list(part.shape), self.dims.get(name, -1)
        if dim >= 0:
            shape[dim] *= self.ranks
        return shape


#: All of a model.
WHOLE = Partition(0, 1, {})


def check_divisible(config: Any, ranks: int) -> None:
    """Raise ValueError if ``ranks`` cannot share the attention heads of a model of this configuration evenly."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    shared = int(getattr(text, "num_key_value_heads", None) or heads)
    possible = [n for n in range(1, shared + 1) if shared % n == 0 and heads % n == 0]
    if ranks not in possible:
        raise ValueError(
            f"{ranks} ranks cannot share the model's {heads} attention heads and {shared} key-value heads evenly; "
            f"tensor_parallel can be {', '.join(map(str, possible))}"
        )


def divide(model: Any, rank: int, ranks: int) -> Partition:
    """Reduce ``model`` to the part of one rank, in place, as transformers' tensor-parallel plan for it says: a linear
    layer is divided by its outputs ("colwise"), or by its inputs ("rowwise"), followed by a sum over the ranks. Tied
    weights stay whole. Raises ValueError if it has no plan, or one that this engine does not support."""
    if ranks == 1:
        return WHOLE
    plan = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in (model.tp_plan or {}).items()}
    if not plan:
        raise ValueError(f"{type(model).__name__} has no tensor-parallel plan; serve it with tensor_parallel=1")
    users = Counter(parameter for module in model.modules() for parameter in module._parameters.values())
    dims: dict[str, int] = {}
    partition = Partition(rank, ranks, dims)
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), None)
        if style is None or style in _WHOLE:
            continue
        if not isinstance(module, nn.Linear) or style not in ("colwise", "colwise_gather_output", "rowwise"):
            raise ValueError(
                f"the tensor-parallel plan of {type(model).__name__} has {style!r} for {name}, which this engine does "
                "not support; serve it with tensor_parallel=1"
            )
        if users[module.weight] > 1:
            continue
        for kind, whole in dict(module.named_parameters()).items():
            dims[f"{name}.{kind}"] = (1 if kind == "weight" else -1) if style == "rowwise" else 0
            part = partition.part(f"{name}.{kind}", whole).clone(memory_format=torch.contiguous_format)
            setattr(module, kind, nn.Parameter(part, requires_grad=False))
        module.out_features, module.in_features = module.weight.shape
        if style != "colwise":
            module.register_forward_hook(_add_up if style == "rowwise" else _gather)
    return partition


def _add_up(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    dist.all_reduce(output)
    return output


def _gather(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, output)
    return torch.cat(parts, dim=-1)


def load_config(path: Path) -> Any:
    """Return the configuration in ``path``, a file or a checkpoint folder; raise ValueError if there is none."""
    if not (path / "config.json").is_file() and not path.is_file():
        raise ValueError(f"{path} does not exist; give the config.json of a model")
    return AutoConfig.from_pretrained(str(path))


def load_checkpoint(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """Return the whole causal language model in ``folder``; raise ValueError if that has none that can be served. It is
    in host memory, because transformers loads tensors in other threads, to which a region does not apply."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a checkpoint folder: it has no config.json")
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype or "auto", local_files_only=True, attn_implementation=ATTENTION_NAME
        )
    except SafetensorError as error:
        raise ValueError(f"a file of {folder} is damaged: {error}") from None
    return _ready(model)


def load_part(
    path: Path, device: torch.device, dtype: torch.dtype | None, seed: int | None, rank: int, ranks: int
) -> tuple[Any, Partition]:
    """Return one rank's part of a model, on ``device`` and in the region; raise ValueError if it cannot be served.
    ``path`` is a checkpoint folder or, with a ``seed`` of random weights, a configuration. The weights come from the
    shared store if that has them."""
    config: Any = load_config(path) if seed is not None or ms.core_settings().shared_backups else None
    if seed is None and (config is None or hasattr(config, "quantization_config")):
        with ms.region("weights"):
            model = load_checkpoint(path, dtype)
            partition = divide(model, rank, ranks)
            return model.to(device), partition
    dtype = dtype or config.dtype or torch.float32
    with torch.device("meta"):
        model = _ready(AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME))
    model.tie_weights()
    partition = divide(model, rank, ranks)
    with ms.region("weights"):
        # Not Module.to_empty, which would allocate tied weights twice.
        model._apply(cache(lambda tensor: torch.empty_like(tensor, device=device)))
        model.tie_weights()
        # Computes what no checkpoint has (rotary frequencies and the like); its random weights are replaced.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            model.initialize_weights()

    def load() -> None:
        if seed is not None:
            fill_random(model, seed, partition)
            return
        whole = load_checkpoint(path, dtype).state_dict()
        model.load_state_dict({name: partition.part(name, tensor) for name, tensor in whole.items()})

    if seed is None and (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(str(path))
    revision = ms.revision_of(path) if seed is None else f"{ms.revision_of(path)}, seed {seed}"
    program = f"transformers {transformers.__version__}"
    key = ms.WeightsKey(str(path), revision, str(dtype), rank=rank, ranks=ranks, program=program)
    ms.load_weights(key, lambda: dict([*model.named_parameters(), *model.named_buffers()]), load)
    return model, partition


def _ready(model: Any) -> Any:
    """Return ``model`` in evaluation mode; raise ValueError if its attention cannot use slots."""
    kinds = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if not getattr(model, "_supports_attention_backend", False) or kinds:
        raise ValueError(
            f"{type(model).__name__} cannot be served: this engine needs transformers' attention interface"
            + (f", and cannot do its layers of type {', '.join(sorted(kinds))}" if kinds else "")
        )
    return model.eval().requires_grad_(False)


def fill_random(model: Any, seed: int, partition: Partition = WHOLE) -> None:
    """Write seeded random weights. They are so large that greedy output varies: else equal outputs would prove little.
    Each rank draws the numbers of the whole model, and keeps those of its part."""
    embedding = model.get_input_embeddings().weight
    generator = torch.Generator(embedding.device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = parameter
            if name in partition.dims:
                with ms.region("workspace"):  # whose allocations reuse this memory later
                    whole = parameter.new_empty(partition.whole_shape(name, parameter))
            if parameter.dim() >= 2:
                gain = 1.0 if parameter is embedding else 2.0
                whole.normal_(0.0, gain / math.sqrt(whole.shape[-1]), generator=generator)
            elif name.endswith("bias"):
                whole.normal_(0.0, 0.1, generator=generator)
            parameter.copy_(partition.part(name, whole))


def read_payload(payload: Sequence[str], load_format: str | None) -> dict[str, Tensor]:
    """Return the whole tensors of an update request; raise ValueError if it is not one base64 safetensors image."""
    if load_format not in (None, "auto", "safetensors"):
        raise ValueError(f"load_format {load_format!r} is not supported; send safetensors, with no load_format")
    if isinstance(payload, str) or len(payload) != 1:
        raise ValueError("serialized_named_tensors must be a list of one payload, with the whole tensors")
    try:
        image = base64.b64decode(payload[0], validate=True)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the payload is not base64: {error}") from None
    if image[:1] == b"\x80":
        raise ValueError(
            "the payload is a pickle, and reading a pickle runs code of its sender; "
            "send base64(safetensors.torch.save({name: tensor})) instead"
        )
    try:
        return safetensors.torch.load(image)
    except (SafetensorError, KeyError) as error:  # KeyError: an unknown dtype
        raise ValueError(f"the payload is not a safetensors image: {error}") from None


def check_update(
    model: nn.Module, given: Mapping[str, Tensor], partition: Partition, *, complete: bool
) -> dict[str, Tensor]:
    """Return this rank's part of each whole tensor ``given``; with ``complete`` these must be all of them. Raises
    ValueError if names, shapes or types do not fit the model's, RuntimeError if the weights are released."""
    for tag in ms.status().tags:
        if tag.tag == "weights" and tag.state != "resident" and "weights" not in lent_tags:
            raise RuntimeError(f"the weights are {tag.state}; resume them before updating them")
    own = model.state_dict()
    if unknown := sorted(set(given) - set(own)):
        raise ValueError(f"the model has no {', '.join(unknown[:8])}; nothing was written")
    if complete and (missing := sorted(set(own) - set(given))):
        raise ValueError(f"the checkpoint lacks {', '.join(missing[:8])}; nothing was written")
    for name, tensor in given.items():
        shape = partition.whole_shape(name, own[name])
        if shape != list(tensor.shape):
            raise ValueError(f"{name} has shape {shape}, not {list(tensor.shape)}; nothing was written")
        if own[name].is_floating_point() and tensor.dtype not in UPDATE_DTYPES:
            accepted = ", ".join(str(each).removeprefix("torch.") for each in UPDATE_DTYPES)
            raise ValueError(f"{name} came as {str(tensor.dtype).removeprefix('torch.')}; send {accepted}")
    return {name: partition.part(name, tensor) for name, tensor in given.items()}
