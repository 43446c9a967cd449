"""Fixtures: the service over a small real engine, called through real sockets."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Before memsaver is loaded: these tests are about the service, and run on the host driver everywhere.
os.environ.setdefault("MEMSAVER_DRIVER", "host")
os.environ.setdefault("MEMSAVER_HOST_CAPACITY", str(256 << 20))  # so that tests can fill the device

import httpx
import pytest

from memsaver_core import process
from memsaver_core._native import Saver as Driver
from memsaver_server import Attachment, Settings, attach
from tests.clock import CLOCK
from tests.waiting import wait_until

from .lock_order import LockOrder, checked
from .tensor_engine import KV_BYTES, OTHER_BYTES, WEIGHTS_BYTES, Memory, TensorEngine

CLOCK.install()


@pytest.fixture(autouse=True)
def _limits_of_time() -> Iterator[None]:
    with CLOCK.held():
        yield


@pytest.fixture(autouse=True)
def lock_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[LockOrder]:
    """Every service of this process takes its locks in order."""
    with checked(monkeypatch) as order:
        yield order


@pytest.fixture(scope="package")
def memory() -> Memory:
    return Memory(weights_bytes=WEIGHTS_BYTES, kv_bytes=KV_BYTES, other_bytes=OTHER_BYTES)


@pytest.fixture
def engine(memory: Memory) -> Iterator[TensorEngine]:
    engine = TensorEngine(memory)
    yield engine
    engine.close()


@pytest.fixture
def driver(engine: TensorEngine) -> Iterator[Driver]:
    """The driver below the engine, to inject failures and delays."""
    driver = process.saver()
    yield driver
    driver.heal()


@pytest.fixture
def serve(engine: TensorEngine) -> Iterator[Callable[..., httpx.Client]]:
    """Serve the engine with some settings; returns a client of it."""
    attachments: list[Attachment] = []
    clients: list[httpx.Client] = []

    def start(**settings: object) -> httpx.Client:
        attachments.append(attach(engine, settings=Settings(**settings)))
        clients.append(httpx.Client(base_url=attachments[-1].url, timeout=600, verify=False))
        return clients[-1]

    yield start
    if isinstance(engine, TensorEngine):
        engine.unblock()
    process.saver().heal()
    for client in clients:
        client.close()
    for attachment in attachments:
        attachment.close()
        # Else a release may end after the resume of engine.close(), and the next engine has no memory.
        wait_until(lambda attachment=attachment: attachment.lifecycle.operations.running is None)


@pytest.fixture
def http(serve: Callable[..., httpx.Client]) -> httpx.Client:
    return serve()
