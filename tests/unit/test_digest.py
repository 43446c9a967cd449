"""The content digest: every change is detected."""

from __future__ import annotations

import numpy as np
import pytest

from memsaver_core._native import digest_of

KEY = (0x9AE16A3B2F90404F, 0xC949D7C7509E6557, 0x165667B19E3779F9, 0x27D4EB2F165667C5)
SIZE = 16 * 1024


@pytest.fixture
def data() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, SIZE, dtype=np.uint8)


def test_single_bit_flips_anywhere(data: np.ndarray) -> None:
    seen = {digest_of(data, KEY)[:2]}
    for bit in range(SIZE * 8):
        data[bit // 8] ^= 1 << (bit % 8)
        seen.add(digest_of(data[bit // 128 * 16 : bit // 128 * 16 + 16], KEY, bit // 128)[:2])
        data[bit // 8] ^= 1 << (bit % 8)
    assert len(seen) == 1 + SIZE * 8


def test_both_lanes_see_every_flip(data: np.ndarray) -> None:
    lane0, lane1, _ = digest_of(data, KEY)
    for bit in range(0, SIZE * 8, 97):
        data[bit // 8] ^= 1 << (bit % 8)
        changed = digest_of(data, KEY)
        assert changed[0] != lane0
        assert changed[1] != lane1
        data[bit // 8] ^= 1 << (bit % 8)


@pytest.mark.parametrize("width", [1, 4, 8, 16, 64, 4096])
def test_swapped_parts(data: np.ndarray, width: int) -> None:
    original = digest_of(data, KEY)
    generator = np.random.default_rng(width)
    for _ in range(300):
        i, j = generator.choice(SIZE // width, 2, replace=False)
        swapped = data.copy()
        swapped[i * width : (i + 1) * width] = data[j * width : (j + 1) * width]
        swapped[j * width : (j + 1) * width] = data[i * width : (i + 1) * width]
        if not np.array_equal(swapped, data):
            assert digest_of(swapped, KEY)[:2] != original[:2]


def test_rotations_and_repeats(data: np.ndarray) -> None:
    tile = np.tile(data[:64], SIZE // 64)
    rotated = {digest_of(np.roll(tile, 16 * shift), KEY)[:2] for shift in range(4)}
    assert len(rotated) == 4


def test_zero_runs() -> None:
    digests = {digest_of(np.zeros(length, dtype=np.uint8), KEY)[:2] for length in range(0, SIZE, 16)}
    assert len(digests) == SIZE // 16
    moved = set()
    for position in range(0, SIZE, 16):
        content = np.zeros(SIZE, dtype=np.uint8)
        content[position] = 1
        moved.add(digest_of(content, KEY)[:2])
    assert len(moved) == SIZE // 16


def test_zero_content_is_told_apart(data: np.ndarray) -> None:
    assert digest_of(np.zeros(SIZE, dtype=np.uint8), KEY)[2] == 0
    assert digest_of(data, KEY)[2] != 0


def test_parts_add_up(data: np.ndarray) -> None:
    whole = digest_of(data, KEY)
    parts = [digest_of(data[at : at + 1024], KEY, at // 16) for at in range(0, SIZE, 1024)]
    assert tuple(sum(part[lane] for part in parts) % 2**64 for lane in (0, 1)) == whole[:2]


def test_random_small_contents_never_collide() -> None:
    generator = np.random.default_rng(11)
    contents = {generator.integers(0, 3, 32, dtype=np.uint8).tobytes() for _ in range(100_000)}
    digests = {digest_of(np.frombuffer(content, dtype=np.uint8), KEY)[:2] for content in contents}
    assert len(digests) == len(contents)
    for lane in (0, 1):
        assert len({digest[lane] for digest in digests}) == len(contents)


def test_bits_are_balanced() -> None:
    """Each output bit is set about half the time over small inputs (five standard deviations)."""
    samples = 4096
    counts = np.zeros((2, 64), dtype=np.int64)
    for value in range(samples):
        content = np.zeros(16, dtype=np.uint8)
        content[:4] = np.frombuffer(np.uint32(value).tobytes(), dtype=np.uint8)
        digest = digest_of(content, KEY)
        for lane in (0, 1):
            counts[lane] += [digest[lane] >> bit & 1 for bit in range(64)]
    assert np.abs(counts - samples / 2).max() < 5 * np.sqrt(samples) / 2
