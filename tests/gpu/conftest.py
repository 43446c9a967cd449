"""Shared by the tests on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from memsaver_core import process
from tests.gpu.vllm_server import write_model


@pytest.fixture(autouse=True, scope="module")
def _device_is_given_back() -> Iterator[None]:
    """What torch's pools keep of a file's tensors goes, as programs that other files start need the device."""
    yield
    gc.collect()
    process.backend().forget_pools()
    torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that vLLM's tests serve."""
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder
