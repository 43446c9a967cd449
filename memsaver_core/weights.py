"""Load weights from the shared store, where an engine before this one, or one beside it, has them."""

from __future__ import annotations

import logging
import mmap
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from memsaver_core import _native, process
from memsaver_core.adopting import all_tensors
from memsaver_core.contract.errors import BackupError, MemsaverError
from memsaver_core.contract.policies import policy_for
from memsaver_core.manifests import Allocation, Manifest, SharedStore, WeightsKey, kept_in
from memsaver_core.release_resume import with_room
from memsaver_core.storages import is_movable, rebase

logger = logging.getLogger("memsaver")

Tensors = Mapping[str, torch.Tensor]

#: How long to wait for another process that loads the same weights, seconds. One that ends is not waited for.
WAIT_S = 600.0
#: At least so many bytes are brought in before the storages that they replace are freed.
LEAST_BATCH_BYTES = 1 << 30

#: What ``load_weights`` has filled in this process: tag, key, and references to the tensors by name.
_loaded: list[tuple[str, WeightsKey, dict[str, weakref.ref[torch.Tensor]]]] = []


def load_weights(
    key: WeightsKey, tensors: Callable[[], Tensors], load: Callable[[], object], *, tag: str = "weights"
) -> str:
    """Fill ``tensors()`` with the weights of ``key``: from the shared store if it has them, else by ``load()``, after
    which the store gets them. Return an empty string if they came from the store, else why not, which is logged, too.

    The tensors are on one device, in a region of ``tag`` if the store is to get them. Tensors that the store fills stay
    the same objects, on new memory, laid out as in the process that gave the weights. Their addresses change, so do
    this before a graph captures them. All content is compared with its digests. If another process is loading the same
    weights now, this waits for it, and calls ``load`` if that process ends. Errors of the store are not raised.
    """
    store = process.saver().shared_store if process.enabled() else None
    loading, reason = None, "this process has no shared store; set MEMSAVER_SHARED_BACKUPS"
    if store is not None:
        try:
            loading = Loading(store, key, tensors, tag)
        except (ValueError, MemsaverError) as error:
            reason = str(error)
    if loading is None:
        load()
    else:
        reason = loading.run(load)
        _loaded.append((tag, key, {name: weakref.ref(tensor) for name, tensor in tensors().items()}))
    if reason:
        level = logging.WARNING if store is not None else logging.INFO
        logger.log(level, "the weights of %s were loaded in the ordinary way: %s", key.model, reason)
    else:
        logger.info("the weights of %s came from the shared store", key.model)
    return reason


def living(tag: str) -> list[tuple[WeightsKey, Tensors]]:
    """Return what ``load_weights`` has filled for ``tag``, by calls of which all tensors are still there."""
    found = list[tuple[WeightsKey, Tensors]]()
    for each in list(_loaded):
        tensors = {name: tensor for name, reference in each[2].items() if (tensor := reference()) is not None}
        if len(tensors) < len(each[2]):
            _loaded.remove(each)
        elif each[0] == tag:
            found.append((each[1], tensors))
    return found


class Loading:
    """Weights that a process looks for in the shared store, and gives to it if they are not there."""

    def __init__(self, store: SharedStore, key: WeightsKey, tensors: Callable[[], Tensors], tag: str) -> None:
        """Raise ValueError if the weights can be neither in the store nor given to it."""
        self._saver, self._store, self._key, self._tensors, self._tag = process.saver(), store, key, tensors, tag
        self._layout, self._storages = _layout_of(tensors())
        self._device = next(iter(tensors().values())).device.index or 0
        self._name = key.name(self._layout)

    def run(self, load: Callable[[], object]) -> str:
        """Return why the weights were loaded; an empty string if they were not."""
        reason = ""
        while (answer := self._find())[0] == "kept":
            try:
                self._fill()
                return ""
            except (MemsaverError, ValueError) as error:
                reason = str(error)
                self._store.give(answer[1])
                damaged = isinstance(error, (BackupError, ValueError))
            if not (damaged and self._store.mark_text(self._name, "dropped")):
                break
        found, entry = answer
        if found == "claimed":
            reason = reason or self._why_missing()
            self._load_and_publish(load, entry)
        else:
            waited = f"another process has been loading them for {WAIT_S:.0f} s"
            no_room = "the store's index is full, or locked by another process"
            reason = reason or (waited if found == "awaited" else no_room)
            load()
        return reason

    def find(self) -> tuple[str, int]:
        """Return what the store has of them, without a wait: ``kept``, ``claimed`` for this process, ``awaited`` from
        another one, or ``no_room``; and the entry, which this process is to give back, of the first two."""
        return self._store.find_text(int(self._name[:16], 16), int(self._name[16:], 16))

    def _find(self) -> tuple[str, int]:
        until = time.monotonic() + WAIT_S
        while (answer := self.find())[0] == "awaited" and time.monotonic() < until:
            self._store.wait_for_change()
        return answer

    def _why_missing(self) -> str:
        """Return why there is no manifest: what the store has of this model differs, or it has nothing of it."""
        mine = asdict(self._key)
        for each in kept_in(self._store):
            if each.manifest is not None and each.manifest.key.model == self._key.model:
                pairs = [(name, value, mine[name]) for name, value in asdict(each.manifest.key).items()]
                differing = [f"{name} {theirs!r}, not {ours!r}" for name, theirs, ours in pairs if theirs != ours]
                return f"the store has them with {', '.join(differing) or 'another layout of tensors'}"
        return "the store has none of this model"

    def _manifest(self) -> Manifest:
        """Return what the store has of them; raise ValueError."""
        manifest = next((each.manifest for each in kept_in(self._store) if each.text["name"] == self._name), None)
        if manifest is None or len(manifest.storages) != len(self._storages):
            raise ValueError("what the store has of them is damaged, or of another version of memsaver")
        return manifest

    def _released(self, allocation: Allocation) -> _native.HostBuffer:
        """Return released memory whose backup is what the store has; raise BackupError if that lacks a part."""
        policy = policy_for(self._tag, None).value
        nbytes, blocks = allocation
        try:
            return _native.HostBuffer(self._saver, self._device, self._tag, policy, nbytes, blocks=blocks)
        except BackupError as error:
            more = "the process that gave it has replaced it; a keeper (memsaver store keep) would have held it"
            raise BackupError(f"{error}: {more}") from error

    def _fill(self) -> None:
        """Put the tensors on memory with the content that the store has; raise MemsaverError or ValueError. Tensors
        that have moved by then have their content."""
        manifest = self._manifest()
        backend, device = process.backend(), self._device
        sharers = sharing(self._storages, self._tensors().values())
        # Old memory is given back after each batch. A large batch has more blocks that are not packed, through whose
        # memory the packed ones are unpacked.
        room = max(LEAST_BATCH_BYTES, self._saver.memory_info(device)[0] // 2)
        with backend.outside_regions():
            backend.forget_pools(self._tag)
            for batch in _batches(manifest.allocations, room):
                buffers = {index: self._released(allocation) for index, allocation in batch.items()}
                with_room(lambda: self._saver.resume([self._tag], True))
                moved = {
                    number: backend.storage_in(buffers[index], device, offset, nbytes)
                    for number, (index, offset, nbytes) in enumerate(manifest.storages)
                    if index in buffers
                }
                for number, storage in moved.items():
                    rebase(sharers[number], {self._storages[number]._cdata: storage})
                    self._storages[number] = storage
                del buffers, moved
                backend.empty_cache()
        self._saver.trim_backup_memory()  # through which content passed

    def has(self, storage: int) -> bool:
        """Return whether the storage of this ``_cdata`` is of these tensors."""
        return any(each._cdata == storage for each in self._storages)

    def copy_to(self, lent: Mapping[int, torch.UntypedStorage]) -> None:
        """Copy what the store has to the storages in host memory that stand for the tensors' own, whose ``_cdata`` are
        the keys. Raises MemsaverError or ValueError if it lacks a part, or that differs from its digest."""
        manifest = self._manifest()
        for index, allocation in enumerate(manifest.allocations):
            buffer = self._released(allocation)
            pages = mmap.mmap(-1, allocation.nbytes)
            content = torch.frombuffer(pages, dtype=torch.uint8)
            self._saver.backup_of(buffer.address, allocation.nbytes, content.data_ptr())
            for number, (of, offset, nbytes) in enumerate(manifest.storages):
                if of == index:
                    to = torch.empty(0, dtype=torch.uint8).set_(lent[self._storages[number]._cdata])
                    to.copy_(content[offset : offset + nbytes])
            # Compares digests: what differs gets new blocks.
            _native.Rewrite(self._saver, [(buffer.address, content.data_ptr())]).commit()
            saved = {address: blocks for address, _, blocks in self._saver.saved(self._tag)}
            if [block[3] for block in saved.get(buffer.address, [])] != [block[3] for block in allocation.blocks]:
                raise ValueError("what the store has of them differs from its digest")

    def drop(self) -> None:
        """Have no process find what the store has: it is damaged."""
        self._store.mark_text(self._name, "dropped")

    def _load_and_publish(self, load: Callable[[], object], entry: int) -> None:
        """Load, and let other processes find the weights by the text that this process has claimed."""
        with ExitStack() as undo:
            undo.callback(self._store.give, entry)
            load()
            try:
                self._saver.prepare_backup()
                self._saver.save([self._tag], process.backend().dead_ranges(self._saver))
                self.publish(entry)
                undo.pop_all()
            except (MemsaverError, ValueError) as error:
                logger.warning("the shared store does not have the weights of %s: %s", self._key.model, error)

    def publish(self, entry: int) -> None:
        """Let other processes find the content that the backups have now; raise MemsaverError or ValueError."""
        layout, storages = _layout_of(self._tensors())
        if layout != self._layout:
            raise ValueError("loading has changed the layout of the tensors")
        saved = sorted(self._saver.saved(self._tag))
        begins = [address for address, _, _ in saved]
        places = []
        for storage in storages:
            index = bisect_right(begins, storage.data_ptr()) - 1
            address, nbytes, _ = saved[index] if index >= 0 else (0, 0, [])
            offset = storage.data_ptr() - address
            if offset + storage.nbytes() > nbytes:
                raise ValueError(f"a tensor is in no region of {self._tag!r}, or the store has no room for it")
            places.append((index, offset, storage.nbytes()))
        # In the order of addresses: what was not packed, and serves to unpack, comes first.
        numbers = {index: number for number, index in enumerate(sorted({index for index, _, _ in places}))}
        places = [(numbers[index], offset, nbytes) for index, offset, nbytes in places]
        manifest = Manifest(self._key, places, [Allocation(*saved[index][1:]) for index in numbers])
        self._store.publish_text(entry, manifest.to_text())


def _layout_of(tensors: Tensors) -> tuple[list[Any], list[torch.UntypedStorage]]:
    """Return how tensors lie in their storages, as JSON has it, and these storages in order. Raises ValueError if some
    are not ordinary tensors on one device of memsaver's."""
    storages: dict[int, tuple[int, torch.UntypedStorage]] = {}  # with their numbers
    rows: list[Any] = []
    devices = set()
    for name, tensor in sorted(tensors.items()):
        if not is_movable(tensor) or tensor.device.type != process.torch_device().type:
            raise ValueError(f"{name} is on {tensor.device}, or no ordinary tensor")
        storage = tensor.untyped_storage()
        devices.add(tensor.device)
        number = -1
        if storage.nbytes():
            number, _ = storages.setdefault(storage._cdata, (len(storages), storage))
        row = [name, str(tensor.dtype), list(tensor.shape), list(tensor.stride()), number, tensor.storage_offset()]
        rows.append([*row, storage.nbytes()])
    if len(devices) != 1:
        raise ValueError(f"the tensors are on {len(devices)} devices")
    return rows, [storage for _, storage in storages.values()]


def sharing(storages: Sequence[torch.UntypedStorage], known: Iterable[torch.Tensor] = ()) -> list[list[torch.Tensor]]:
    """Return the tensors of this process that share each storage: those ``known`` if the storages' use counts show that
    no others refer to them, else what a search of all objects finds."""
    use_count = getattr(torch._C, "_storage_Use_Count", lambda _: 0)
    found = _by_storage(storages, {id(tensor): tensor for tensor in known}.values())
    # The storage's object in Python has a reference, too.
    if all(use_count(storage._cdata) == len(its) + 1 for storage, its in zip(storages, found, strict=True)):
        return found
    return _by_storage(storages, filter(is_movable, all_tensors()))


def _by_storage(storages: Sequence[torch.UntypedStorage], tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    numbers = {storage._cdata: number for number, storage in enumerate(storages)}
    found: list[list[torch.Tensor]] = [[] for _ in storages]
    for each in tensors:
        if (number := numbers.get(each.untyped_storage()._cdata)) is not None:
            found[number].append(each)
    return found


def _batches(allocations: Sequence[Allocation], nbytes: int) -> Iterator[dict[int, Allocation]]:
    """Yield the allocations, by their numbers, in batches of about ``nbytes``."""
    batch: dict[int, Allocation] = {}
    for number, allocation in enumerate(allocations):
        batch[number] = allocation
        if sum(each.nbytes for each in batch.values()) >= nbytes:
            yield batch
            batch = {}
    if batch:
        yield batch
