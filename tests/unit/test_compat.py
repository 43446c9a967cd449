"""torch_memory_saver's API on the host driver, in this process."""

from __future__ import annotations

import gc
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver_core as ms
from memsaver_core import _native, process
from memsaver_core.compat.torch_memory_saver import TorchMemorySaver, state, torch_memory_saver
from memsaver_core.compat.torch_memory_saver import testing_utils as testing
from memsaver_core.compat.torch_memory_saver.utils import change_env, get_binary_path_from_package

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host driver's regions")

MIB = 1 << 20


@pytest.fixture
def tag() -> str:
    return f"t-{uuid.uuid4().hex[:8]}"


@pytest.fixture(autouse=True)
def _defaults() -> Iterator[None]:
    yield
    torch_memory_saver.retain_cpu_backup = False
    torch_memory_saver.memory_margin_bytes = 0


def owned(tensor: torch.Tensor) -> bool:
    return process.saver().owns(tensor.untyped_storage().data_ptr())


def state_of(tag: str) -> str:
    return next(each.state for each in ms.status().tags if each.tag == tag)


def test_pause_gives_memory_back_and_resume_brings_it_to_the_same_address(tag: str) -> None:
    with torch_memory_saver.region(tag):
        tensor = torch.full((8 * MIB,), 100, dtype=torch.uint8)
    address = tensor.data_ptr()
    before = testing.get_and_print_gpu_memory("before")
    torch_memory_saver.pause(tag)
    assert testing.get_and_print_gpu_memory("paused") == before - 8 * MIB
    torch_memory_saver.resume(tag)
    assert testing.get_and_print_gpu_memory("resumed") == before
    assert tensor.data_ptr() == address
    tensor.fill_(3)
    assert bool((tensor == 3).all())


def test_one_tag_with_several_kinds_of_backup(tag: str, tmp_path: Path) -> None:
    torch_memory_saver.set_disk_backup_dir(str(tmp_path / "made"))
    assert (tmp_path / "made").is_dir()
    with torch_memory_saver.region(tag, enable_cpu_backup=True):
        in_memory = torch.randn(1000)
    with torch_memory_saver.region(tag, enable_disk_backup=True):
        on_disk = torch.randn(1000)
    with torch_memory_saver.region(tag):
        scratch = torch.full((1000,), 20.0)
    expected = in_memory.clone(), on_disk.clone()
    for _ in range(3):
        torch_memory_saver.pause(tag)
        assert ms.status().host_backup.file_bytes > 0
        assert torch_memory_saver.get_cpu_backup(on_disk) is None
        torch_memory_saver.resume(tag)
        assert torch.equal(in_memory, expected[0])
        assert torch.equal(on_disk, expected[1])
        assert not bool((scratch == 20).any())
        scratch.fill_(20)
        assert ms.status().host_backup.file_bytes == 0


def test_folder_of_backups_cannot_change_under_paused_memory(tag: str, tmp_path: Path) -> None:
    with torch_memory_saver.region(tag, enable_disk_backup=True):
        tensor = torch.randn(1000)
    expected = tensor.clone()
    torch_memory_saver.pause(tag)
    with pytest.raises(ms.ConfigurationError, match="resume what is released first"):
        torch_memory_saver.set_disk_backup_dir(str(tmp_path))
    torch_memory_saver.resume(tag)
    torch_memory_saver.set_disk_backup_dir(str(tmp_path))
    torch_memory_saver.pause(tag)
    torch_memory_saver.resume(tag)
    assert torch.equal(tensor, expected)


def test_tags_are_independent(tag: str) -> None:
    """In the order of an RL step."""
    weights, cache = tag + "-weights", tag + "-cache"
    with torch_memory_saver.region(tag=weights, enable_cpu_backup=True):
        model = torch.nn.Linear(64, 64)
    with torch_memory_saver.region(tag=cache):
        pages = torch.ones(1000)
    inputs = torch.randn(4, 64)
    expected = model(inputs)
    torch_memory_saver.pause(cache)
    assert torch.equal(model(inputs), expected)
    torch_memory_saver.pause(weights)
    assert (state_of(weights), state_of(cache)) == ("released", "released")
    torch_memory_saver.resume(weights)
    assert (state_of(weights), state_of(cache)) == ("resident", "released")
    assert torch.equal(model(inputs), expected)
    torch_memory_saver.resume(cache)
    pages.zero_()


@pytest.mark.guards("a second release or resume failed")
def test_pause_and_resume_can_be_repeated(tag: str) -> None:
    """In torch_memory_saver this ends the process."""
    with torch_memory_saver.region(tag, enable_cpu_backup=True):
        tensor = torch.randn(1000)
    expected = tensor.clone()
    torch_memory_saver.resume(tag)
    torch_memory_saver.pause(tag)
    torch_memory_saver.pause(tag)
    torch_memory_saver.resume(tag)
    torch_memory_saver.resume(tag)
    assert torch.equal(tensor, expected)


@pytest.mark.guards(
    "releasing everything failed after one tag had been released",
    "resuming everything failed on tags that were never released",
)
def test_a_tag_then_all(tag: str) -> None:
    """Pausing everything pauses the rest; resuming everything resumes what is paused."""
    with torch_memory_saver.region(tag + "-a", enable_cpu_backup=True):
        first = torch.randn(1000)
    with torch_memory_saver.region(tag + "-b", enable_cpu_backup=True):
        second = torch.randn(1000)
    expected = first.clone(), second.clone()
    torch_memory_saver.pause(tag + "-a")
    torch_memory_saver.pause()
    assert state_of(tag + "-b") == "released"
    torch_memory_saver.resume(tag + "-b")
    torch_memory_saver.resume()
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


def test_unknown_tag_is_passed_over(tag: str) -> None:
    torch_memory_saver.pause(tag)
    torch_memory_saver.resume(tag=tag)


@pytest.mark.guards("an allocation made under a released tag broke the resume")
def test_allocation_under_a_paused_tag(tag: str) -> None:
    """It is usable at once, and a resume brings the others back."""
    with torch_memory_saver.region(tag, enable_cpu_backup=True):
        old = torch.ones(1000)
    torch_memory_saver.pause(tag)
    with torch_memory_saver.region(tag, enable_cpu_backup=True):
        new = torch.full((1000,), 2.0)
    assert float(new.sum()) == 2000
    torch_memory_saver.resume(tag)
    assert float(old.sum()) == 1000
    assert float(new.sum()) == 2000


@pytest.mark.parametrize("backend", ["pinned", "mmap", None])
def test_backup_is_readable_while_paused(tag: str, backend: str | None) -> None:
    with torch_memory_saver.region(tag, enable_cpu_backup=True, cpu_backup_backend=backend):  # type: ignore[arg-type]
        tensor = torch.randn(10, 20, 30)
        half = torch.randn(7, 5).to(torch.bfloat16)
        zeros = torch.zeros(5000)
    with torch_memory_saver.region(tag):
        scratch = torch.ones(10)
    expected, expected_half = tensor.clone(), half.clone()
    assert torch_memory_saver.get_cpu_backup(tensor) is None
    torch_memory_saver.pause(tag)
    copy = torch_memory_saver.get_cpu_backup(tensor)
    assert copy is not None
    assert copy.shape == (10, 20, 30)
    assert torch.equal(copy, expected)
    view = torch_memory_saver.get_cpu_backup(half, zero_copy=True)
    again = torch_memory_saver.get_cpu_backup(half, zero_copy=True)
    assert view is not None
    assert again is not None
    assert torch.equal(view, expected_half)
    assert view.data_ptr() == again.data_ptr() != copy.data_ptr()
    row = torch_memory_saver.get_cpu_backup(tensor[3])
    assert row is not None
    assert torch.equal(row, expected[3])
    nothing = torch_memory_saver.get_cpu_backup(zeros, zero_copy=True)
    assert nothing is not None
    assert not nothing.any()
    with pytest.raises(ms.ConfigurationError, match="without a backup"):
        torch_memory_saver.get_cpu_backup(scratch)
    del view, again
    torch_memory_saver.resume(tag)
    assert torch_memory_saver.get_cpu_backup(tensor) is None
    assert torch.equal(tensor, expected)


def test_backup_that_spans_blocks(tag: str) -> None:
    with torch_memory_saver.region(tag, enable_cpu_backup=True):
        tensor = torch.randint(0, 255, (70 * MIB,), dtype=torch.uint8)
    expected = tensor.clone()
    torch_memory_saver.pause(tag)
    for zero_copy in (False, True):
        backup = torch_memory_saver.get_cpu_backup(tensor, zero_copy=zero_copy)
        assert backup is not None
        assert torch.equal(backup, expected)
    part = torch_memory_saver.get_cpu_backup(tensor[31 * MIB : 33 * MIB])
    assert part is not None
    assert torch.equal(part, expected[31 * MIB : 33 * MIB])
    torch_memory_saver.resume(tag)


def test_backup_of_what_is_in_no_region(tag: str) -> None:
    torch_memory_saver.pause(tag)
    with pytest.raises(ms.ConfigurationError, match="not memory of a region"):
        torch_memory_saver.get_cpu_backup(torch.ones(10))
    with torch_memory_saver.region(tag, enable_cpu_backup=True):
        tensor = torch.ones(10, 10)
    with pytest.raises(AssertionError, match="contiguous"):
        torch_memory_saver.get_cpu_backup(tensor.t())


def test_retained_backup(tag: str) -> None:
    """Resume reads the setting. A retained backup keeps its address, and the next pause refreshes it."""
    other = tag + "-other"
    with torch_memory_saver.region(tag, enable_cpu_backup=True):
        tensor = torch.randn(1000)
    with torch_memory_saver.region(other, enable_cpu_backup=True):
        unrelated = torch.randn(1000)
    expected = tensor.clone()
    assert torch_memory_saver.retain_cpu_backup is False
    torch_memory_saver.pause(tag)
    torch_memory_saver.pause(other)
    torch_memory_saver.resume(other)
    torch_memory_saver.retain_cpu_backup = True
    torch_memory_saver.resume(tag)
    first = torch_memory_saver.get_cpu_backup(tensor, zero_copy=True)
    assert first is not None
    assert torch.equal(first, expected)
    assert torch_memory_saver.get_cpu_backup(unrelated) is None
    torch_memory_saver.retain_cpu_backup = False
    assert torch_memory_saver.get_cpu_backup(tensor) is not None
    address = first.data_ptr()
    del first
    expected = torch.randn(1000)
    tensor.copy_(expected)
    torch_memory_saver.pause(tag)
    second = torch_memory_saver.get_cpu_backup(tensor, zero_copy=True)
    assert second is not None
    assert second.data_ptr() == address
    assert torch.equal(second, expected)
    del second
    torch_memory_saver.resume(tag)
    assert torch_memory_saver.get_cpu_backup(tensor) is None
    assert torch.equal(tensor, expected)


@pytest.mark.guards("running out of memory inside the allocator killed the process")
def test_memory_margin(tag: str) -> None:
    """An allocation that the margin forbids fails as out of memory, and the process goes on."""
    free, _ = process.saver().memory_info(0)
    torch_memory_saver.memory_margin_bytes = free - 4 * MIB
    with pytest.raises(ms.OutOfDeviceMemoryError, match="margin"), torch_memory_saver.region(tag):
        torch.empty(8 * MIB, dtype=torch.uint8)
    with torch_memory_saver.region(tag):
        small = torch.ones(MIB, dtype=torch.uint8)
    torch_memory_saver.memory_margin_bytes = 0
    with torch_memory_saver.region(tag):
        large = torch.ones(8 * MIB, dtype=torch.uint8)
    assert owned(small)
    assert owned(large)
    with pytest.raises(NotImplementedError):
        _ = torch_memory_saver.memory_margin_bytes
    with pytest.raises(ms.ConfigurationError):
        torch_memory_saver.memory_margin_bytes = -1


def test_disable_inside_a_region(tag: str) -> None:
    with torch_memory_saver.region(tag, enable_cpu_backup=True):
        before = torch.ones(10)
        with torch_memory_saver.disable():
            ordinary = torch.ones(10)
            with torch_memory_saver.region(tag + "-inner"):
                inner = torch.ones(10)
            ordinary_too = torch.ones(10)
        after = torch.ones(10)
    assert [owned(each) for each in (before, ordinary, inner, ordinary_too, after)] == [True, False, True, False, True]
    with pytest.raises(AssertionError, match="in none"), torch_memory_saver.disable():
        pass


@pytest.mark.guards("tensors were recorded under the wrong tag")
def test_regions_nest_and_leave_the_threads_state_as_it_was(tag: str) -> None:
    """Nested regions restore the outer tag."""
    cdll = torch_memory_saver._ensure_initialized()._binary_wrapper.cdll
    read = (
        cdll.tms_get_interesting_region,
        cdll.tms_get_current_tag,
        cdll.tms_get_enable_cpu_backup,
        cdll.tms_get_enable_disk_backup,
        cdll.tms_get_cpu_backup_backend,
    )

    def state() -> tuple[object, ...]:
        return tuple(each() for each in read)

    outside = (False, b"default", False, False, b"pinned")
    assert state() == outside
    with torch_memory_saver.region(tag, enable_cpu_backup=True, cpu_backup_backend="mmap"):
        assert state() == (True, tag.encode(), True, False, b"mmap")
        with torch_memory_saver.region("inner", enable_disk_backup=True):
            assert state() == (True, b"inner", False, True, b"mmap")
            thread_sees: list[tuple[object, ...]] = []
            thread = threading.Thread(target=lambda: thread_sees.append(state()))
            thread.start()
            thread.join()
            assert thread_sees == [outside]
        assert state() == (True, tag.encode(), True, False, b"mmap")
    with pytest.raises(ZeroDivisionError), torch_memory_saver.region(tag):
        _ = 1 / 0
    assert state() == outside


def test_leaving_a_region_by_the_private_setter(tag: str) -> None:
    """Projects do this around a library that needs ordinary memory."""
    impl = torch_memory_saver._ensure_initialized()
    cdll = impl._binary_wrapper.cdll
    with torch_memory_saver.region(tag):
        cdll.tms_set_interesting_region(False)
        ordinary = torch.ones(10)
        with torch_memory_saver.region(tag):
            nested = torch.ones(10)
        still_ordinary = torch.ones(10)
        cdll.tms_set_interesting_region(True)
        inside = torch.ones(10)
        cdll.tms_set_interesting_region(False)  # and the region ends before the return
    after = torch.ones(10)
    tensors = (ordinary, nested, still_ordinary, inside, after)
    assert [owned(each) for each in tensors] == [False, True, False, True, False]
    assert not cdll.tms_get_interesting_region()
    with torch_memory_saver.region(tag):
        assert owned(torch.ones(10))


def test_setting_the_state_of_a_thread_as_a_whole() -> None:
    wrapper = torch_memory_saver._ensure_initialized()._binary_wrapper
    with wrapper.cdll.own_region():
        wrapper.set_config(tag="chunk_3", interesting_region=True, enable_cpu_backup=True)
        assert wrapper.cdll.tms_get_current_tag() == b"chunk_3"
    assert wrapper.cdll.tms_get_current_tag() == b"default"
    for wrong in (b"", b"x" * 512):
        with pytest.raises(ms.ConfigurationError, match="a tag is a name"):
            wrapper.cdll.tms_set_current_tag(wrong)


@pytest.mark.parametrize("wrong", [5, ["a"], None])
def test_a_tag_that_is_no_string_raises_what_torch_memory_saver_raises(wrong: Any) -> None:
    if wrong is not None:  # all
        with pytest.raises(AttributeError, match="has no attribute 'encode'"):
            torch_memory_saver.pause(wrong)
        with pytest.raises(AttributeError, match="has no attribute 'encode'"):
            torch_memory_saver.resume(wrong)
    with pytest.raises(AttributeError, match="has no attribute 'encode'"), torch_memory_saver.region(wrong):
        pass


def test_pools_of_regions_are_let_go_of(tag: str) -> None:
    """The host driver has no pools; dropping them is still allowed."""
    with torch_memory_saver.region(tag, enable_cpu_backup=True):
        tensor = torch.ones(10)
    pools = torch_memory_saver._ensure_initialized()._mem_pools
    assert pools.pop((tag, True), None) is None
    with pytest.raises(KeyError):
        pools.pop((tag, True, False, "pinned", 0))
    pools.clear()
    torch_memory_saver.pause(tag)
    torch_memory_saver.resume(tag)
    assert float(tensor.sum()) == 10


def test_arguments_that_exclude_each_other(tag: str) -> None:
    with pytest.raises(AssertionError), torch_memory_saver.region(tag, enable_cpu_backup=True, enable_disk_backup=True):
        pass
    with (
        pytest.raises(ValueError, match="requires enable_cpu_backup"),
        torch_memory_saver.region(tag, cpu_backup_backend="mmap"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="'pinned' or 'mmap'"),
        torch_memory_saver.region(tag, enable_cpu_backup=True, cpu_backup_backend="paper"),  # type: ignore[arg-type]
    ):
        pass
    assert not torch_memory_saver._ensure_initialized()._binary_wrapper.cdll.tms_get_interesting_region()


def test_savers_share_one_memory(tag: str) -> None:
    """Some projects create one object per purpose."""
    first, second = TorchMemorySaver(), TorchMemorySaver()
    first.hook_mode = "torch"
    with first.region(tag, enable_cpu_backup=True):
        tensor = torch.ones(10)
    second.pause(tag)
    assert state_of(tag) == "released"
    first.resume(tag)
    assert float(tensor.sum()) == 10
    assert first.enabled
    first.hook_mode = "torch"
    with pytest.raises(AssertionError, match="before the first use"):
        first.hook_mode = "preload"
    with pytest.raises(AssertionError, match="'preload' or 'torch'"):
        second.hook_mode = "other"  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        _ = first.hook_mode


@pytest.mark.guards("undefined KV cache pages produced NaN")
def test_content_without_a_backup() -> None:
    """Zeros under the tag of a KV cache, undefined elsewhere."""
    assert _native.restore_for("kv_cache", False, False) == "zero"
    assert _native.restore_for("workspace", False, False) == "zero"
    assert _native.restore_for("weights", False, False) == "discard"
    assert _native.restore_for("kv_cache", True, False) == "host"
    assert _native.restore_for("weights", False, True) == "file"


@pytest.mark.guards("freeing a released tensor released its memory twice")
def test_freed_while_paused(tag: str) -> None:
    """Its address range and backup are freed with it."""
    with torch_memory_saver.region(tag, enable_cpu_backup=True):
        tensors = [torch.randn(1000) for _ in range(4)]
    expected = tensors[1].clone()
    torch_memory_saver.pause(tag)
    del tensors[2:], tensors[0]
    gc.collect()
    torch_memory_saver.resume(tag)
    assert torch.equal(tensors[0], expected)


@pytest.mark.parametrize(
    "environment",
    [
        {"TMS_RETAIN_CPU_BACKUP": "maybe"},
        {"TMS_INIT_ENABLE_DISK_BACKUP": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "yes"},
        {"TMS_INIT_CPU_BACKUP_BACKEND": "paper"},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        {"PYTORCH_ALLOC_CONF": "garbage_collection_threshold:0.8,expandable_segments:True"},
    ],
    ids=lambda environment: next(iter(environment)),
)
@pytest.mark.guards("expandable segments made a release free nothing")
def test_environment_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """torch_memory_saver ends the process here; memsaver raises an error that names the variable."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(state.this_process, "_initialized", False)
    with pytest.raises(ms.ConfigurationError, match=next(iter(environment))):
        TorchMemorySaver().pause()


def test_tools() -> None:
    with change_env("MEMSAVER_TEST_A", "1"):
        assert os.environ["MEMSAVER_TEST_A"] == "1"
        with change_env("MEMSAVER_TEST_A", "2"):
            assert os.environ["MEMSAVER_TEST_A"] == "2"
        assert os.environ["MEMSAVER_TEST_A"] == "1"
    assert "MEMSAVER_TEST_A" not in os.environ
    library = get_binary_path_from_package("torch_memory_saver_hook_mode_preload")
    assert b"TMS_INIT_ENABLE_DISK_BACKUP" in library.read_bytes()  # by which projects find out what it can do
    assert get_binary_path_from_package("torch_memory_saver_hook_mode_torch").exists()
    with pytest.raises(RuntimeError, match="there is no library"):
        get_binary_path_from_package("other")
    assert testing.get_device() == "cpu"
    testing.empty_cache()
