"""A resize: a part of a tag's memory goes back to the driver, while the rest of it stays in use."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch

from memsaver_core import _native, hibernation, process
from memsaver_core.contract.errors import ConfigurationError, UnsupportedError
from memsaver_core.contract.reports import ResizeReport
from memsaver_core.contract.requests import ResizeKvCache
from memsaver_core.release_resume import check_tags, status
from memsaver_core.storages import is_plain

#: The tag of the memory that engines resize.
[KV_CACHE] = ResizeKvCache.tags


def resize(
    tag: str, *, fraction: float | None = None, bytes: int | None = None, unused: Iterable[torch.Tensor] | None = None
) -> ResizeReport:
    """Give the memory of a part of a tag back to the driver, or take it again; addresses stay.

    What stays is not touched. What comes back is zero. Memory goes in whole pieces (``chunk_bytes`` of the region):
    a piece stays if any part of it does. Nothing may use the unused part until a later resize keeps it again. A release
    of the tag and its resume leave the unused part where it is. While all of the tag is released nothing moves: its
    resume brings back what is used, and zeros in what was unused before. All or nothing, on all devices.

    Args:
        tag: which; all of its memory must be resident, or released.
        fraction: keep this much of each allocation, from its beginning: 0 to 1. 1 takes everything again.
        bytes: keep this much of the tag in all: the same fraction of each allocation.
        unused: keep all but these contiguous tensors or slices, such as ``keys[pages:]``.

    Raises:
        UnknownTagError: before anything was done.
        ConfigurationError: not exactly one of the arguments was given, it is invalid, one of ``unused`` is not in a
            region of the tag, or a part of the tag is released.
        UnsupportedError: this process is hibernated.
        OutOfDeviceMemoryError: the device has too little free memory to grow; everything is as before.
        MemsaverError: a driver call failed; everything is as before, but what was unused may be zero. If the undo
            failed as well, what was given back stays so.
    """
    if sum(each is not None for each in (fraction, bytes, unused)) != 1:
        raise ConfigurationError("a resize takes exactly one of fraction, bytes and unused")
    if not 0 <= (fraction or 0) <= 1 or (bytes or 0) < 0:
        raise ConfigurationError(f"a fraction is 0 to 1 and bytes at least 0, not {fraction or bytes}")
    check_tags([tag])
    if not process.enabled():
        return ResizeReport(tag=tag, enabled=False)
    hibernation.raise_if_lost()
    if hibernation.is_hibernated():
        raise UnsupportedError("this process is hibernated; resume it before a resize")
    saver, backend = process.saver(), process.backend()
    if bytes is not None:
        fraction = min(1.0, bytes / max(1, _bytes_of(tag)))
    ranges = _ranges(saver, list(unused or ()))
    kept = 1.0 if fraction is None else fraction
    backend.note_release([tag])
    # Not by emptying torch's cache if memory is short: the engine's next step takes it from there.
    result = saver.resize(tag, ranges, kept)
    sums = {name: sum(each[name] for each in result["tags"]) for name in ("bytes", "released_bytes", "resumed_bytes")}
    return ResizeReport(tag=tag, seconds=result["seconds"], shrunk_bytes=_bytes_of(tag, "shrunk_bytes"), **sums)


def _bytes_of(tag: str, what: str = "bytes") -> int:
    return sum(getattr(each, what) for each in status().tags if each.tag == tag)


def _ranges(saver: _native.Saver, tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Return (address, bytes) of contiguous tensors. One that ends its storage includes the rest of the memory."""
    ends = process.backend().ends(saver, [tensor.untyped_storage() for tensor in tensors])
    ranges = []
    for tensor in tensors:
        if not is_plain(tensor) or not tensor.is_contiguous():
            raise ConfigurationError("only contiguous tensors can be unused; pass the slices of one apart")
        storage = tensor.untyped_storage()
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if end == storage.data_ptr() + storage.nbytes():
            end = max(end, ends.get(storage.data_ptr(), end))
        ranges.append((begin, end - begin))
    return [each for each in ranges if each[1] > 0]


def piece_bytes(tag: str) -> int:
    """Return the ``chunk_bytes`` of a region of ``tag`` that an engine makes: the KV cache may come in pieces."""
    return process.core_settings().kv_cache_piece if tag == KV_CACHE else 0


def behind(view: torch.Tensor, pages: int, total: int) -> Iterator[torch.Tensor]:
    """Yield, as bytes, what follows the first ``pages`` of ``total`` pages of a layer's KV cache. Its dimensions may be
    in any order in memory: keys and values apart, or pages of all layers together. Raises UnsupportedError if more than
    one of them can count the pages, or none."""
    dimensions = [dimension for dimension, size in enumerate(view.shape) if size % total == 0]
    if view.dim() < 2 or len(dimensions) != 1:
        raise UnsupportedError(
            f"no single dimension of a KV cache of shape {tuple(view.shape)} counts its {total} pages"
        )
    [dimension] = dimensions
    per_page = view.shape[dimension] // total  # tokens, or the smaller pages of attention kernels
    tail = view.narrow(dimension, pages * per_page, (total - pages) * per_page)
    if tail.numel() == 0:
        return
    stride = tail.stride(dimension)
    sizes = list(zip(tail.shape, tail.stride(), strict=True))
    length = 1 + sum((size - 1) * step for size, step in sizes if step <= stride)
    apart = [range(0, size * step, step) for size, step in sizes if step > stride and size > 1]
    whole = torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())
    for offsets in itertools.product(*apart):
        begin = tail.storage_offset() + sum(offsets)
        yield whole[begin * view.itemsize : (begin + length) * view.itemsize]
