"""Content that is kept packed, on the host driver."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from memsaver_core import MemsaverError, _native
from memsaver_core.contract.errors import BackupError
from tests.programs import output_of
from tests.unit.saver_memory import MIB, noise, same, view

#: What of a tag of less than 1.3 GiB stays as it is.
AS_IT_IS = 64 * MIB
CONTENT = AS_IT_IS + 64 * MIB


def weights(size: int, seed: int, dtype: str = "bfloat16") -> NDArray[np.uint8]:
    """Normal values of several scales; one block of them is repeated."""
    block = np.random.default_rng(seed).normal(0, 1, MIB).astype(np.float32)
    block *= np.repeat(np.float32([0.3, 0.1, 0.05, 0.02]), MIB // 4)
    halves = block.view(np.uint16)[1::2].copy().view(np.uint8) if dtype == "bfloat16" else block.view(np.uint8)
    return np.resize(halves, size)


def make(tmp_path: Path, **options: Any) -> _native.Saver:
    return _native.Saver(driver="host", file_folder=str(tmp_path), verify="full", **options)


def tag_of(answer: dict[str, Any]) -> dict[str, Any]:
    [tag] = answer["tags"]
    return tag  # type: ignore[no-any-return]


@pytest.mark.parametrize("restore", ["host", "file"])
@pytest.mark.guards("content was wrong after a restore")
def test_weights_are_kept_packed(tmp_path: Path, restore: str) -> None:
    """All but the first blocks; unchanged ones are not copied again, and status tells what they take."""
    saver = make(tmp_path)
    address = saver.allocate(0, "t", restore, CONTENT)
    expected = weights(CONTENT, 1)
    view(address, CONTENT)[:] = expected
    first = tag_of(saver.release([], [], {}))
    packed = first["kept_bytes"] - AS_IT_IS
    assert first["backed_up_bytes"] == CONTENT
    assert 0.68 < packed / (CONTENT - AS_IT_IS) < 0.75
    status = saver.status()
    assert tag_of(status)["kept_bytes"] == status["host_backup"]["bytes"] == first["kept_bytes"]
    assert status["host_backup"]["file_bytes" if restore == "file" else "used_bytes"] == first["kept_bytes"]
    saver.resume([])
    assert same(view(address, CONTENT), expected)
    again = tag_of(saver.release([], [], {}))
    assert (again["backed_up_bytes"], again["kept_bytes"], again["unchanged_bytes"]) == (0, 0, CONTENT)
    saver.resume([])
    view(address, CONTENT)[AS_IT_IS + 5 * MIB] ^= 1
    changed = tag_of(saver.release([], [], {}))
    assert changed["backed_up_bytes"] == 32 * MIB
    saver.resume([])
    expected[AS_IT_IS + 5 * MIB] ^= 1
    assert same(view(address, CONTENT), expected)


@pytest.mark.parametrize(
    ("content", "options", "kept"),
    [
        (weights, {"pack": False}, (1, 1)),
        (noise, {}, (1, 1)),
        (lambda size, seed: weights(size, seed, "float32"), {}, (0.84, 0.87)),
    ],
    ids=["off", "noise", "float32"],
)
def test_what_is_worth_packing(
    tmp_path: Path,
    content: Callable[[int, int], NDArray[np.uint8]],
    options: dict[str, Any],
    kept: tuple[float, float],
) -> None:
    saver = make(tmp_path, **options)
    address = saver.allocate(0, "t", "host", CONTENT)
    expected = content(CONTENT, 2)
    view(address, CONTENT)[:] = expected
    share = (tag_of(saver.release([], [], {}))["kept_bytes"] - AS_IT_IS) / (CONTENT - AS_IT_IS)
    assert kept[0] <= share <= kept[1]
    saver.resume([])
    assert same(view(address, CONTENT), expected)


def test_half_of_a_block_is_something_else(tmp_path: Path) -> None:
    """NaN payloads, denormals, infinities and zeros lie between the weights."""
    saver = make(tmp_path)
    address = saver.allocate(0, "t", "host", CONTENT)
    expected = weights(CONTENT, 3)
    odd = np.random.default_rng(4).choice([0x7F80, 0x7FC1, 0xFF81, 0x0001, 0x8000, 0x0000], 4096).astype(np.uint16)
    for at in range(0, CONTENT, 5 * MIB):
        expected[at : at + odd.nbytes] = odd.view(np.uint8)
    expected[AS_IT_IS + 40 * MIB : AS_IT_IS + 48 * MIB] = noise(8 * MIB, 5)
    expected[AS_IT_IS + 16 * MIB : AS_IT_IS + 32 * MIB] = noise(16 * MIB, 6)
    view(address, CONTENT)[:] = expected
    kept = tag_of(saver.release([], [], {}))["kept_bytes"]
    assert AS_IT_IS < kept < CONTENT
    saver.resume([])
    assert same(view(address, CONTENT), expected)


@pytest.mark.parametrize(
    ("at", "flipped", "says"),
    [
        (0, 0xFF, "the packed backup is damaged"),
        (4, 0x02, "the packed backup is damaged"),
        (5 * MIB, 0x10, "differs from the digest"),
    ],
    ids=["no header", "another version", "a mantissa"],
)
@pytest.mark.guards("content was wrong after a restore")
def test_damage_of_what_is_packed_is_an_error(tmp_path: Path, at: int, flipped: int, says: str) -> None:
    """Digests are of the content, so whatever changes it is found; once the damage is undone, everything comes back."""
    saver = make(tmp_path)
    address = saver.allocate(0, "t", "file", CONTENT)
    expected = weights(CONTENT, 11)
    view(address, CONTENT)[:] = expected
    saver.release([], [], {})
    [path] = [path for path in glob.glob("/proc/self/fd/*") if os.path.realpath(path).startswith(str(tmp_path))]

    def flip() -> None:
        with open(path, "r+b") as file:
            file.seek(AS_IT_IS + at)  # the first packed block lies behind those that are as they are
            changed = bytes([file.read(1)[0] ^ flipped])
            file.seek(AS_IT_IS + at)
            file.write(changed)

    flip()
    with pytest.raises(BackupError, match=says) as caught:
        saver.resume([])
    assert (caught.value.tag, caught.value.address) == ("t", address + AS_IT_IS)
    assert saver.memory_info(0)[0] == saver.memory_info(0)[1]  # nothing is mapped, and nothing held for unpacking
    flip()
    saver.resume([])
    assert same(view(address, CONTENT), expected)


def test_packed_content_is_read_without_a_resume(tmp_path: Path) -> None:
    saver = make(tmp_path)
    address = saver.allocate(0, "t", "host", CONTENT)
    expected = weights(CONTENT, 7)
    view(address, CONTENT)[:] = expected
    saver.release([], [], {})
    for begin, size in ((0, CONTENT), (AS_IT_IS + 3 * MIB + 64, 50 * MIB)):
        to = np.empty(size, dtype=np.uint8)
        told = saver.backup_of(address + begin, size, to.ctypes.data)
        assert (told["in_host_memory"], told["memory"]) == (True, 0)
        assert same(to, expected[begin : begin + size])


def test_host_memory_is_prepared_for_what_will_be_kept(tmp_path: Path) -> None:
    """Not for the content, neither before the first release nor at a later one."""
    saver = make(tmp_path)
    address = saver.allocate(0, "t", "host", CONTENT)
    for seed in (9, 10):
        view(address, CONTENT)[:] = weights(CONTENT, seed)
        saver.prepare_backup()
        saver.wait_until_prepared()
        status = saver.status()["host_backup"]
        assert status["prepared"]
        assert status["capacity_bytes"] < AS_IT_IS + 0.75 * (CONTENT - AS_IT_IS)
        saver.release([], [], {})
        assert saver.status()["host_backup"]["capacity_bytes"] == status["capacity_bytes"]
        saver.resume([])


@pytest.mark.parametrize("reserved", [False, True])
def test_packing_takes_no_device_memory_that_was_not_there(tmp_path: Path, reserved: bool) -> None:
    """On a device that is full, a release packs and a resume unpacks, also if all of its memory was reserved."""
    saver = make(tmp_path, host_capacity=CONTENT)
    address = saver.allocate(0, "t", "host", CONTENT)
    expected = weights(CONTENT, 8)
    view(address, CONTENT)[:] = expected
    assert tag_of(saver.release([], [], {}))["kept_bytes"] < CONTENT
    assert saver.memory_info(0) == (CONTENT, CONTENT)
    unpacked = saver.counts().get("unpack", 0)  # type: ignore[attr-defined]
    if reserved:
        saver.reserve([])
    saver.resume([])
    assert saver.counts()["unpack"] == unpacked + 2  # type: ignore[attr-defined]  # on the device
    assert saver.memory_info(0) == (0, CONTENT)
    assert same(view(address, CONTENT), expected)


@pytest.mark.parametrize("room", [0, 512 * MIB])
def test_what_another_process_packed_needs_none_as_it_is(tmp_path: Path, room: int) -> None:
    """The device unpacks it as well, in memory of a few blocks if there is some, without which the host does."""
    name = f"test-{tmp_path.name}-{os.getpid()}"
    giver, taker = (make(tmp_path, shared_backups=name, host_capacity=CONTENT + each) for each in (512 * MIB, room))
    first, packed = (giver.allocate(0, "t", "host", nbytes) for nbytes in (AS_IT_IS, CONTENT - AS_IT_IS))
    expected = weights(CONTENT - AS_IT_IS, 12)
    view(first, AS_IT_IS)[:] = 1
    view(packed, CONTENT - AS_IT_IS)[:] = expected
    giver.save(["t"], [])
    [(_, nbytes, blocks)] = [each for each in giver.saved("t") if each[0] == packed]
    taker.allocate(0, "u", "host", AS_IT_IS)
    buffer = _native.HostBuffer(taker, 0, "t", "host", nbytes, blocks=blocks)
    taker.resume(["t"], True)
    assert taker.counts().get("unpack", 0) == (2 if room else 0)  # type: ignore[attr-defined]
    assert same(view(buffer.address, nbytes), expected)
    assert taker.memory_info(0)[0] == room


def test_what_cannot_be_pinned_is_resumed_all_the_same(tmp_path: Path) -> None:
    """Neither what another process wrote to the shared store, nor memory through which that would pass."""
    name = f"test-{tmp_path.name}-{os.getpid()}"
    giver, taker = (_native.Saver(driver="host", shared_backups=name, verify=verify) for verify in ("full", "off"))
    address = giver.allocate(0, "t", "host", 40 * MIB)
    view(address, 40 * MIB)[:] = noise(40 * MIB, 13)
    giver.save(["t"], [])
    [(_, nbytes, blocks)] = giver.saved("t")
    buffer = _native.HostBuffer(taker, 0, "t", "host", nbytes, blocks=blocks)
    taker.fail("register_host", times=1_000_000)  # type: ignore[attr-defined]
    taker.resume(["t"])
    assert taker.counts()["register_host"] >= 2  # type: ignore[attr-defined]
    assert same(view(buffer.address, nbytes), view(address, 40 * MIB))


def test_other_memory_comes_back_while_packed_content_is_on_its_way(tmp_path: Path) -> None:
    """Not after it, when nothing is left that hides the driver's calls."""
    saver = make(tmp_path)
    size = CONTENT + 32 * MIB  # the rest comes back after the first of three blocks
    view(saver.allocate(0, "t", "host", size), size)[:] = weights(size, 11)
    for tag in ("other", "another"):
        saver.allocate(0, tag, "zero", 16 * MIB)  # too little to unpack in

    def resumed(calls: int = 0) -> dict[str, int]:
        """Release, resume, and return the driver calls of the resume; ``calls`` to unpack is the one that fails."""
        saver.release([], [], {})
        before = saver.counts()  # type: ignore[attr-defined]
        if calls:
            saver.fail("unpack", calls)  # type: ignore[attr-defined]
            with pytest.raises(MemsaverError):
                saver.resume([])
        else:
            saver.resume([])
        return {call: count - before.get(call, 0) for call, count in saver.counts().items()}  # type: ignore[attr-defined]

    whole = resumed()
    begun = resumed(whole["unpack"])
    assert (begun["map"], begun["copy_to_host"]) == (whole["map"], whole["copy_to_host"])  # of samples


def test_a_check_expects_packed_backups() -> None:
    """Those of a rank, of a prepared release and of a dry run, as the release itself does."""
    output_of(
        """
import torch
import memsaver_core as ms
from memsaver_core.contract.errors import OutOfHostMemoryError
from memsaver_core.contract.requests import MemoryRequest
from memsaver_core.ranks.plans import plan_release

with ms.region("weights"):
    weights = (torch.randn(80 << 20) / 30).to(torch.bfloat16)
expected = weights.clone()
ms.prepare_backup(wait=True)
needed = plan_release(MemoryRequest()).host_bytes_needed
assert 125 << 20 < needed < 140 << 20, needed
dropped = {"weights": "discard"}
assert plan_release(MemoryRequest(restore=dropped)).host_bytes_needed == 0
report = ms.release()
assert abs(report.tags[0].kept_bytes - needed) < 4 << 20, (report.tags, needed)
assert plan_release(MemoryRequest()).host_bytes_needed == 0
ms.resume()
assert torch.equal(weights, expected)
assert plan_release(MemoryRequest()).host_bytes_needed == 0
with ms.region("more", restore="host"):
    more = torch.randint(0, 255, (64 << 20,), dtype=torch.uint8)
try:
    plan_release(MemoryRequest())
except OutOfHostMemoryError as error:
    assert error.needed_bytes == 64 << 20, error
else:
    raise AssertionError
""",
        MEMSAVER_DRIVER="host",
        MEMSAVER_HOST_BACKUP_LIMIT="150MiB",
        OMP_NUM_THREADS="1",
    )
