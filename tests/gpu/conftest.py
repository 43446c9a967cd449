"""The model that vLLM's tests serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.vllm_server import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder
