"""Regions: torch tensors keep their addresses and content, and their memory really goes."""

from __future__ import annotations

import gc

import pytest
import torch

import memsaver_core as ms
from memsaver_core import _native, process
from tests.programs import run_python

MIB = 1 << 20


def used_bytes() -> int:
    return ms.read_devices()[0].used_bytes


def owned(tensor: torch.Tensor) -> bool:
    return process.saver().owns(tensor.untyped_storage().data_ptr())


def bytes_of(tag: str) -> int:
    return sum(each.bytes for each in ms.status().tags if each.tag == tag)


def test_content_addresses_and_device_count(tag: str, device: str, unit: int, slack: int) -> None:
    """Addresses are the same, content is what each policy owes, and the device's own count falls and rises."""
    with ms.region(tag + "-h", restore="host"):
        kept = torch.randn(64 * unit // 4, device=device)
    with ms.region(tag + "-z", restore="zero"):
        zeroed = torch.ones(256 * unit // 4, device=device)
    with ms.region(tag + "-f", restore="file"):
        filed = torch.randn(96 * unit // 4, device=device)
    with ms.region(tag + "-d", restore="discard"):
        scratch = torch.ones(512 * unit // 4, device=device)
    names = [tag + suffix for suffix in ("-h", "-z", "-f", "-d")]
    pointers = [tensor.data_ptr() for tensor in (kept, zeroed, filed, scratch)]
    expected, expected_filed = kept.cpu().clone(), filed.cpu().clone()

    before = used_bytes()
    report = ms.release(names)
    assert before - used_bytes() >= (64 + 256 + 96 + 512) * unit - slack
    assert report.released_bytes >= (64 + 256 + 96 + 512) * unit
    assert report.devices[0].delta_bytes <= -(64 + 256 + 96 + 512) * unit + slack
    assert {each.tag: each.state for each in report.tags} == dict.fromkeys(names, "released")

    ms.resume(names)
    assert abs(used_bytes() - before) <= slack
    assert pointers == [tensor.data_ptr() for tensor in (kept, zeroed, filed, scratch)]
    assert torch.equal(kept.cpu(), expected)
    assert torch.equal(filed.cpu(), expected_filed)
    assert not zeroed.any()
    scratch.fill_(3)
    assert bool((scratch == 3).all())


def test_unchanged_content_is_not_copied(tag: str, device: str, unit: int) -> None:
    with ms.region(tag, restore="host"):
        tensors = [torch.randn(40 * unit // 4, device=device) for _ in range(8)]
    first = ms.release([tag]).tags[0]
    assert first.backed_up_bytes == 8 * 40 * unit
    ms.resume([tag])
    second = ms.release([tag]).tags[0]
    assert (second.backed_up_bytes, second.unchanged_bytes) == (0, 8 * 40 * unit)
    ms.resume([tag])
    tensors[3][12345] += 1
    expected = [tensor.cpu().clone() for tensor in tensors]
    third = ms.release([tag]).tags[0]
    assert 0 < third.backed_up_bytes <= 40 * unit
    ms.resume([tag])
    assert all(torch.equal(tensor.cpu(), host) for tensor, host in zip(tensors, expected, strict=True))


def test_zero_content_needs_no_host_memory(tag: str, device: str, unit: int) -> None:
    with ms.region(tag, restore="host"):
        zeros = torch.zeros(128 * unit // 4, device=device)
    report = ms.release([tag]).tags[0]
    assert (report.backed_up_bytes, report.zero_bytes) == (0, 128 * unit)
    ms.resume([tag])
    assert not zeros.any()


@pytest.mark.guards("an allocation made under a released tag broke the resume")
def test_allocation_while_released_lives(tag: str, device: str, unit: int) -> None:
    with ms.region(tag, restore="host"):
        old = torch.randn(32 * unit // 4, device=device)
        freed = torch.randn(32 * unit // 4, device=device)
    expected = old.cpu().clone()
    del freed  # on a GPU torch keeps it as a free block, in a segment that is about to go
    ms.release([tag])
    with ms.region(tag, restore="host"):
        new = torch.full((8 * unit,), 7.0, device=device)
        second = torch.full((1000,), 8.0, device=device)
    assert float(new.sum()) == 7.0 * new.numel()
    ms.resume([tag])
    assert torch.equal(old.cpu(), expected)
    assert bool((new == 7).all())
    assert bool((second == 8).all())


@pytest.mark.guards("freeing a released tensor released its memory twice")
def test_free_while_released(tag: str, device: str, unit: int) -> None:
    with ms.region(tag, restore="host"):
        doomed = torch.randn(64 * unit // 4, device=device)
        kept = torch.randn(64 * unit // 4, device=device)
    expected = kept.cpu().clone()
    ms.release([tag])
    del doomed
    gc.collect()
    torch.cuda.empty_cache()
    ms.resume([tag])
    assert torch.equal(kept.cpu(), expected)


@pytest.mark.guards("a second release or resume failed", "releasing everything failed after one tag had been released")
def test_repeats_are_success(tag: str, device: str, unit: int) -> None:
    with ms.region(tag + "-a"):
        first = torch.ones(4 * unit, device=device)
    with ms.region(tag + "-b"):
        second = torch.ones(4 * unit, device=device)
    names = [tag + "-a", tag + "-b"]
    assert not ms.resume(names).resumed_bytes
    ms.release(names[0])  # one tag, not its letters
    assert [each.already for each in ms.release(names).tags] == [True, False]
    assert [each.already for each in ms.release(names).tags] == [True, True]
    ms.resume([names[1]])
    ms.resume(names)
    first.fill_(1)
    second.fill_(2)
    if device == "cuda":
        torch.cuda.synchronize()


@pytest.mark.guards("tensors were recorded under the wrong tag", "a nested region used the wrong pool")
def test_a_region_holds_what_is_allocated_inside_it(tag: str, device: str) -> None:
    """Nothing else, views included; after a nested region the outer tag applies again."""
    # What torch's CUDA allocator gives a segment of its own is counted exactly; host memory is rounded up to pages.
    sizes = (32 * MIB, 64 * MIB, 16 * MIB) if device == "cuda" else (4000, 4000, 4000)
    expected = (48 * MIB, 64 * MIB) if device == "cuda" else (8192, 4096)

    def allocate(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    before = torch.ones(1000, device=device)
    with ms.region(tag + "-outer"):
        view_of_before = before[10:20]
        before.add_(1)
        first = allocate(sizes[0])
        with ms.region(tag + "-inner"):
            inner = allocate(sizes[1])
            view_of_first = first[5:]
        last = allocate(sizes[2])
    after = allocate(8 * MIB)
    assert [owned(each) for each in (before, view_of_before, after)] == [False] * 3
    assert [owned(each) for each in (first, inner, view_of_first, last)] == [True] * 4
    assert view_of_first.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
    assert (bytes_of(tag + "-outer"), bytes_of(tag + "-inner")) == expected


def test_digest_of_more_than_is_digested_at_once(device: str) -> None:
    data = torch.arange(257 * MIB, device=device)  # 2 GiB and a little more
    process.saver().synchronize()
    key = (1, 2, 3, 4)
    assert process.saver().digest(0, data.data_ptr(), data.nbytes, key) == _native.digest_of(data.cpu().numpy(), key)


@pytest.mark.parametrize("state", ["resident", "released", "resumed"])
@pytest.mark.guards("the process aborted at exit")
def test_clean_exit(state: str, device: str) -> None:
    """With pools and, on a GPU, graphs alive."""
    result = run_python(
        f"""
        import torch, memsaver_core as ms
        with ms.region("weights"):
            model = torch.nn.Linear(100, 100).to({device!r})
            weights = torch.randn(1 << 20, device={device!r})
        if {device!r} == "cuda":
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with ms.graph(graph, stream=stream):
                doubled = weights * 2
            graph.replay()
            torch.cuda.synchronize()
        if {state!r} != "resident":
            ms.release()
        if {state!r} == "resumed":
            ms.resume()
        print("end")
        """,
        TESTS_END_WHOLE="1",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "end"
    assert "terminate" not in result.stderr
    assert "memsaver: warning" not in result.stderr
