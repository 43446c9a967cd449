"""Tensor parallelism: the part of the weights that a rank holds, by transformers' plan; how ranks compute together."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from memsaver_core import communicators, hibernation

dist: Any = torch.distributed  # typed in part

#: Switched off unless the environment says otherwise. A captured graph hangs if NCCL has registered its memory and that
#: was remapped. A process with NVLS memory cannot be checkpointed. torch's monitors end a process that waits for a rank
#: or that is hibernated.
_OFF = (
    "NCCL_GRAPH_REGISTER",
    "NCCL_NVLS_ENABLE",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
)
_COLUMNS = ("colwise", "colwise_gather_output")
#: Styles for which each rank holds the whole weight: of norms, and of an embedding that the output layer shares.
_WHOLE = ("replicated_with_grad_allreduce", "embedding_rowwise")


@dataclass(frozen=True)
class Place:
    """One rank among ``ranks``; one of one holds everything."""

    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class Partition:
    """What of a model one rank holds.

    Attributes:
        dims: by name of a tensor that is divided, the dimension along which it is; -1: it is not divided but added to
            the sum over the ranks, to which rank 0 alone contributes it, and the others zeros.
    """

    place: Place
    dims: Mapping[str, int]

    def part(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of the tensor ``name``: a view of ``whole``, or zeros.

        Raises:
            ValueError: it cannot be divided.
        """
        dim = self.dims.get(name)
        if dim is None:
            return whole
        if dim == -1:
            return whole if self.place.rank == 0 else torch.zeros_like(whole)
        if dim >= whole.dim() or whole.shape[dim] % self.place.ranks:
            raise ValueError(f"{name} of shape {list(whole.shape)} cannot be divided among {self.place.ranks} ranks")
        return whole.chunk(self.place.ranks, dim)[self.place.rank]

    def whole_shape(self, name: str, part: Tensor) -> list[int]:
        """Return the shape of the tensor ``name`` of which ``part`` is this rank's."""
        shape, dim = list(part.shape), self.dims.get(name, -1)
        if dim >= 0:
            shape[dim] *= self.place.ranks
        return shape


#: Of a model that is not divided.
WHOLE = Partition(Place(), {})


def check_divisible(config: Any, ranks: int) -> None:
    """Check that ``ranks`` can share the attention heads of a model of this configuration.

    Raises:
        ValueError: they cannot; the message names the numbers that can.
    """
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    shared = int(getattr(text, "num_key_value_heads", None) or heads)
    possible = [n for n in range(1, shared + 1) if shared % n == 0 and heads % n == 0]
    if ranks not in possible:
        raise ValueError(
            f"{ranks} ranks cannot share the model's {heads} attention heads and {shared} key-value heads evenly; "
            f"tensor_parallel can be {', '.join(map(str, possible))}"
        )


def divide(model: Any, place: Place) -> Partition:
    """Reduce ``model`` to the part of one rank, in place, as its tensor-parallel plan says.

    A linear layer is divided by its outputs ("colwise"), or by its inputs ("rowwise") with a sum over the ranks after
    it. Weights that are tied stay whole.

    Raises:
        ValueError: the model has no plan, or one that this engine does not support.
    """
    if place.ranks == 1:
        return WHOLE
    plan = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in (model.tp_plan or {}).items()}
    if not plan:
        raise ValueError(f"{type(model).__name__} has no tensor-parallel plan; serve it with tensor_parallel=1")
    users = _users(model)
    dims: dict[str, int] = {}
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if pattern.fullmatch(name)), None)
        if style is None or style in _WHOLE:
            continue
        if not isinstance(module, nn.Linear) or style not in (*_COLUMNS, "rowwise"):
            raise ValueError(
                f"the tensor-parallel plan of {type(model).__name__} has {style!r} for {name}, which this engine does "
                "not support; serve it with tensor_parallel=1"
            )
        if users[id(module.weight)] > 1:
            continue
        dims[f"{name}.weight"] = 1 if style == "rowwise" else 0
        if module.bias is not None:
            dims[f"{name}.bias"] = -1 if style == "rowwise" else 0
        if style != "colwise":
            module.register_forward_hook(_add_up if style == "rowwise" else _gather)
    partition = Partition(place, dims)
    for name in dims:
        layer, _, kind = name.rpartition(".")
        module = model.get_submodule(layer)
        part = partition.part(name, getattr(module, kind)).clone(memory_format=torch.contiguous_format)
        setattr(module, kind, nn.Parameter(part, requires_grad=False))
        module.out_features, module.in_features = module.weight.shape
    return partition


def _users(model: nn.Module) -> dict[int, int]:
    """Return how many modules hold each parameter."""
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    return users


def _add_up(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    dist.all_reduce(output)
    return output


def _gather(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    parts = [torch.empty_like(output) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, output)
    return torch.cat(parts, dim=-1)


def check_alone() -> None:
    """Raise RuntimeError if this process has a default process group already."""
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is in use in this process already; an engine with tensor_parallel > 1 needs its default "
            "process group, so serve it in a process of its own"
        )


def meet(meeting: Path, ranks: int) -> Any:
    """Return the store in which the ranks find each other: the file ``meeting``.

    Rank 0 calls this before any other rank can. torch waits for the lock of the file with the interpreter's lock held:
    a rank that is stopped while it has the file's would stop all of rank 0, and with it what looks for such ranks.
    """
    return dist.FileStore(str(meeting), ranks)


def join(place: Place, store: Any, device: torch.device) -> None:
    """Join the group of ranks that meet in ``store``, as torch's default process group.

    Raises:
        RuntimeError: the group cannot be made.
    """
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        for name in _OFF:
            os.environ.setdefault(name, "0")
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.ranks,
        device_id=device if on_gpu else None,
    )


def abort() -> None:
    """End what waits for another rank of the group, from any thread. The group can compute nothing more.

    Nothing waits in one that is suspended.
    """
    if dist.is_initialized() and _is_there():
        # Not every backend can; one that cannot fails by itself when the connection to a rank ends.
        with suppress(AttributeError, RuntimeError):
            dist.group.WORLD.abort()


def leave() -> None:
    """Leave the group, if this process is in one. One that is suspended ends with the process."""
    if dist.is_initialized() and _is_there():
        dist.destroy_process_group()


def _is_there() -> bool:
    """Return whether NCCL may take the group down: the memory of one that is suspended is not there."""
    return communicators.usable() and not hibernation.is_hibernated()
