"""What differs between kinds of device, as one interface: only the modules here know which kind is in use."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from memsaver_core import _native
from memsaver_core.contract.status import DeviceMemory, TorchMemory


class Stack(threading.local):
    """The regions that the calling thread has entered; the innermost is the last."""

    def __init__(self) -> None:
        self.entered: list[Any] = []


class Backend:
    """One kind of device; ``memsaver_core.process.backend()`` returns the one of this process. Methods without the
    saver may be called before it exists. This base class, for a process with memsaver disabled, manages no memory."""

    #: The driver's name, for users to read: ``cuda``, ``host``, or ``none`` if memsaver is disabled.
    name: ClassVar[str] = "none"
    #: Whether tags are carried by torch memory pools. Then CUDA graphs can be captured under a tag.
    has_memory_pools: ClassVar[bool] = False
    #: Whether a process has a context on the device. While that is away (hibernated), driver and NVML calls block.
    has_context: ClassVar[bool] = False

    def __init__(self) -> None:
        self._stack = Stack()

    def torch_device(self, index: int = 0) -> torch.device:
        """Return the torch device whose memory is managed as device ``index``."""
        return torch.device("cpu")

    def prepare(self) -> None:
        """Do what must precede the making of the saver."""

    def region(
        self, saver: _native.Saver, device: int | None, tag: str, restore: str, chunk_bytes: int
    ) -> AbstractContextManager[Any]:
        """Return a context in which torch allocates under ``tag``. ``device`` None: the current one, else the first."""
        return nullcontext()

    def outside_regions(self, *, own_pool: bool = False) -> AbstractContextManager[Any]:
        """Return a context manager in which what this thread allocates is under no tag. With ``own_pool`` it comes from
        a separate pool, which ends with the block: not from free blocks of tagged memory, and once it is freed it goes
        back to the driver."""
        return nullcontext()

    def new_graph_pool(self, tag: str, restore: str) -> Any:
        """Return a torch memory pool for CUDA graphs on the current device, under ``tag``; None without pools."""
        return None

    def forget_pools(self, tag: str | None = None, restore: str | None = None) -> bool:
        """Have later regions of ``tag`` and ``restore`` (None: of all) start with new pools; return whether there were
        old ones. Their free memory ends with the next ``torch.cuda.empty_cache()``, the rest with its tensors."""
        return False

    def note_release(self, tags: Sequence[str]) -> None:
        """Note that ``tags`` were released or shrunk: torch's free blocks in them must not be handed out again."""

    def ends(self, saver: _native.Saver, storages: Iterable[torch.UntypedStorage]) -> dict[int, int]:
        """Return, by the address of each storage, the end of the memory that belongs to it alone."""
        return {storage.data_ptr(): storage.data_ptr() + storage.nbytes() for storage in storages}

    def storage_in(self, buffer: _native.HostBuffer, device: int, offset: int, nbytes: int) -> torch.UntypedStorage:
        """Return a storage on a part of ``buffer``, which it keeps alive."""
        raise NotImplementedError

    def dead_ranges(self, saver: _native.Saver) -> list[tuple[int, int]]:
        """Return (address, bytes) of the saver's memory that torch's allocator holds free, in address order."""
        return []

    def empty_cache(self) -> None:
        """Give back what allocators only cache."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def make_room(self) -> bool:
        """Free cached device memory for a resume that found too little; returns whether a retry may succeed."""
        return False

    def read_device(self, saver: _native.Saver, index: int) -> DeviceMemory:
        """Read device memory in use now. Must not be called while this process's context is away."""
        raise NotImplementedError

    def has_host_memory(self, index: int) -> bool:
        """Return whether a device has no memory but the host's, as GB10 and Jetson have."""
        return False

    def read_torch_memory(self, saver: _native.Saver | None, index: int) -> TorchMemory:
        """Return what torch's allocator holds of a device. Calls no driver."""
        return TorchMemory(0, 0)

    def peers(self, saver: _native.Saver | None, peer_access: bool) -> tuple[tuple[int, int], ...]:
        """Return pairs of devices of which the first can reach the second's memory; with ``peer_access`` all pairs."""
        return ()
