"""Tests with one body for every kind of device.

A process has one driver, so one run has one kind: `pytest -m gpu` runs the CUDA variants, and `MEMSAVER_DRIVER=host
pytest -m "not gpu"` those of the host driver, on a machine without a GPU.
"""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator

import pytest
import torch

import memsaver_core as ms
from memsaver_core import process

from .kinds import on_cuda, on_host

MIB = 1 << 20


@pytest.fixture(params=[pytest.param("cpu", id="host", marks=on_host), pytest.param("cuda", id="cuda", marks=on_cuda)])
def device(request: pytest.FixtureRequest) -> str:
    """The torch device whose memory this process manages."""
    return str(request.param)


@pytest.fixture
def unit(device: str) -> int:
    """The unit of sizes, bytes: host devices are smaller."""
    return MIB if device == "cuda" else MIB // 8


@pytest.fixture
def slack(device: str) -> int:
    """What the first operations of a process take of the device (streams, a module, page tables), bytes."""
    return 16 * MIB if device == "cuda" else 0


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag that no other test uses; what is left under it is resumed at the end, and goes."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    yield name
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    if name in process.saver().known_tags():
        ms.resume([name])
    process.backend().forget_pools()  # or a later test sees their memory go
    process.backend().empty_cache()
