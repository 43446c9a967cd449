"""Real SGLang servers on the CPU. `make test-sglang` sets up SGLang in a separate environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engine_server import starter

from . import checkpoint
from .server import Server

if find_spec("sglang") is None:
    pytest.skip("SGLang is not installed; run make test-sglang", allow_module_level=True)

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start servers, which end with the file's tests."""
    yield from starter(Server, model, tmp_path_factory)


@pytest.fixture(scope="module")
def served(start: Start) -> Server:
    """A server with memsaver's service and weights that are kept."""
    return start("--enable-weights-cpu-backup")


@pytest.fixture
def server(served: Server) -> Iterator[Server]:
    yield served
    assert not served.is_dead(), served.output()[-3000:]
    served.service("/continue_generation")
    served.service("/resume_memory_occupation")
