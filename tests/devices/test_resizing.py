"""A part of a tag's memory goes back to the driver, and comes back, while the rest stays in use."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import memsaver_core as ms
from memsaver_core import process

MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _other_memory() -> Iterator[None]:
    """Stays resident: a release of all memory of a device gives back the stacks of its kernels, too."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with ms.region("other"):
        tensor = torch.ones(MIB, dtype=torch.uint8, device=device)
    yield
    del tensor
    give_back("other")


def used_bytes() -> int:
    process.backend().empty_cache()  # a release does, too
    return ms.read_devices()[0].used_bytes


def held(tag: str) -> ms.TagStatus:
    return next(each for each in ms.status().tags if each.tag == tag)


def caches(tag: str, device: str, unit: int, restore: str = "zero") -> list[torch.Tensor]:
    """Two tensors of 64 units, in pieces of 16, that hold ones."""
    with ms.region(tag, restore=restore, chunk_bytes=16 * unit):
        return [torch.ones(64 * unit, dtype=torch.uint8, device=device) for _ in range(2)]


def give_back(tag: str) -> None:
    """What tensors have left in torch's pool of a tag goes to the driver."""
    gc.collect()
    process.backend().forget_pools(tag)
    process.backend().empty_cache()


@contextmanager
def falls_by(nbytes: int, slack: int) -> Iterator[None]:
    """The device's own count falls by this much."""
    before = used_bytes()
    yield
    assert abs(before - used_bytes() - nbytes) <= slack


def test_the_tail_goes_and_comes_back_as_zeros(tag: str, device: str, unit: int, slack: int) -> None:
    tensors = caches(tag, device, unit)
    pointers = [tensor.data_ptr() for tensor in tensors]
    with falls_by(64 * unit, slack):
        report = ms.resize(tag, fraction=0.5)
    assert (report.bytes, report.shrunk_bytes) == (128 * unit, 64 * unit)
    assert (report.released_bytes, report.resumed_bytes) == (64 * unit, 0)
    status = held(tag)
    assert (status.state, status.bytes, status.released_bytes) == ("resident", 128 * unit, 0)
    assert (status.resident_bytes, status.shrunk_bytes) == (64 * unit, 64 * unit)
    assert status.shrunk_by_device == {0: 64 * unit}
    for tensor in tensors:
        tensor[: 32 * unit] += 1  # what stays is in use
    with falls_by(-64 * unit, slack):
        report = ms.resize(tag, fraction=1)
    assert (report.shrunk_bytes, report.released_bytes, report.resumed_bytes) == (0, 0, 64 * unit)
    assert pointers == [tensor.data_ptr() for tensor in tensors]
    for tensor in tensors:
        assert (tensor[: 32 * unit] == 2).all()
        assert not tensor[32 * unit :].any()


@pytest.mark.parametrize(
    ("size", "kept"),
    [
        ({"fraction": 0.25}, 16),
        ({"fraction": 0.26}, 32),  # a piece of which a part stays, stays
        ({"fraction": 0.0}, 0),
        ({"bytes": 96}, 48),
        ({"bytes": 97}, 64),
        ({"bytes": 1000}, 64),
    ],
)
def test_sizes(tag: str, device: str, unit: int, size: dict[str, float], kept: int) -> None:
    """Units that each of two tensors keeps."""
    tensors = caches(tag, device, unit)
    given = {name: int(value * unit) if name == "bytes" else value for name, value in size.items()}
    assert ms.resize(tag, **given).shrunk_bytes == 2 * (64 - kept) * unit  # type: ignore[arg-type]
    assert all((tensor[: kept * unit] == 1).all() for tensor in tensors)


def test_ranges_that_a_caller_names(tag: str, device: str, unit: int) -> None:
    """Keys and values lie apart in one tensor: the tail of each half goes. One call shrinks and grows."""
    with ms.region(tag, restore="zero", chunk_bytes=8 * unit):
        cache = torch.ones(2, 30 * unit, dtype=torch.uint8, device=device)
    assert ms.resize(tag, unused=[cache[0, 16 * unit :], cache[1, 10 * unit :]]).shrunk_bytes == (8 + 20) * unit
    assert (cache[0, : 16 * unit] == 1).all()
    assert (cache[1, : 10 * unit] == 1).all()
    report = ms.resize(tag, unused=[cache[0, : 8 * unit]])
    assert (report.released_bytes, report.resumed_bytes) == (8 * unit, 28 * unit)
    assert (cache[0, 8 * unit : 16 * unit] == 1).all()
    assert not cache[1, 10 * unit :].any()
    assert ms.resize(tag, unused=[]).shrunk_bytes == 0
    assert not cache[0, : 8 * unit].any()


def test_the_end_of_a_tensor_that_does_not_fill_its_memory(tag: str, device: str, unit: int) -> None:
    with ms.region(tag, restore="zero", chunk_bytes=16 * unit):
        cache = torch.ones(34 * unit - 100, dtype=torch.uint8, device=device)  # torch uses what is left of less itself
    whole = held(tag).bytes
    report = ms.resize(tag, unused=[cache[16 * unit :]])  # not in an assertion, which would read what is gone
    assert report.shrunk_bytes == whole - 16 * unit


@pytest.mark.parametrize("restore", ["discard", "zero", "host", "file"])
def test_a_release_and_its_resume_keep_the_size(tag: str, device: str, unit: int, slack: int, restore: str) -> None:
    tensors = caches(tag, device, unit, restore)
    ms.resize(tag, fraction=0.5)
    for _ in range(2):
        with falls_by(64 * unit, slack):
            assert ms.release([tag]).released_bytes == 64 * unit
        status = held(tag)
        assert (status.state, status.released_bytes, status.shrunk_bytes) == ("released", 64 * unit, 64 * unit)
        with falls_by(-64 * unit, slack):
            assert ms.resume([tag]).resumed_bytes == 64 * unit
        assert (held(tag).state, held(tag).shrunk_bytes) == ("resident", 64 * unit)
        if restore in ("host", "file"):
            assert all((tensor[: 32 * unit] == 1).all() for tensor in tensors)
    assert ms.resize(tag, fraction=0.25).released_bytes == 32 * unit  # in the pieces that the resume mapped
    ms.resize(tag, fraction=1)
    assert not any(tensor[32 * unit :].any() for tensor in tensors)


def test_a_backup_of_what_goes_is_not_restored(tag: str, device: str, unit: int) -> None:
    tensors = caches(tag, device, unit, "host")
    ms.release([tag])
    ms.resume([tag])
    assert held(tag).backed_up_bytes == 128 * unit
    ms.resize(tag, fraction=0.5)
    assert held(tag).backed_up_bytes == 64 * unit
    ms.resize(tag, fraction=1)
    assert not any(tensor[32 * unit :].any() for tensor in tensors)


def test_memory_is_allocated_and_freed_while_shrunk(tag: str, device: str, unit: int, slack: int) -> None:
    tensors = caches(tag, device, unit)
    ms.resize(tag, fraction=0.5)
    more = caches(tag, device, unit)
    assert all((tensor == 1).all() for tensor in more)
    assert held(tag).shrunk_bytes == 64 * unit
    with falls_by(64 * unit, slack):
        del tensors
        give_back(tag)
    assert (held(tag).bytes, held(tag).shrunk_bytes) == (128 * unit, 0)
    ms.resize(tag, fraction=0)
    del more
    give_back(tag)
    again = caches(tag, device, unit)
    assert all((tensor == 1).all() for tensor in again)


def test_without_a_chunk_size_memory_goes_by_whole_allocations(tag: str, device: str, unit: int) -> None:
    with ms.region(tag, restore="zero"):
        cache = torch.ones(64 * unit, dtype=torch.uint8, device=device)
    assert ms.resize(tag, fraction=0.5).shrunk_bytes == 0
    assert (cache == 1).all()
    assert ms.resize(tag, fraction=0).shrunk_bytes == 64 * unit


def test_what_is_refused_changes_nothing(tag: str, device: str, unit: int) -> None:
    tensors = caches(tag, device, unit)
    for wrong in ({}, {"fraction": 0.5, "bytes": 1}, {"fraction": 1.5}, {"fraction": -0.1}, {"bytes": -1}):
        with pytest.raises(ms.ConfigurationError):
            ms.resize(tag, **wrong)
    with pytest.raises(ms.ConfigurationError, match="contiguous"):
        ms.resize(tag, unused=[tensors[0][::2]])
    with pytest.raises(ms.ConfigurationError, match="not in a region of the tag"):
        ms.resize(tag, unused=[tensors[0], torch.ones(unit, dtype=torch.uint8, device=device)])
    with pytest.raises(ms.UnknownTagError):
        ms.resize(tag + "-other", fraction=0.5)
    with pytest.raises(ms.ConfigurationError), ms.region(tag, chunk_bytes=-1):
        pass
    assert held(tag).shrunk_bytes == 0


@pytest.mark.parametrize("restore", ["host", "zero"])
def test_a_resume_brings_back_a_part(tag: str, device: str, unit: int, slack: int, restore: str) -> None:
    """What is divided while it is released moves nothing, and what no resume brought back comes as zeros."""
    tensors = caches(tag, device, unit, restore)
    ms.release([tag])
    with falls_by(0, slack):
        report = ms.resize(tag, fraction=0.25)
    assert (report.bytes, report.shrunk_bytes) == (128 * unit, 96 * unit)
    assert (report.released_bytes, report.resumed_bytes) == (0, 0)
    assert (held(tag).state, held(tag).released_bytes) == ("released", 32 * unit)
    assert ms.resize(tag, fraction=0.5).shrunk_bytes == 64 * unit
    with falls_by(-64 * unit, slack):
        assert ms.resume([tag]).resumed_bytes == 64 * unit
    kept = 1 if restore == "host" else 0
    for tensor in tensors:
        assert (tensor[: 16 * unit] == kept).all()
        assert not tensor[16 * unit : 32 * unit].any()
    assert ms.resize(tag, fraction=1).resumed_bytes == 64 * unit
    for tensor in tensors:
        assert not tensor[32 * unit :].any()


def test_a_tag_without_memory() -> None:
    process.saver()
    held = {tag.tag for tag in ms.status().tags if tag.bytes}
    report = ms.resize(min({*ms.WELL_KNOWN_TAGS} - held), fraction=0.5)
    assert (report.bytes, report.released_bytes, report.resumed_bytes, report.shrunk_bytes) == (0, 0, 0, 0)
