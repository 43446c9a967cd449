"""The saver on the host driver: what release and resume promise, and what holds when a call fails."""

from __future__ import annotations

import ctypes
import glob
import mmap
import multiprocessing
import os
import threading
import uuid
from typing import Any

import numpy as np
import pytest

from memsaver_core import _native
from memsaver_core.contract.errors import (
    BackupError,
    ConfigurationError,
    ContextLostError,
    DriverError,
    ForkedProcessError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
)
from tests.amount import amount
from tests.dirty_pages import GARBAGE, dirty_pages
from tests.unit.saver_memory import MIB, PAGE, content, fill, noise, view
from tests.waiting import wait_until

POLICIES = ("discard", "zero", "host", "file")


def make(**settings: Any) -> _native.Saver:
    return _native.Saver(**{"driver": "host", "host_capacity": 1024 * MIB, "verify": "full", **settings})


def used(saver: _native.Saver, device: int = 0) -> int:
    free, total = saver.memory_info(device)
    return total - free


def release(saver: _native.Saver, *tags: str, **overrides: str) -> dict[str, dict[str, Any]]:
    return {tag["tag"]: tag for tag in saver.release(tags, [], overrides)["tags"]}


def resume(saver: _native.Saver, *tags: str) -> dict[str, dict[str, Any]]:
    return {tag["tag"]: tag for tag in saver.resume(tags)["tags"]}


def tag_status(saver: _native.Saver, tag: str) -> dict[str, Any]:
    return next(each for each in saver.status()["tags"] if each["tag"] == tag)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.guards("undefined KV cache pages produced NaN", "content was wrong after a restore")
def test_each_policy_gives_what_it_owes(policy: str) -> None:
    """On new pages that hold garbage."""
    saver = make()
    sizes = [PAGE, 3 * MIB, 70 * MIB]
    blocks = [(saver.allocate(0, "t", policy, size), size) for size in sizes]
    written = [fill(address, size, seed) for seed, (address, size) in enumerate(blocks)]
    assert used(saver) == sum(sizes)
    with dirty_pages(blocks[0][0], sum(sizes)):
        assert release(saver)["t"]["released_bytes"] == sum(sizes)
        assert used(saver) == 0
        assert resume(saver)["t"]["resumed_bytes"] == sum(sizes)
    assert used(saver) == sum(sizes)
    for (address, size), expected in zip(blocks, written, strict=True):
        if policy in ("host", "file"):
            assert content(address, size) == expected
        else:
            assert (view(address, size) == (0 if policy == "zero" else GARBAGE)).all()
        view(address, size)[:] = 1  # readable and writable with any policy


def test_what_packing_needs_is_prepared_by_a_release() -> None:
    """In the background, so that the release is not slower; later ones pack."""
    saver = make(host_capacity=1024 * MIB)
    address = saver.allocate(0, "t", "host", 160 * MIB)
    exponents = np.resize(np.random.default_rng(1).integers(0x3C00, 0x3D00, MIB, dtype=np.uint16), 80 * MIB)
    saver.fail("has_packing", times=1000)  # as before the kernels are compiled
    for flipped in (0, 1):
        view(address, 160 * MIB).view(np.uint16)[:] = exponents ^ flipped
        kept = release(saver)["t"]["kept_bytes"]
        assert (kept < 150 * MIB) == bool(flipped)
        wait_until(lambda: saver.counts().get("prepare_packing", 0) == 1)
        saver.heal()
        resume(saver)
    assert (view(address, 160 * MIB).view(np.uint16) == exponents ^ 1).all()


def test_resident_memory_falls() -> None:
    """Release reduces the process's resident memory."""
    saver = make()
    address = saver.allocate(0, "t", "discard", 200 * MIB)
    view(address, 200 * MIB)[:] = 1

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * PAGE

    before = resident()
    release(saver)
    assert before - resident() >= 190 * MIB


@pytest.mark.guards(
    "resuming everything failed on tags that were never released",
    "a second release or resume failed",
    "releasing everything failed after one tag had been released",
)
def test_resume_of_everything_is_what_is_released() -> None:
    """Without tags; repeats are success."""
    saver = make()
    first = saver.allocate(0, "a", "host", MIB)
    second = saver.allocate(0, "b", "host", MIB)
    expected = fill(first, MIB, 1), fill(second, MIB, 2)
    assert resume(saver)["a"]["already"]
    assert not release(saver, "a")["a"]["already"]
    everything = release(saver)
    assert (everything["a"]["already"], everything["b"]["already"]) == (True, False)
    assert all(tag["already"] for tag in release(saver).values())
    assert not resume(saver, "b")["b"]["already"]
    back = resume(saver)
    assert (back["a"]["already"], back["b"]["already"]) == (False, True)
    assert (content(first, MIB), content(second, MIB)) == expected


@pytest.mark.guards("an allocation made under a released tag broke the resume")
def test_allocation_while_released() -> None:
    """A new allocation under a released tag is usable; resume maps the others."""
    saver = make()
    old = saver.allocate(0, "t", "host", MIB)
    expected = fill(old, MIB, 1)
    release(saver)
    new = saver.allocate(0, "t", "host", MIB)
    expected_new = fill(new, MIB, 2)
    status = tag_status(saver, "t")
    assert (status["state"], status["resident_bytes"], status["released_bytes"]) == ("released", MIB, MIB)
    resume(saver)
    assert (content(old, MIB), content(new, MIB)) == (expected, expected_new)


@pytest.mark.guards("freeing a released tensor released its memory twice")
def test_free_while_released() -> None:
    """Its range and backup are freed, without a driver call."""
    saver = make()
    doomed = saver.allocate(0, "t", "host", 8 * MIB)
    kept = saver.allocate(0, "t", "host", 8 * MIB)
    fill(doomed, 8 * MIB, 1)
    expected = fill(kept, 8 * MIB, 2)
    release(saver)
    calls = saver.counts()
    saver.free(doomed)
    assert saver.counts() == calls
    assert tag_status(saver, "t")["backed_up_bytes"] == 8 * MIB
    resume(saver)
    assert used(saver) == 8 * MIB
    assert content(kept, 8 * MIB) == expected


def test_shared_chunks_and_churn() -> None:
    """After a resume, neighbours share chunks. Freed parts of a chunk are retained, reusable, and freed by a
    release."""
    saver = make()
    addresses = [saver.allocate(0, "t", "discard", MIB) for _ in range(64)]
    assert tag_status(saver, "t")["chunks"] == 64
    release(saver)
    resume(saver)
    assert tag_status(saver, "t")["chunks"] == 1
    for address in addresses[1::2]:
        saver.free(address)
    assert tag_status(saver, "t")["retained_bytes"] == 32 * MIB
    assert used(saver) == 64 * MIB
    again = [saver.allocate(0, "t", "discard", MIB) for _ in range(32)]
    assert used(saver) == 64 * MIB  # the free ranges were reused
    assert tag_status(saver, "t")["retained_bytes"] == 0
    for address in again[:10]:
        saver.free(address)
    release(saver)
    assert (used(saver), tag_status(saver, "t")["retained_bytes"]) == (0, 0)
    resume(saver)
    assert used(saver) == 54 * MIB


def test_memory_does_not_creep() -> None:
    saver = make()
    alive: list[int] = []
    for step in range(400):
        alive.append(saver.allocate(0, "t", "host", (1 + step % 7) * 64 * 1024))
        if len(alive) > 40:
            saver.free(alive.pop((step * 13) % 40))
        if step % 25 == 24:
            release(saver)
            resume(saver)
            status = tag_status(saver, "t")
            assert used(saver) == status["bytes"] + status["retained_bytes"]
            assert status["retained_bytes"] == 0
    for address in alive:
        saver.free(address)
    assert used(saver) == 0


@pytest.mark.guards("content was wrong after a restore")
def test_unchanged_content_is_not_copied() -> None:
    """Content that comes back is correct, copied or not."""
    saver = make()
    address = saver.allocate(0, "t", "host", 200 * MIB)
    fill(address, 200 * MIB, 3)
    assert release(saver)["t"]["backed_up_bytes"] == 200 * MIB
    resume(saver)
    again = release(saver)["t"]
    assert (again["backed_up_bytes"], again["unchanged_bytes"]) == (0, 200 * MIB)
    resume(saver)
    view(address, 200 * MIB)[150 * MIB] ^= 1
    expected = content(address, 200 * MIB)
    changed = release(saver)["t"]
    assert 0 < changed["backed_up_bytes"] <= 32 * MIB
    resume(saver)
    assert content(address, 200 * MIB) == expected


@pytest.mark.guards("content was wrong after a restore")
def test_zero_content_needs_no_memory() -> None:
    """Zeros are written over whatever the new pages hold."""
    saver = make()
    address = saver.allocate(0, "t", "host", 64 * MIB)
    view(address, 64 * MIB)[:] = 0
    with dirty_pages(address, 64 * MIB):
        assert release(saver)["t"]["zero_bytes"] == 64 * MIB
        assert saver.status()["host_backup"]["used_bytes"] == 0
        resume(saver)
    assert not view(address, 64 * MIB).any()


@pytest.mark.guards("unused cached blocks were backed up too")
def test_dead_ranges_are_not_copied() -> None:
    """Nor counted."""
    saver = make()
    address = saver.allocate(0, "t", "host", 100 * MIB)
    expected = fill(address, 100 * MIB, 4)
    dead = [(address + 10 * MIB, 30 * MIB), (address + 70 * MIB, 5 * MIB)]
    result = saver.release([], dead, {})["tags"][0]
    assert result["backed_up_bytes"] == 65 * MIB
    assert saver.status()["host_backup"]["bytes"] == 65 * MIB
    resume(saver)
    for begin, end in ((0, 10), (40, 70), (75, 100)):
        assert content(address, 100 * MIB)[begin * MIB : end * MIB] == expected[begin * MIB : end * MIB]


@pytest.mark.guards("pinned memory took twice its size")
def test_host_memory_is_sized_exactly() -> None:
    """The pool pins what is needed, not the next power of two."""
    saver = make()
    size = 300 * MIB + 4 * PAGE
    fill(saver.allocate(0, "t", "host", size), size, 1)
    release(saver)
    assert saver.status()["host_backup"]["capacity_bytes"] == size


def test_prepared_memory_is_used() -> None:
    saver = make()
    fill(saver.allocate(0, "t", "host", 40 * MIB), 40 * MIB, 1)
    assert not saver.status()["host_backup"]["prepared"]
    saver.prepare_backup()
    saver.wait_until_prepared()
    status = saver.status()["host_backup"]
    assert (status["prepared"], status["capacity_bytes"], status["used_bytes"]) == (True, 40 * MIB, 0)
    release(saver)
    assert saver.status()["host_backup"]["capacity_bytes"] == 40 * MIB


@pytest.mark.parametrize(("retention", "capacity"), [("keep", 40 * MIB), ("trim", 40 * MIB), ("free", 0)])
@pytest.mark.guards("host memory stayed resident after a resume, or freeing it slowed the resume")
def test_retention(retention: str, capacity: int) -> None:
    """What stays pinned after a resume depends on the retention policy."""
    saver = make(retention=retention)
    address = saver.allocate(0, "t", "host", 40 * MIB)
    expected = fill(address, 40 * MIB, 1)
    release(saver)
    resume(saver)
    # Freed after the resume, in the background.
    wait_until(lambda: saver.status()["host_backup"]["capacity_bytes"] == capacity)
    release(saver)
    resume(saver)
    assert content(address, 40 * MIB) == expected


@pytest.mark.guards("a backup larger than host memory ended in the OOM killer")
def test_backup_larger_than_the_bound_is_refused_first() -> None:
    """With figures, before anything is unmapped."""
    saver = make(host_backup_limit=10 * MIB)
    address = saver.allocate(0, "t", "host", 20 * MIB)
    expected = fill(address, 20 * MIB, 1)
    with pytest.raises(OutOfHostMemoryError) as caught:
        release(saver)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (20 * MIB, 10 * MIB)
    assert tag_status(saver, "t")["state"] == "resident"
    assert content(address, 20 * MIB) == expected
    assert release(saver, t="discard")["t"]["released_bytes"] == 20 * MIB


@pytest.mark.guards("undefined KV cache pages produced NaN")
def test_new_memory_is_filled_only_if_the_driver_does_not_clear_it() -> None:
    saver = make()
    address = saver.allocate(0, "t", "zero", 70 * MIB)

    def fills() -> int:
        """Return the calls that fill memory in a release and a resume."""
        view(address, 70 * MIB)[:] = 1
        before = saver.counts().get("fill_zero", 0)  # type: ignore[attr-defined]
        release(saver)
        resume(saver)
        assert not view(address, 70 * MIB).any()
        return int(saver.counts().get("fill_zero", 0) - before)  # type: ignore[attr-defined]

    assert fills() == 0
    with dirty_pages(address, 70 * MIB):
        assert fills() > 0
    assert fills() > 0  # such a driver is not trusted again


@pytest.mark.guards("undefined KV cache pages produced NaN")
def test_policy_override_holds_for_one_release() -> None:
    """An override to zeros gives zeros on pages that hold garbage."""
    saver = make()
    address = saver.allocate(0, "t", "host", 2 * MIB)
    fill(address, 2 * MIB, 1)
    assert release(saver, t="discard")["t"]["backed_up_bytes"] == 0
    resume(saver)
    expected = fill(address, 2 * MIB, 2)
    assert release(saver)["t"]["backed_up_bytes"] == 2 * MIB
    resume(saver)
    assert content(address, 2 * MIB) == expected
    with dirty_pages(address, 2 * MIB):
        assert release(saver, t="zero")["t"]["backed_up_bytes"] == 0
        resume(saver)
    assert not view(address, 2 * MIB).any()


def test_override_keeps_what_was_kept_before() -> None:
    """A second release with an override does not lose what the first one backed up."""
    saver = make()
    kept = saver.allocate(0, "t", "host", MIB)
    expected = fill(kept, MIB, 1)
    release(saver)
    late = saver.allocate(0, "t", "host", MIB)
    fill(late, MIB, 2)
    release(saver, t="discard")
    resume(saver)
    assert content(kept, MIB) == expected


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_resume_without_memory_is_undone() -> None:
    """The error has figures; everything stays released, and the retry works."""
    saver = make(host_capacity=64 * MIB)
    address = saver.allocate(0, "t", "host", 48 * MIB)
    expected = fill(address, 48 * MIB, 1)
    release(saver)
    tenant = saver.allocate(0, "other", "discard", 32 * MIB)
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        resume(saver, "t")
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (48 * MIB, 32 * MIB)
    assert (used(saver), tag_status(saver, "t")["state"]) == (32 * MIB, "released")
    saver.free(tenant)
    resume(saver, "t")
    assert content(address, 48 * MIB) == expected


def test_allocation_without_memory() -> None:
    saver = make(host_capacity=8 * MIB)
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        saver.allocate(0, "t", "discard", 9 * MIB)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (9 * MIB, 8 * MIB)
    assert used(saver) == 0
    saver.free(saver.allocate(0, "t", "discard", 8 * MIB))


@pytest.mark.parametrize("undone", [True, False])
def test_failed_release_leaves_the_memory_resident(undone: bool) -> None:
    """What it had released comes back with its content; at a resume, if the undo fails too."""
    saver = make()
    address = saver.allocate(0, "t", "host", 300 * MIB)
    expected = fill(address, 300 * MIB, 1)
    release(saver)
    resume(saver)  # now in chunks of 64, 128 and 108 MiB
    saver.fail("unmap", 2)
    if not undone:
        saver.fail("create", 1)
    with pytest.raises(DriverError, match=r"unmap.*tag 't'.*bytes"):
        release(saver)
    status = tag_status(saver, "t")
    left = ("resident", 0) if undone else ("released", 64 * MIB)
    assert (status["state"], status["released_bytes"]) == left
    if not undone:
        resume(saver)
    assert content(address, 300 * MIB) == expected


def test_discarded_tags_go_last() -> None:
    """A release that cannot back something up has discarded nothing."""
    saver = make()
    scratch = saver.allocate(0, "a-scratch", "discard", MIB)
    fill(saver.allocate(0, "z-weights", "host", MIB), MIB, 1)
    expected = fill(scratch, MIB, 2)
    saver.fail("copy_to_host")
    with pytest.raises(DriverError):
        release(saver)
    assert content(scratch, MIB) == expected


@pytest.mark.guards("content was wrong after a restore", "backup files were left behind")
def test_damaged_backup_is_an_error(tmp_path: Any) -> None:
    """It names the tag and range, and never returns wrong content; no file is left behind."""
    saver = make(file_folder=str(tmp_path))
    address = saver.allocate(0, "t", "file", 2 * MIB)
    expected = fill(address, 2 * MIB, 1)
    release(saver)
    assert list(tmp_path.iterdir()) == []  # unlinked while open: nothing is left behind
    paths = [path for path in glob.glob("/proc/self/fd/*") if os.path.realpath(path).startswith(str(tmp_path))]
    assert len(paths) == 1
    with open(paths[0], "r+b") as file:
        file.seek(MIB)
        original = file.read(1)
        file.seek(MIB)
        file.write(bytes([original[0] ^ 0x10]))
    with pytest.raises(BackupError, match="differs from the digest") as caught:
        resume(saver)
    assert (caught.value.tag, caught.value.address) == ("t", address)
    assert tag_status(saver, "t")["state"] == "released"
    with open(paths[0], "r+b") as file:
        file.seek(MIB)
        file.write(original)
    resume(saver)
    assert content(address, 2 * MIB) == expected
    release(saver)
    os.truncate(paths[0], MIB)
    with pytest.raises(BackupError, match="shorter"):
        resume(saver)


def test_lost_context_is_final() -> None:
    saver = make()
    saver.allocate(0, "t", "discard", MIB)
    saver.fail("unmap", 1, "context_lost")
    with pytest.raises(ContextLostError):
        release(saver)
    saver.heal()
    assert saver.status()["state"] == "failed"
    with pytest.raises(ContextLostError, match="restart"):
        resume(saver)


@pytest.mark.guards("only the current device was synchronized or restored")
def test_every_device_is_synchronized() -> None:
    """A release synchronizes every device that it touches, and a resume restores all of them."""
    saver = make(host_devices=["", ""])
    addresses = [saver.allocate(device, "t", "host", 2 * MIB) for device in (0, 1)]
    written = [fill(address, 2 * MIB, seed) for seed, address in enumerate(addresses)]
    before = saver.counts().get("synchronize", 0)
    release(saver)
    assert saver.counts()["synchronize"] - before == 2
    assert (used(saver, 0), used(saver, 1)) == (0, 0)
    resume(saver)
    assert [content(address, 2 * MIB) for address in addresses] == written


def test_one_device_that_fails_undoes_all() -> None:
    saver = make(host_devices=["", ""])
    addresses = [saver.allocate(device, "t", "host", 2 * MIB) for device in (0, 1)]
    written = [fill(address, 2 * MIB, seed) for seed, address in enumerate(addresses)]
    release(saver)
    saver.fail("create", 2)
    with pytest.raises(DriverError):
        resume(saver)
    assert (used(saver, 0), used(saver, 1)) == (0, 0)
    resume(saver)
    assert [content(address, 2 * MIB) for address in addresses] == written


def test_allocations_do_not_wait_for_a_release() -> None:
    """While one tag is copied, another one allocates and frees, and status answers."""
    saver = make()
    fill(saver.allocate(0, "t", "host", 64 * MIB), 64 * MIB, 1)
    busy = saver.allocate(0, "t", "host", PAGE)
    saver.delay("copy_to_host", 3600)
    thread = threading.Thread(target=release, args=(saver,))
    thread.start()
    wait_until(lambda: saver.status()["operation"] == "release")
    other = saver.allocate(0, "other", "discard", MIB)
    view(other, MIB)[:] = 1
    saver.free(other)
    late = saver.allocate(0, "t", "host", PAGE)  # usable: it is not part of the release
    view(late, PAGE)[:] = 5
    saver.free(busy)  # takes effect when the release has ended
    state = saver.status()["state"]
    saver.heal()
    thread.join()
    assert state == "releasing"
    assert bytes(content(late, 4)) == b"\x05\x05\x05\x05"
    assert tag_status(saver, "t")["allocations"] == 2


def written_asleep(saver: _native.Saver, address: int, nbytes: int, seed: int) -> tuple[_native.Rewrite, bytes]:
    """New content for what is released, in its second half, not yet in the place of the old one."""
    with mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
        memory = (ctypes.c_uint8 * nbytes).from_buffer(pages)
        assert saver.backup_of(address, nbytes, ctypes.addressof(memory))["in_host_memory"]
        pages[nbytes // 2 :] = noise(nbytes - nbytes // 2, seed).tobytes()
        written = bytes(pages)
        rewrite = _native.Rewrite(saver, [(address, ctypes.addressof(memory))])
        assert pages[:] == bytes(nbytes), "its pages were not given back"
        del memory
    return rewrite, written


def test_what_replicas_write_asleep_is_kept_once() -> None:
    """A store has both versions until the last replica has taken the new one."""
    name, nbytes = f"test-{uuid.uuid4().hex[:12]}", 80 * MIB
    savers = [make(shared_backups=name, host_devices=[f"{name}-{number}"]) for number in range(2)]
    addresses = [saver.allocate(0, "t", "host", nbytes) for saver in savers]
    for saver, address in zip(savers, addresses, strict=True):
        fill(address, nbytes, 1)
        release(saver)
    old = savers[0].status()["host_backup"]["shared_store"]["used_bytes"]
    assert old == nbytes
    rewrites, changed = [], 2 * 32 * MIB - 16 * MIB  # blocks from the second on
    for saver, address in zip(savers, addresses, strict=True):
        rewrite, expected = written_asleep(saver, address, nbytes, 2)
        rewrites.append(rewrite)
        assert saver.status()["host_backup"]["shared_store"]["used_bytes"] == old + changed
    for rewrite in rewrites:
        rewrite.commit()
    del rewrite, rewrites
    wait_until(lambda: savers[0].status()["host_backup"]["shared_store"]["used_bytes"] == nbytes)
    for saver, address in zip(savers, addresses, strict=True):
        resume(saver)
        assert content(address, nbytes) == expected
        assert release(saver)["t"]["unchanged_bytes"] == nbytes


@pytest.mark.long
@pytest.mark.guards("memory grew with every cycle")
@pytest.mark.parametrize("shared", [False, True])
def test_thousand_cycles_are_flat(shared: bool) -> None:
    """Nothing grows, also with a shared store; every tenth cycle compares the content."""
    saver = make(shared_backups=f"test-{uuid.uuid4().hex[:12]}" if shared else "")
    blocks = [saver.allocate(0, "t", "host", 256 * 1024) for _ in range(8)]

    def census() -> tuple[int, int, int, int]:
        status = tag_status(saver, "t")
        descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        backup = saver.status()["host_backup"]
        pinned = backup["capacity_bytes"] + (backup["shared_store"] or {"total_bytes": 0})["total_bytes"]
        return used(saver), pinned, status["chunks"], descriptors + threads

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * PAGE

    steady: tuple[int, ...] = ()
    for cycle in range(amount(150, long=1000)):
        expected = fill(blocks[cycle % 8], 256 * 1024, cycle)
        release(saver)
        resume(saver)
        if cycle % 10 == 9:
            assert content(blocks[cycle % 8], 256 * 1024) == expected
        if cycle == 99:
            steady, memory = census(), resident()
    wait_until(lambda: all(now <= was for now, was in zip(census(), steady, strict=True)))
    assert resident() - memory <= 8 * MIB


def test_unknown_address_is_an_error() -> None:
    saver = make()
    with pytest.raises(ConfigurationError, match="not a live allocation"):
        saver.free(0x1234)


@pytest.mark.guards("a forked child used or damaged its parent's memory")
def test_forked_child_is_refused() -> None:
    """With a clear error; the parent's memory is untouched."""
    saver = make()
    address = saver.allocate(0, "t", "host", MIB)
    expected = fill(address, MIB, 1)

    def child(results: Any) -> None:
        try:
            release(saver)
        except ForkedProcessError as error:
            results.put(str(error))

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    process = context.Process(target=child, args=(results,))
    process.start()
    assert "spawn" in results.get(timeout=600)
    process.join()
    assert used(saver) == MIB
    assert content(address, MIB) == expected


def test_no_content_is_lost_beside_what_a_resize_gave_back() -> None:
    """A block begins and ends where that does, also if it is made while both are without memory."""
    saver = make()
    for _ in range(2):
        last = saver.allocate(0, "t", "discard", 40 * MIB)
    release(saver)
    resume(saver)  # in chunks of 64 and 16 MiB
    assert saver.resize("t", [(last + 24 * MIB, 16 * MIB)], 1.0)["tags"][0]["released_bytes"] == 16 * MIB
    release(saver)
    saver.allocate(0, "t", "discard", MIB)
    release(saver, t="host")
    resume(saver)
    expected = fill(last, 24 * MIB, 3)
    release(saver, t="host")
    resume(saver)
    assert content(last, 24 * MIB) == expected
