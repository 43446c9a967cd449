"""Content that is kept packed: any bytes come back, on the device's own kernels."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

import memsaver_core as ms
from memsaver_core import process
from memsaver_core.contract.errors import BackupError

MIB = 1 << 20
#: Elements of 32 MiB of bfloat16.
BLOCK = 16 * MIB


def weights(number: int, device: str) -> torch.Tensor:
    """Normal values; some blocks have infinities, NaNs with payloads, denormals and random bytes between them."""
    values = torch.empty(BLOCK + number % 3, dtype=torch.bfloat16, device=device).normal_(0, 0.02 * (number + 1))
    odd = torch.tensor([0x7F80, 0x7FC1, -0x7F, 0x0001, -0x8000, 0x0000], dtype=torch.int16, device=device)
    if number % 2:
        values.view(torch.int16)[:: BLOCK // 1000][: 6 * 100] = odd.repeat(100)
        values.view(torch.uint8)[BLOCK : BLOCK + BLOCK // 4].random_(0, 256)
    return values


def test_packed_content_comes_back(tag: str, device: str) -> None:
    """Bit for bit, beside blocks that are kept as they are."""
    torch.manual_seed(1)
    with ms.region(tag, restore="host"):
        tensors = [weights(number, device) for number in range(10)]
        noise = torch.randint(0, 256, (32 * MIB,), dtype=torch.uint8, device=device)
    ms.prepare_backup(wait=True)
    expected = [tensor.view(torch.uint8).cpu() for tensor in (*tensors, noise)]
    report = next(each for each in ms.release([tag]).tags if each.tag == tag)
    assert report.kept_bytes < 0.95 * report.backed_up_bytes
    ms.resume([tag])
    for tensor, before in zip((*tensors, noise), expected, strict=True):
        assert torch.equal(tensor.view(torch.uint8).cpu(), before)


def backup_file() -> Path:
    """The file of backups of this process, which has no name."""
    folder = os.path.realpath(process.core_settings().file_dir)
    for file in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(file)
        except FileNotFoundError:
            continue  # that of the search itself
        if target.startswith(f"{folder}/") and target.endswith(" (deleted)") and b"MSPK" in file.read_bytes():
            return file
    raise AssertionError("there is no backup file with packed content")


def headers(content: bytes) -> list[int]:
    """Where packed content begins: at the beginning of a page."""
    return [at for at in range(0, len(content), 4096) if content[at : at + 4] == b"MSPK"]


def test_damaged_packed_content_is_refused(tag: str, device: str) -> None:
    """Whatever is changed: an error, after which the intact backup comes back; other memory is as it was."""
    torch.manual_seed(2)
    randomly = random.Random(2)
    with ms.region(tag, restore="file"):
        tensors = [weights(2 * number, device) for number in range(3)]
    beside = torch.full((64 * MIB,), 0x5A, dtype=torch.uint8, device=device)
    ms.prepare_backup(wait=True)
    expected = [tensor.view(torch.uint8).cpu() for tensor in tensors]
    ms.release([tag])
    file = backup_file()
    intact = file.read_bytes()
    packed = headers(intact)
    assert packed
    # Magic, version, size of elements, bytes, escapes, the first exponent; then codes, indices and escapes anywhere.
    changes = [{packed[0] + at: 0xFF} for at in (0, 4, 6, 8, 15, 16, 23, 24)]
    for _ in range(5):
        begin = randomly.choice(packed)
        within = range(begin + 64, min(begin + 20 * MIB, len(intact)))
        changes.append({randomly.choice(within): 0xFF for _ in range(1000)})
    for change in changes:
        write(file, {at: value ^ intact[at] for at, value in change.items()})
        with pytest.raises(BackupError) as caught:
            ms.resume([tag])
        assert caught.value.tag == tag
        write(file, {at: intact[at] for at in change})
    ms.resume([tag])
    for tensor, before in zip(tensors, expected, strict=True):
        assert torch.equal(tensor.view(torch.uint8).cpu(), before)
    assert bool((beside == 0x5A).all())


def write(file: Path, changes: dict[int, int]) -> None:
    with file.open("r+b") as opened:
        for at, value in changes.items():
            opened.seek(at)
            opened.write(bytes([value]))
