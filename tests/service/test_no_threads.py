"""The system starts no thread or opens no file for a moment: a call is refused then, and its repeat succeeds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import memsaver_core as ms
from memsaver_core.contract.errors import NoThreadError
from memsaver_core.contract.reports import OperationReport
from memsaver_core.contract.requests import Release
from memsaver_server import attach
from memsaver_server.engine import LOCAL_MEMORY
from memsaver_server.engine.device_monitor import DeviceMonitor
from memsaver_server.operation.operation import Operation
from memsaver_server.operation.queue import OperationQueue
from tests.reliability.surroundings import no_descriptors
from tests.waiting import wait_until

from .program import Program, client
from .tensor_engine import TensorEngine

pytestmark = pytest.mark.guards("a thread or file that was missing for a moment stopped the service for ever")


@contextmanager
def no_threads() -> Iterator[None]:
    """This process can start no thread while the block runs: there is no room for so large a stack."""
    before = threading.stack_size(1 << 46)
    try:
        yield
    finally:
        threading.stack_size(before)


@pytest.mark.parametrize("verb", ["release", "resume"])
def test_an_operation_without_a_thread_is_refused(http: httpx.Client, verb: str) -> None:
    """With a remedy; nothing is queued, its key is as new, and the repeat is carried out."""
    key = {"Idempotency-Key": "rollout 16"}
    path = f"/{verb}_memory_occupation"
    with no_threads():
        refused = http.post(path, json={"tags": ["workspace"]}, headers=key)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "no_thread")
        assert refused.headers["retry-after"] == "1"
        assert "ulimit -u" in refused.json()["message"]
        assert http.get("/operations").json()["operations"] == []
        assert http.get("/readyz").status_code == 200
    assert http.post(path, json={"tags": ["workspace"]}, headers=key).status_code == 200
    assert http.post("/release_memory_occupation").json()["state"] == "released"
    assert http.post("/resume_memory_occupation").json()["state"] == "resident"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_died_is_replaced() -> None:
    """And the operation that it ran has ended for its callers."""

    def finished(_operation: Operation) -> None:
        raise SystemExit  # ends the thread

    def work(operation: Operation, log: ms.PhaseLog) -> OperationReport:
        operation.await_commit()
        return operation.moved(ms.resume(log=log))

    operations = OperationQueue(8, finished, LOCAL_MEMORY)
    for _ in range(3):
        before = threading.active_count()
        operation = operations.submit(Release(), work, key=None, client="test")
        operation.done.result(600)
        assert operation.status == "succeeded"
        wait_until(lambda before=before: threading.active_count() <= before)


def test_device_memory_is_read_once_a_thread_can_be_started(engine: TensorEngine) -> None:
    """Until then readers get the last sample."""
    monitor = DeviceMonitor()
    with no_threads():
        assert monitor.latest().devices == ()
    wait_until(lambda: monitor.latest().devices)
    monitor.stop()


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk"])
def test_what_was_refused_without_a_thread_is_not_done_later(
    http: httpx.Client, engine: TensorEngine, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    written: list[str] = []
    monkeypatch.setattr(engine, "update_weights_from_disk", lambda path, **_: written.append(path) or 1)
    with no_threads():
        refused = http.post(path, json={"model_path": "/trained"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "no_thread")
    assert http.post("/flush_cache").status_code == 200  # in the thread that was missing
    assert http.get("/readyz").status_code == 200
    assert written == []
    assert http.post(path, json={"model_path": "/trained"}).status_code == 200
    assert (http.get("/readyz").status_code == 200) is bool(written)


def test_a_server_that_cannot_start_leaves_its_address_free(engine: TensorEngine, tmp_path: Path) -> None:
    uds = tmp_path / "memsaver.sock"
    with no_threads(), pytest.raises(NoThreadError):
        attach(engine, uds=uds)
    with attach(engine) as attachment:
        port = attachment.address[1]
    for where in ({"uds": uds}, {"port": int(port)}):
        with no_threads(), pytest.raises(NoThreadError):
            attach(engine, **where)  # type: ignore[arg-type]
        attach(engine, **where).close()  # type: ignore[arg-type]


def test_a_hibernation_without_descriptors_is_refused() -> None:
    """Before anything is released, as its helper needs a socket pair; the repeat finds one."""
    with Program(MEMSAVER_DRIVER="host") as engine, client(engine) as http:
        assert http.get("/livez").status_code == 200  # the connection stays open
        with no_descriptors(engine.process.pid):
            refused = http.post("/release_memory_occupation", json={"hibernate": True})
        assert (refused.status_code, http.get("/memory_occupation").json()["state"]) == (500, "resident")
        assert "helper cannot be started: [Errno 24] Too many open files; repeat" in refused.json()["message"]
        assert http.get("/readyz").status_code == 200
        assert http.post("/release_memory_occupation", json={"hibernate": True}).status_code == 200
        assert http.post("/resume_memory_occupation").json()["state"] == "resident"
