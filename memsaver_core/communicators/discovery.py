"""Finds the NCCL communicators of this process, in the order of their creation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from memsaver_core.communicators.nccl import SUSPENDS, Held, Nccl, loaded

#: Modules that keep the groups of ranks by name, and the engines' names.
_ENGINES = {"vllm.distributed.parallel_state": "vllm", "sglang.srt.distributed.parallel_state": "sglang"}


@dataclass(frozen=True)
class Communicator:
    """One communicator of more than one rank, and the calls for it."""

    name: str  # the same on all of its ranks, and of no other communicator that a rank of the engine has
    ranks: int
    rank: int
    device: int | None  # torch's index of its device; None if not known
    nccl: Nccl | None  # the library that it belongs to; None if that cannot be found
    held: Callable[[], Held]
    suspend: Callable[[], None]
    resume: Callable[[], None]
    is_nccl: bool = True

    @classmethod
    def of(cls, name: str, comm: int, *, ranks: int, rank: int, device: int | None, nccl: Nccl | None) -> Communicator:
        """Return the communicator ``comm``, an ncclComm_t."""

        def call(function: Callable[[Nccl, int], Any]) -> Any:
            assert nccl is not None
            with _on(device):
                return function(nccl, comm)

        held, suspend, resume = (partial(call, each) for each in (Nccl.held, Nccl.suspend, Nccl.resume))
        return cls(name, ranks, rank, device, nccl, held, suspend, resume)


def found() -> Iterator[Communicator]:
    """Yield torch's communicators, then vLLM's and SGLang's own. A group that never communicated has none yet."""
    yield from _of_torch()
    yield from _of_engines()


def _of_torch() -> Iterator[Communicator]:
    """Yield those of torch's groups on NCCL, without groups of one process, which share no memory."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not torch.distributed.is_available():
        return
    world, library = c10d._world, None
    for group in tuple(world.pg_map):
        if "nccl" not in str(world.pg_backend_config.get(group, "")) or group.size() < 2:
            continue
        library = library or loaded()
        backend = group._get_backend(torch.device("cuda"))
        backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
        name = _name(
            "torch", str(world.pg_names.get(group, "default")), torch.distributed.get_process_group_ranks(group)
        )
        for device in _devices():
            comm = 0
            with _on(device), suppress(RuntimeError):  # an aborted one holds nothing
                comm = backend._comm_ptr()  # of the current device; 0 if there is none, and none is made
            if not comm:
                continue
            made = Communicator.of(name, comm, ranks=group.size(), rank=group.rank(), device=device, nccl=library)
            suspends = hasattr(backend, "memory_stats") and tuple(backend.get_build_nccl_version()) >= SUSPENDS
            yield _by_torch(backend, made) if suspends else made
            break


def _by_torch(backend: Any, found: Communicator) -> Communicator:
    """Return ``found`` with torch's calls, which exclude torch's own threads."""

    def held() -> Held:
        stats = backend.memory_stats()
        return Held(int(stats["suspend"]), int(stats["persist"]), bool(stats["suspended"]))

    return replace(found, held=held, suspend=backend.suspend, resume=backend.resume)


def _of_engines() -> Iterator[Communicator]:
    """Return what the class PyNcclCommunicator, the same in vLLM and SGLang, has made for their groups."""
    for engine, group in engine_groups():
        own = part(group, "pynccl_comm")
        if own is None or not own.available or own.world_size < 2:
            continue
        yield Communicator.of(
            _name(engine, group.unique_name, group.ranks),
            own.comm.value,
            ranks=own.world_size,
            rank=own.rank,
            device=own.device.index,
            nccl=Nccl(own.nccl.lib),
        )


def engine_groups() -> Iterator[tuple[str, Any]]:
    """Yield vLLM's and SGLang's groups of ranks, each with its engine's name, in the order of their creation."""
    for module, engine in _ENGINES.items():
        for reference in tuple(getattr(sys.modules.get(module), "_groups", {}).values()):
            if (group := reference()) is not None:
                yield engine, group


def part(group: Any, name: str) -> Any:
    """Return what ``group`` communicates with under this name, or None. vLLM's groups keep it one object deeper."""
    found = getattr(group, name, None)
    return found if found is not None else getattr(getattr(group, "device_communicator", None), name, None)


def _name(kind: str, group: str, ranks: Sequence[int]) -> str:
    return f"{kind}:{group}:{','.join(map(str, ranks))}"


def _devices() -> list[int | None]:
    """Return the devices on which this process has a context."""
    if not torch.cuda.is_initialized():
        return [None]
    has_context: Any = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


def _on(device: int | None) -> AbstractContextManager[Any]:
    return nullcontext() if device is None else torch.cuda.device(device)
