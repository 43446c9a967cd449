"""Reads and writes a saver's memory on the host driver, on which addresses are ordinary memory."""

from __future__ import annotations

import ctypes

import numpy as np
from numpy.typing import NDArray

MIB = 1 << 20
PAGE = 4096


def view(address: int, nbytes: int) -> NDArray[np.uint8]:
    """The memory itself. Touching it while it is released crashes the process, as on a GPU."""
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=np.uint8)


def fill(address: int, nbytes: int, seed: int) -> bytes:
    """Write random content and return it."""
    content = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    view(address, nbytes)[:] = content
    return content.tobytes()


def content(address: int, nbytes: int) -> bytes:
    return view(address, nbytes).tobytes()
