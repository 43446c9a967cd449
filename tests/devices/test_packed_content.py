"""Content that is kept packed: any bytes come back, on the device's own kernels."""

from __future__ import annotations

import torch

import memsaver_core as ms

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
