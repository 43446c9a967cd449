"""What attach detects about CUDA: NCCL in the process, and the sources of the device's memory."""

from __future__ import annotations

import logging
from pathlib import Path

import httpx
import pytest
import torch
import torch.distributed as dist

import memsaver_core as ms
from memsaver_server import attach
from memsaver_server.engine.gate import Gate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or ms.driver_name() != "cuda", reason="needs an NVIDIA GPU and the CUDA driver"
    ),
]
MIB = 1 << 20


@pytest.mark.parametrize("backend", ["nccl", None])
@pytest.mark.parametrize("setting", [None, "0"])
@pytest.mark.guards("replaying a graph with NCCL hung after a remap")
def test_nccl_is_warned_of_at_attach(
    backend: str | None,
    setting: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Unless NCCL_GRAPH_REGISTER=0 is set; NCCL may be named or torch's default."""
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    if setting is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", setting)
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        with caplog.at_level(logging.WARNING, "memsaver"), attach(Gate()):
            pass
    finally:
        dist.destroy_process_group()
    assert ("NCCL_GRAPH_REGISTER=0" in caplog.text) is (setting is None)


def test_what_holds_the_device_adds_up() -> None:
    with ms.region("weights"):
        weights = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    outside = torch.ones(32 * MIB, dtype=torch.uint8, device="cuda")
    with attach(Gate()) as server:
        before = sources(server.url, weights.device.index)
        assert before["weights"] >= weights.nbytes
        assert before["torch outside regions"] >= outside.nbytes
        httpx.post(f"{server.url}/release_memory_occupation", timeout=60).raise_for_status()
        after = sources(server.url, weights.device.index)
        assert after["weights"] == 0
        assert after["torch outside regions"] >= outside.nbytes
        httpx.post(f"{server.url}/resume_memory_occupation", timeout=60).raise_for_status()
    assert bool(weights.eq(1).all())


def sources(url: str, index: int) -> dict[str, int]:
    devices = httpx.get(f"{url}/memory_occupation", timeout=60).json()["devices"]
    device = next(device for device in devices if device["index"] == index)
    assert sum(source["bytes"] for source in device["sources"]) == device["used_bytes"]
    return {source["name"]: source["bytes"] for source in device["sources"]}
