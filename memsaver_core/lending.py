"""New content for memory that is released: an engine's own loader writes into host memory, and the backups take it."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from memsaver_core import _native, hibernation, process
from memsaver_core.adopting import all_tensors, parts
from memsaver_core.contract.errors import NotResidentError, OutOfHostMemoryError, UnsupportedError
from memsaver_core.release_resume import available_host_bytes, status
from memsaver_core.storages import Place, is_movable, place, rebase
from memsaver_core.weights import sharing

#: The tags whose tensors are on host memory now, to be written.
lent_tags: set[str] = set()


class Lending:
    """Puts the tensors of a released tag on host memory that is filled from their backups, until ``end``. The tensor
    objects stay the same, and so do their addresses on the device. Tensors that share memory share the new memory, too.
    Between ``keep`` and ``end`` their content is undefined. Nothing is resumed or released meanwhile."""

    def __init__(self, tag: str, processes: int = 1) -> None:
        """``processes``: how many processes of this host lend at the same time, each as much.

        Raises:
            NotResidentError: the content is not in host memory: a part is resident, discarded, or in a file.
            UnsupportedError: a tensor is of a kind that cannot be lent memory.
            OutOfHostMemoryError: the host has too little.
        """
        if hibernation.is_hibernated():
            raise NotResidentError.of(tag)
        self._tag, self._saver = tag, process.saver()
        self._kept: _native.Rewrite | None = None
        self._memory: dict[int, Tensor] = {}  # by the address of the allocation
        self._lent: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}  # lent, and of the device
        tensors, allocations = self._find()
        self._check_room(sum(allocations.values()), processes)
        for address, nbytes in allocations.items():
            pages = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)
            self._memory[address] = torch.frombuffer(pages, dtype=torch.uint8)
            self._saver.backup_of(address, nbytes, self._memory[address].data_ptr())
        device = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
        lent = {number: self._lent_for(storage) for number, storage in device.items()}
        self._lent = {each._cdata: (each, device[number]) for number, each in lent.items()}
        self._places = [(each, Place.of(each)) for each in tensors]
        lent_tags.add(tag)
        try:
            rebase(tensors, lent)
        except BaseException:
            self.end(commit=False)
            raise

    def keep(self) -> None:
        """Make backups of what was written, for ``end`` to put in place. Raises UnsupportedError if tensors were
        put on other memory, OutOfHostMemoryError if there is no room for both backups."""
        for tensor, before in self._places:
            if not self.has_lent(tensor) or Place.of(tensor)[1:] != before[1:]:
                raise UnsupportedError(
                    f"the loader has replaced the memory of a tensor of shape {list(before.size)}, so its format "
                    "cannot be written while the memory is released; resume first, and update then"
                )
        contents = [(address, memory.data_ptr()) for address, memory in self._memory.items()]
        self._kept = _native.Rewrite(self._saver, contents)

    def end(self, commit: bool) -> None:
        """Put all tensors back on the memory of the device; with ``commit``, have a resume bring in what ``keep`` has
        kept. Raises ConfigurationError if the memory was resumed meanwhile: its content is as before."""
        try:
            if commit and self._kept is not None:
                self._kept.commit()
        finally:
            storages = [lent for lent, _ in self._lent.values()]
            back = {number: device for number, (_, device) in self._lent.items()}
            for tensors in sharing(storages):  # the loader may have made more of them
                rebase(tensors, back)
            for tensor, before in self._places:
                if tensor.untyped_storage()._cdata != before.storage._cdata:
                    place(tensor, before)
            lent_tags.discard(self._tag)
            self._kept = None
            self._lent, self._memory, self._places = {}, {}, []

    @property
    def storages(self) -> dict[int, torch.UntypedStorage]:
        """The storages in host memory, by the ``_cdata`` of the storages on the device for which they stand."""
        return {device._cdata: lent for lent, device in self._lent.values()}

    def has_lent(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is on the host memory."""
        return tensor.untyped_storage()._cdata in self._lent

    def _find(self) -> tuple[list[Tensor], dict[int, int]]:
        """Return the tensors of the tag, and address and bytes of their allocations."""
        if any(tag.tag == self._tag and tag.resident_bytes for tag in status().tags):
            raise NotResidentError(f"at least a part of {self._tag!r} is resident; resume all of it first")
        tensors, allocations = list[Tensor](), dict[int, int]()
        for each in all_tensors():
            movable = is_movable(each)
            for view in filter(None, map(self._view, [each] if movable else parts(each))):
                if not movable:
                    raise UnsupportedError(
                        f"{type(each).__name__} is a kind of tensor that cannot be written while its memory is "
                        "released; resume first, and update then"
                    )
                if not view["in_host_memory"]:
                    raise NotResidentError(
                        f"what a release has kept of {self._tag!r} is not in host memory (it was discarded, or is in a "
                        "file), so it cannot be written while it is released; resume it first"
                    )
                tensors.append(each)
                allocations[view["allocation"]] = view["allocation_bytes"]
        return tensors, allocations

    def _view(self, tensor: Tensor) -> dict[str, Any] | None:
        """Return the core's view of a tensor's allocation and backup; None if the tensor is not of the tag."""
        with suppress(RuntimeError, NotImplementedError):  # it has no storage
            storage = tensor.untyped_storage()
            if storage.nbytes() and self._saver.owns(storage.data_ptr()):
                view = self._saver.backup_of(storage.data_ptr(), storage.nbytes(), 0)
                return view if view["tag"] == self._tag else None
        return None

    def _check_room(self, lent_bytes: int, processes: int) -> None:
        now = status()
        kept = sum(tag.kept_bytes for tag in now.tags if tag.tag == self._tag)
        needed = processes * (lent_bytes + max(0, kept - now.host_backup.unused_bytes))
        if needed > (free := available_host_bytes()):
            raise OutOfHostMemoryError(
                f"to write {self._tag!r} while it is released takes {needed} bytes of host memory, and {free} are "
                "free; nothing was written: free host memory, or resume first, and update then",
                needed,
                free,
            )

    def _lent_for(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        view = self._saver.backup_of(storage.data_ptr(), storage.nbytes(), 0)
        begin = storage.data_ptr() - view["allocation"]
        memory = self._memory[view["allocation"]][begin : begin + storage.nbytes()]
        return torch.from_numpy(memory.numpy()).untyped_storage()
