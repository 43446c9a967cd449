"""Reasons against hibernating a process: each is detected and refused with a message of its own."""

from __future__ import annotations

import multiprocessing
import os
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing

import memsaver_core as ms
from memsaver_core import communicators, process
from memsaver_core.communicators import sharing
from memsaver_core.contract.status import CommunicatorStatus
from memsaver_core.hibernation import helper, preconditions
from memsaver_core.hibernation.preconditions import obstacles
from memsaver_core.shared_buffers import ImportedBuffer
from tests.devices.sharing_peer import Peer
from tests.obstacles import put_in

OLD = CommunicatorStatus(name="old", ranks=2, rank=0, obstacle="NCCL 2.28.9 cannot suspend it; install NCCL 2.29.7")
NEW = CommunicatorStatus(name="new", ranks=2, rank=0, suspendable_bytes=1)

NEEDS_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the host driver's answer")


@pytest.mark.parametrize(
    ("put", "reason", "remedy"),
    [
        ({"can_checkpoint": False}, "the NVIDIA driver cannot checkpoint", "570 or later"),
        ({"mps": "/tmp/nvidia-mps/control"}, "CUDA MPS (/tmp/nvidia-mps/control)", "without MPS"),
        ({"communicators": (OLD,)}, "communicator old is alive: NCCL 2.28.9 cannot", "install NCCL 2.29.7"),
        ({"communicators": (NEW,)}, "communicator new is alive", "suspend it first, or destroy it"),
        ({"imported_bytes": 7}, "7 bytes of other processes' device memory are mapped", "drop the imported buffers"),
        ({"sharing": ("the custom all-reduce shares memory; start without",)}, "the custom all-reduce", "without"),
        ({"others": ("a buffer is shared; free it",)}, "a buffer is shared", "free it"),
        ({"ipc_tensors": 3}, "3 tensors are shared with other processes by CUDA IPC", "drop them"),
        ({"peers": ((0, 1), (1, 0))}, "reach each other's memory (0 to 1, 1 to 0)", "MEMSAVER_PEER_ACCESS"),
        ({"managed_bytes": 1 << 30}, "1073741824 bytes of managed memory", "free it"),
        ({"has_helper": False}, "memsaver-hibernate is missing", "install memsaver again"),
    ],
)
def test_each_has_a_reason_that_says_what_to_do(put: dict[str, Any], reason: str, remedy: str) -> None:
    with put_in(**put):
        [told] = obstacles()
    assert reason in told
    assert remedy in told


def test_a_process_without_memsaver_has_that_reason_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "enabled", lambda: False)
    [told] = ms.hibernation_obstacles()
    assert told == "memsaver is disabled (MEMSAVER_ENABLED=0)"


def test_all_of_them_are_told_at_once() -> None:
    with put_in(can_checkpoint=False, mps="here", ipc_tensors=1, communicators=(OLD,)):
        assert len(obstacles()) == 4


def test_communicators_that_are_or_will_be_suspended_are_no_reason() -> None:
    suspended = NEW.model_copy(update={"suspendable_bytes": 0, "suspended_bytes": 1, "suspended": True})
    with put_in(communicators=(suspended,)):
        assert obstacles() == []
    with put_in(communicators=(NEW, suspended)):
        assert obstacles(suspending=True) == []
    with put_in(imported_bytes=7):
        assert obstacles(suspending=True) == []
    with put_in(communicators=(OLD, NEW)):
        [told] = obstacles(suspending=True)
    assert "communicator old" in told


@pytest.mark.guards("a process with imported device memory was checkpointed and could never be restored")
def test_imported_memory_is_refused_before_the_checkpoint(tmp_path: Path) -> None:
    """The process runs on, and can be hibernated once it has dropped the memory."""
    with Peer(tmp_path, "host", 0) as owner, Peer(tmp_path, "host", 0) as importer:
        owner.do("make", 4 << 20)
        with owner.exported() as fd:
            importer.take("import", fd, 4 << 20)
        told = importer.ask("hibernate")
        assert told.startswith("raised UnsupportedError: this process cannot be hibernated: 4194304 bytes of other")
        assert "drop the imported buffers first; nothing was released" in told
        importer.do("read")
        importer.do("drop")
        assert importer.do("hibernate") == "True"
        importer.do("wake")


class _Group:
    """A group of ranks by the names that vLLM's parallel_state uses."""

    unique_name = "tp:0"

    def __init__(self, **parts: object) -> None:
        self.device_communicator = SimpleNamespace(**parts)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"ca_comm": SimpleNamespace(disabled=False, buffer_ptrs=[4096])}, "--disable-custom-all-reduce"),
        ({"ca_comm": SimpleNamespace(disabled=False)}, "--disable-custom-all-reduce"),
        ({"ca_comm": SimpleNamespace(disabled=True)}, ""),
        ({"ca_comm": None}, ""),
        ({"symm_mem_comm": SimpleNamespace(disabled=True, buffer=torch.ones(1))}, "VLLM_ALLREDUCE_USE_SYMM_MEM=0"),
        ({"symm_mem_comm": SimpleNamespace(disabled=True, buffer=torch.ones(3))}, "(12 bytes)"),
        ({"symm_mem_comm": SimpleNamespace(disabled=True)}, ""),
        ({"torch_symm_mem_comm": SimpleNamespace(disabled=False, buffer=torch.ones(1))}, "--enable-torch-symm-mem"),
        ({"torch_symm_mem_comm": SimpleNamespace(disabled=True, buffer=None)}, ""),
        ({"pymscclpp_comm": SimpleNamespace(disabled=True, comm=object())}, "--enable-mscclpp"),
        ({"pymscclpp_comm": SimpleNamespace(disabled=True)}, ""),
        ({"all2all_manager": type("DeepEPHTAll2AllManager", (), {})()}, "--all2all-backend"),
        ({"all2all_manager": type("AgRsAll2AllManager", (), {})()}, ""),
    ],
)
def test_what_an_engine_s_ranks_share_is_seen(
    monkeypatch: pytest.MonkeyPatch, parts: dict[str, object], told: str
) -> None:
    """By the names in vLLM 0.26 and SGLang 0.5.17; even symmetric memory that disabled itself holds its buffer."""
    group = _Group(**parts)
    state = SimpleNamespace(_groups={"tp:0": lambda: group, "ended": lambda: None})
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    found = sharing.shared_memory()
    assert len(found) == bool(told)
    assert all(told in each and "vllm's group tp:0" in each for each in found)
    communicators.found()
    assert list(ms.status().shared) == found  # told without a hibernation, too


def test_names_that_have_changed_are_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(_groups={"tp:0": lambda: SimpleNamespace(ca_comm=object())})
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    [told] = sharing.shared_memory()
    assert told.startswith("what ranks share is unknown (AttributeError: ")


def test_buffers_that_can_be_dropped_are_no_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a custom all-reduce whose buffers are memsaver's."""
    with Peer(tmp_path, "host", 0) as owner:
        owner.do("make", 4 << 20)
        with owner.exported() as fd:
            imported = ImportedBuffer(fd, 4 << 20, 0)
    group = _Group(ca_comm=SimpleNamespace(disabled=False, buffer_ptrs=[4096, imported.address]))
    state = SimpleNamespace(_groups={"tp:0": lambda: group})
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
    assert sharing.shared_memory() == []
    imported.drop()
    assert sharing.shared_memory() == []


def test_workspaces_of_libraries_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._symmetric_memory as symmetric

    monkeypatch.setitem(symmetric._group_name_to_workspace_tensor, "tp", torch.ones(1))
    flashinfer = SimpleNamespace(_fi_ar_workspace=object(), _fi_ar_quant_workspace=None)
    monkeypatch.setitem(sys.modules, "vllm.distributed.device_communicators.flashinfer_all_reduce", flashinfer)
    found = sharing.shared_memory()
    assert [("VLLM_ALLREDUCE_USE_FLASHINFER=0" in each, "fuse_gemm_comms" in each) for each in found] == [
        (True, False),
        (False, True),
    ]
    assert "groups tp; 4 bytes" in found[1]


@pytest.mark.parametrize("engine", ["vllm", "sglang.srt"])
def test_nccls_symmetric_memory_is_seen(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    module = f"{engine}.distributed.device_communicators.pynccl_allocator"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(_mem_pool=None))
    assert sharing.shared_memory() == []
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(_mem_pool=object()))
    [told] = sharing.shared_memory()
    assert "NCCL symmetric memory" in told


def test_what_only_sglang_shares_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = {"flashinfer_fusion_attn_tp_workspace": SimpleNamespace(workspace=None), "mask": object()}
    context = SimpleNamespace(get_resources=lambda: SimpleNamespace(buffers=buffers))
    backend = SimpleNamespace(value="none", is_none=lambda: backend.value == "none")
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    monkeypatch.setitem(
        sys.modules, "sglang.srt.layers.moe.utils", SimpleNamespace(get_moe_a2a_backend=lambda: backend)
    )
    assert sharing.shared_memory() == []
    buffers["flashinfer_fusion_attn_tp_workspace"].workspace = object()
    backend.value = "deepep"
    shared, workspaces = sharing.shared_memory()
    assert "(deepep); leave out --moe-a2a-backend" in shared
    assert "--enforce-disable-flashinfer-allreduce-fusion" in workspaces


@pytest.mark.parametrize(
    ("setting", "multicast", "told"),
    [(None, True, "NCCL_NVLS_ENABLE=0"), ("2", True, "NCCL_NVLS_ENABLE=0"), ("0", True, ""), (None, False, "")],
)
def test_multicast_memory_is_told_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, multicast: bool, told: str
) -> None:
    """NCCL does not say whether it uses any; the device's answer is patched in."""
    monkeypatch.setattr(sharing, "_multicast_supported", lambda device: multicast)
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    if setting is not None:
        monkeypatch.setenv("NCCL_NVLS_ENABLE", setting)
    found = sharing.fabric_obstacle("tp", 0, "GPU-of-no-machine")
    assert bool(found) == bool(told)
    assert told in found


def test_what_only_an_integration_sees_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditions, "_checks", [])
    preconditions.register_check(lambda: ["the engine shares a buffer; start it without"])
    assert "the engine shares a buffer; start it without" in obstacles()


def test_nothing_stands_in_the_way_of_a_plain_process() -> None:
    with put_in():
        assert obstacles() == []


def test_what_hinders_the_cuda_driver_does_not_hinder_the_host_s() -> None:
    with put_in(has_context=False, mps="here", can_checkpoint=False):
        assert obstacles() == []


@NEEDS_CPU
def test_a_helper_that_is_missing_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(helper, "PATH", tmp_path / "memsaver-hibernate")
    assert "is missing" in ms.hibernation_obstacles()[0]


def test_mps_is_seen_where_its_daemon_has_its_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment variable alone does not mean that the daemon runs."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert preconditions.mps_pipe() == ""
    os.mkfifo(tmp_path / "control")
    assert preconditions.mps_pipe() == str(tmp_path / "control")


def test_tensors_shared_in_host_memory_are_not_cuda_s() -> None:
    """torch records both kinds in one place."""
    before = torch.multiprocessing.get_sharing_strategy()
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    tensors = [torch.ones(10), torch.ones(10)]
    try:
        for tensor, strategy in zip(tensors, ("file_descriptor", "file_system"), strict=True):
            torch.multiprocessing.set_sharing_strategy(strategy)
            queue.put(tensor)
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    assert len(torch.multiprocessing.reductions.shared_cache) >= 2
    assert preconditions.ipc_tensors() == 0


def test_a_process_group_without_nccl_is_none_of_ours(tmp_path: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/{uuid.uuid4().hex}", rank=0, world_size=1
    )
    try:
        assert torch.distributed.is_initialized()
        assert communicators.found() == ()
    finally:
        torch.distributed.destroy_process_group()
