"""Serving from a thread of the engine's process, and removing every trace of it."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import stat
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch.distributed as dist

from memsaver_core._native import Saver as Driver
from memsaver_core.communicators import warn_of_registered_graphs
from memsaver_core.contract.errors import ConfigurationError
from memsaver_server import attach, create_app
from tests.waiting import wait_until

from .tensor_engine import Memory, TensorEngine


def test_the_process_is_left_as_it_was(engine: TensorEngine) -> None:
    signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    handlers = list(logging.getLogger().handlers)
    threads = set(threading.enumerate())
    with attach(engine) as attachment:
        assert httpx.get(f"{attachment.url}/livez", timeout=600).status_code == 200
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == signals
        assert logging.getLogger().handlers == handlers
    assert not {thread.name for thread in set(threading.enumerate()) - threads if thread.name == "memsaver-http"}
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{attachment.url}/livez", timeout=600)
    attachment.close()


@pytest.mark.guards("memory grew with every cycle")
def test_a_closed_server_lets_its_engine_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """No leftover of a server keeps the engine's memory alive after both are closed."""
    monkeypatch.setattr("memsaver_server.operation.queue.IDLE_S", threading.TIMEOUT_MAX)
    engine = TensorEngine(Memory(bare=True))
    with attach(engine) as server:
        httpx.post(f"{server.url}/release_memory_occupation", timeout=600).raise_for_status()
        httpx.post(f"{server.url}/resume_memory_occupation", timeout=600).raise_for_status()
    engine.close()
    gone = threading.Event()
    weakref.finalize(engine, gone.set)
    del engine, server

    def is_gone() -> bool:
        gc.collect()
        return gone.is_set()

    wait_until(is_gone)  # a thread may still be ending


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_caller_hears_that_the_server_ends(
    engine: TensorEngine, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """If an operation does not end in time, its caller is told; the operation goes on."""
    driver.delay("unmap", 3600)
    with ThreadPoolExecutor(1) as pool, attach(engine) as server:
        answer = pool.submit(httpx.post, f"{server.url}/release_memory_occupation", timeout=600)
        wait_until(lambda: httpx.get(f"{server.url}/memory_occupation", timeout=600).json()["state"] == "releasing")
        server.close()
        assert answer.result().status_code == 503
        assert answer.result().json()["error"]["type"] == "server_ends"
    assert not [record for record in caplog.records if record.exc_info or record.exc_text], (
        "an answer that was expected is no failure"
    )
    driver.heal()
    with attach(engine) as server:
        httpx.post(f"{server.url}/resume_memory_occupation", timeout=600).raise_for_status()


@pytest.mark.parametrize("path", ["/generate", "/pause_generation"])
def test_what_the_end_of_the_server_cuts_off_is_answered(
    engine: TensorEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """In JSON, as every error."""
    monkeypatch.setattr("memsaver_server.attachment.GRACE_S", 0)
    engine.block()
    with ThreadPoolExecutor(3) as pool, attach(engine) as server:
        generating = pool.submit(httpx.post, f"{server.url}/generate", json={"input_ids": [1]}, timeout=600)
        engine.wait_until(lambda engine: engine.in_flight())
        pausing = pool.submit(httpx.post, f"{server.url}/pause_generation", json={"mode": "wait"}, timeout=600)
        engine.wait_until(lambda engine: engine.is_closed)
        closing = pool.submit(server.close)
        answer = (generating if path == "/generate" else pausing).result()
        engine.unblock()
        closing.result()
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "server_ends"
    assert f"POST {path}" in answer.json()["message"]
    assert not [record for record in caplog.records if record.exc_info or record.exc_text]


def test_a_unix_socket_is_for_its_user_alone(engine: TensorEngine, tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with attach(engine, uds=path) as attachment:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (attachment.address, attachment.url) == (str(path), f"unix://{path}")
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://engine") as http:
            assert http.post("/release_memory_occupation").status_code == 200
            assert http.post("/resume_memory_occupation").status_code == 200
        with pytest.raises(ConfigurationError, match="cannot bind"):
            attach(engine, uds=path)
    assert not path.exists()


@pytest.mark.guards("a process was killed in the middle of an operation")
def test_the_socket_of_a_server_that_died_is_replaced(engine: TensorEngine, tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with attach(engine, uds=path):
        assert path.exists()


def test_a_file_in_the_way_is_left_alone(engine: TensorEngine, tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    path.write_text("precious")
    with pytest.raises(ConfigurationError, match="cannot bind"):
        attach(engine, uds=path)
    assert path.read_text() == "precious"


def test_a_port_in_use_is_told(engine: TensorEngine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigurationError, match="cannot bind"):
            attach(engine, port=taken.getsockname()[1])


def test_closing_ends_streams(engine: TensorEngine) -> None:
    """A client that follows an operation's events does not keep the server from stopping."""
    engine.block()
    with attach(engine) as attachment, httpx.Client(base_url=attachment.url, timeout=600, verify=False) as http:
        generating = threading.Thread(target=http.post, args=("/generate",), kwargs={"json": {"input_ids": [1]}})
        generating.start()
        engine.wait_until(lambda engine: engine.in_flight())
        operation_id = http.post("/release_memory_occupation", json={"async": True}).json()["operation_id"]
        with http.stream("GET", f"/operations/{operation_id}/events") as stream:
            lines = stream.iter_lines()
            next(lines)
            closing = threading.Thread(target=attachment.close)
            closing.start()
            for _ in lines:
                pass
        engine.unblock()
        closing.join()
        generating.join()


@pytest.mark.parametrize(
    ("backends", "setting", "registers"),
    [
        ("cpu:gloo,cuda:nccl", None, True),
        ("cuda:nccl", "1", True),
        ("cpu:gloo,cuda:nccl", "0", False),
        ("cpu:gloo,cuda:gloo", None, False),
    ],
)
@pytest.mark.guards("replaying a graph with NCCL hung after a remap")
def test_graphs_that_nccl_registers_are_known(
    backends: str,
    setting: str | None,
    registers: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """NCCL registers the buffers of graphs unless NCCL_GRAPH_REGISTER=0, also if torch chose the backend."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if setting is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", setting)
    monkeypatch.setattr(logging.getLogger("memsaver"), "filters", [])  # a service would have a thread call the handlers
    with caplog.at_level(logging.WARNING, "memsaver"):
        warn_of_registered_graphs()
    assert ("NCCL_GRAPH_REGISTER=0" in caplog.text) is registers


@pytest.mark.guards("replaying a graph with NCCL hung after a remap")
def test_other_backends_are_no_reason_to_warn(
    engine: TensorEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        with caplog.at_level(logging.WARNING, "memsaver"), attach(engine):
            pass
    finally:
        dist.destroy_process_group()
    assert "NCCL" not in caplog.text


def test_the_application_can_be_mounted_in_another(engine: TensorEngine) -> None:
    from fastapi import FastAPI
    from fastapi.testclient import TestClient

    outer = FastAPI()
    outer.mount("/memory", create_app(engine))
    with TestClient(outer, base_url="http://127.0.0.1") as http:
        assert http.post("/memory/release_memory_occupation").json()["state"] == "released"
        assert http.post("/memory/resume_memory_occupation").json()["state"] == "resident"
        # The dashboard's files are named relative to its page.
        assert 'src="dashboard/page.js"' in http.get("/memory/").text
        assert http.get("/memory/dashboard/page.js").status_code == 200
