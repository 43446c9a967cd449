"""Devices that have no memory but the host's. The driver's answer is a stand-in: there is no such device here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memsaver_core as ms
from memsaver_core import process
from memsaver_core.compat.torch_memory_saver.entrypoint import TorchMemorySaver
from memsaver_core.contract.errors import UnsupportedError
from memsaver_core.contract.requests import MemoryRequest
from memsaver_core.ranks.plans import plan_release
from memsaver_server import doctor


@pytest.mark.guards("a wake-up on a device whose memory is the host's killed engine or host")
def test_what_would_free_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with ms.region("integrated", restore="host"):
        kept = torch.ones(1 << 20)
    monkeypatch.setattr(process.backend(), "has_host_memory", lambda _index: True, raising=False)
    with pytest.raises(UnsupportedError, match="backup of 'integrated' in host memory would free nothing"):
        ms.release("integrated")
    with pytest.raises(UnsupportedError, match="free nothing"):
        plan_release(MemoryRequest(tags=("integrated",)))
    assert torch.equal(kept, torch.ones(1 << 20))
    ms.release("integrated", restore={"integrated": "discard"})
    ms.resume("integrated")
    del kept


def test_a_release_of_everything_leaves_it_resident(monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang releases: without tags, with the policies of its regions."""
    with ms.region("runtime", restore="host"):
        kept = torch.ones(1 << 20)
    monkeypatch.setattr(process.backend(), "has_host_memory", lambda _index: True, raising=False)
    with pytest.raises(UnsupportedError, match="'runtime' in host memory would free nothing"):
        ms.release()
    with ms.region("kv_cache"):
        cache = torch.ones(1 << 20)
    for _ in range(2):
        assert plan_release(MemoryRequest()).host_bytes_needed == 0
        TorchMemorySaver().pause()
        states = {tag.tag: tag.state for tag in ms.status().tags if tag.bytes}
        assert states == {"runtime": "resident", "kv_cache": "released"}
        assert torch.equal(kept, torch.ones(1 << 20))
    assert {tag.tag: tag.state for tag in ms.release().tags if tag.bytes} == states
    TorchMemorySaver().resume()
    assert not cache.any()
    del kept, cache


class Cuda:
    """The driver of one device that is part of the host."""

    def cuDeviceGet(self, *_: Any) -> int:
        return 0

    cuDeviceGetName = cuDeviceTotalMem_v2 = cuDeviceGet

    def cuDeviceGetAttribute(self, value: Any, number: int, _device: Any) -> int:
        value._obj.value = int(number in (18, 102))  # integrated; virtual memory management
        return 0


def test_doctor_reports_it() -> None:
    machine: Any = SimpleNamespace(cuda=Cuda(), has_gpu=True, device_count=1)
    found = {each.subject: each for each in doctor.check_devices(machine)}
    assert found["device 0"].level == "ok"
    assert found["memory of device 0"].level == "warning"
    assert "file or discard" in found["memory of device 0"].remedy
