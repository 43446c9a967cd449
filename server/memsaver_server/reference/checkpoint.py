"""Weights: from a checkpoint folder, random ones of a given shape, or an update's, written in place."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import memsaver_core as ms
from memsaver_server.reference.attention import ATTENTION_NAME
from memsaver_server.reference.tensor_parallel import WHOLE, Partition, Place, divide

# Typed in some versions of transformers and torch only.
_Models: Any = AutoModelForCausalLM
_cuda: Any = torch.cuda


def load_checkpoint(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """Return the whole causal language model in ``folder``, in host memory.

    Not on its device, as transformers loads tensors in threads of its own, which a region does not see.

    Raises:
        ValueError: the folder holds no checkpoint that this engine can serve.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is not a checkpoint folder: it has no config.json")
    try:
        model = _Models.from_pretrained(
            str(folder), dtype=dtype or "auto", local_files_only=True, attn_implementation=ATTENTION_NAME
        )
    except SafetensorError as error:
        raise ValueError(f"a file of {folder} is damaged: {error}") from None
    return _ready(model)


def load_config(path: Path) -> Any:
    """Return the configuration in ``path``, a file or a checkpoint folder.

    Raises:
        ValueError: there is none.
    """
    if not (path / "config.json").is_file() and not path.is_file():
        raise ValueError(f"{path} does not exist; give the config.json of a model")
    return AutoConfig.from_pretrained(str(path))


def create_random(
    config_file: Path, device: torch.device, dtype: torch.dtype | None, seed: int, place: Place
) -> tuple[Any, Partition]:
    """Return one rank's part of a model of the shape in ``config_file`` with random weights, created on ``device``.

    Call it in the region. The parts of all ranks are together the model that one rank would have.

    Raises:
        ValueError: the file is not the configuration of a model that this engine can serve.
    """
    config = load_config(config_file)
    with torch.device("meta"):
        model = _Models.from_config(
            config, dtype=dtype or config.dtype or torch.float32, attn_implementation=ATTENTION_NAME
        )
    model.tie_weights()
    partition = divide(model, place)
    _materialize(model, device)
    # For what is computed rather than stored (rotary frequencies and the like); its random numbers are replaced.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        model.initialize_weights()
    fill_random(model, seed, partition)
    return _ready(model), partition


def tensors_of(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return every parameter and buffer with its name; shared ones once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.setdefault(id(tensor), (name, tensor))
    return list(found.values())


def names_of_same(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return every name of the parameters that ``names`` name: tied ones have several."""
    given = set(names)
    named = list(model.named_parameters(remove_duplicate=False))
    same = {id(parameter) for name, parameter in named if name in given}
    return {name for name, parameter in named if id(parameter) in same}


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages behind ``tensors``; shared ones count once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def check_in_region(model: nn.Module, tag: str, bytes_before: int) -> None:
    """Check that all the model's tensors were allocated under ``tag``, which held ``bytes_before`` bytes before.

    A tensor outside would stay resident in a release.

    Raises:
        RuntimeError: some were not; the message names them.
    """
    if not ms.enabled():
        return
    tensors = tensors_of(model)
    astray = _in_torchs_own_pool(tensors)
    held = next((t.bytes for t in ms.status().tags if t.tag == tag), 0) - bytes_before
    needed = storage_bytes(tensor for _, tensor in tensors)
    if astray or held < needed:
        raise RuntimeError(
            f"the model's tensors take {needed} bytes, but the region {tag!r} received {held}"
            + (f"; outside are {', '.join(astray[:8])}" if astray else "")
            + ". A release would not return them: create them inside the region, or bring them in with adopt()"
        )


def _in_torchs_own_pool(tensors: list[tuple[str, Tensor]]) -> list[str]:
    """Return the names of tensors in torch's default pool. Host memory has no pools."""
    if all(tensor.device.type != "cuda" for _, tensor in tensors):
        return []
    own = [
        range(segment["address"], segment["address"] + segment["total_size"])
        for segment in _cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == (0, 0)
    ]
    return [name for name, tensor in tensors if any(tensor.untyped_storage().data_ptr() in each for each in own)]


def _ready(model: Any) -> Any:
    """Return ``model`` in evaluation mode; raise ValueError if its attention cannot use slots."""
    kinds = set(getattr(model.config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if not getattr(model, "_supports_attention_backend", False) or kinds:
        raise ValueError(
            f"{type(model).__name__} cannot be served: this engine needs transformers' attention interface"
            + (f", and cannot do its layers of type {', '.join(sorted(kinds))}" if kinds else "")
        )
    model.eval()
    model.requires_grad_(False)
    return model


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Allocate each parameter and buffer on ``device``; shared ones stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, old in store.items():
                if old is None or old.device.type != "meta":
                    continue
                if id(old) not in made:
                    new: Tensor = torch.empty_like(old, device=device)
                    made[id(old)] = nn.Parameter(new, requires_grad=False) if isinstance(old, nn.Parameter) else new
                store[name] = made[id(old)]


def fill_random(model: Any, seed: int, partition: Partition = WHOLE) -> None:
    """Fill in seeded weights, large enough that greedy output varies: comparing outputs would else prove little.

    Each rank draws the numbers of the whole model and keeps those of its own part.
    """
    embedding = model.get_input_embeddings()
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.device not in generators:
                generators[parameter.device] = torch.Generator(parameter.device).manual_seed(seed)
            generator = generators[parameter.device]
            whole = parameter
            if name in partition.dims:
                with ms.region("workspace"):  # which uses this memory again
                    whole = torch.empty(
                        partition.whole_shape(name, parameter), dtype=parameter.dtype, device=parameter.device
                    )
            if parameter.dim() >= 2:
                gain = 1.0 if parameter is embedding.weight else 2.0
                whole.normal_(0.0, gain / math.sqrt(whole.shape[-1]), generator=generator)
            elif name.endswith("bias"):
                whole.normal_(0.0, 0.1, generator=generator)
            if whole is not parameter:
                parameter.copy_(partition.part(name, whole))


def parse_payload(payloads: Sequence[str], load_format: str | None) -> dict[str, Tensor]:
    """Return the tensors of an update request, whole.

    Raises:
        ValueError: the payload is not one base64 safetensors image.
    """
    if load_format not in (None, "auto", "safetensors"):
        raise ValueError(f"load_format {load_format!r} is not supported; send safetensors, with no load_format")
    if isinstance(payloads, str) or len(payloads) != 1:
        raise ValueError("serialized_named_tensors must be a list of one payload, with the whole tensors")
    try:
        image = base64.b64decode(payloads[0], validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
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


#: What updates may carry weights in; others would be cast to useless ones.
UPDATE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_update(model: nn.Module, given: Mapping[str, Tensor], partition: Partition) -> dict[str, Tensor]:
    """Return this rank's part of each tensor ``given``, which are whole.

    Raises:
        ValueError: a name or shape differs from the model's, or a dtype cannot carry weights.
        RuntimeError: the weights are released.
    """
    state = next((tag.state for tag in ms.status().tags if tag.tag == "weights"), "resident")
    if state != "resident":
        raise RuntimeError(f"the weights are {state}; resume them before updating them")
    own = _by_name(model)
    unknown = sorted(set(given) - set(own))
    if unknown:
        raise ValueError(f"the model has no {', '.join(unknown[:8])}; nothing was written")
    for name, tensor in given.items():
        shape = partition.whole_shape(name, own[name])
        if shape != list(tensor.shape):
            raise ValueError(f"{name} has shape {shape}, not {list(tensor.shape)}; nothing was written")
        if own[name].is_floating_point() and tensor.dtype not in UPDATE_DTYPES:
            accepted = ", ".join(str(each).removeprefix("torch.") for each in UPDATE_DTYPES)
            raise ValueError(f"{name} came as {str(tensor.dtype).removeprefix('torch.')}; send {accepted}")
    return {name: partition.part(name, tensor) for name, tensor in given.items()}


def write_tensors(model: nn.Module, parts: Mapping[str, Tensor]) -> None:
    """Copy what `check_update` returned over the model's tensors of the same names."""
    own = _by_name(model)
    with torch.no_grad():
        for name, tensor in parts.items():
            own[name].copy_(tensor.to(own[name].dtype))
    if any(tensor.device.type == "cuda" for tensor in own.values()):
        torch.cuda.synchronize()


def _by_name(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and buffer by its names; tied ones have several."""
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
