"""A real tokenspeed engine process without its kernels. `make test-tokenspeed` sets up its environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("tokenspeed") is None:
    pytest.skip("tokenspeed is not installed; run make test-tokenspeed", allow_module_level=True)

from tests.engine_server import starter

from .server import Server, write_model

Start = Callable[..., Server]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def start(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start servers, which end with the file's tests."""
    yield from starter(Server, model, tmp_path_factory)


@pytest.fixture(scope="module")
def served(start: Start) -> Server:
    return start(MEMSAVER_DRAIN_TIMEOUT_S="1")


@pytest.fixture
def server(served: Server) -> Iterator[Server]:
    yield served
    assert not served.is_dead(), served.output()[-3000:]
    served.service("/resume_memory_occupation")
