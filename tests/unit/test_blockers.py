"""Reasons against hibernating a process: each is detected and refused with a message of its own."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing

import memsaver_core as ms
from memsaver_core import communicators
from memsaver_core.hibernation import helper, preconditions
from memsaver_core.hibernation.preconditions import Facts, obstacles

NEEDS_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the host driver's answer")


@pytest.mark.parametrize(
    ("facts", "reason", "remedy"),
    [
        (Facts(can_checkpoint=False), "the NVIDIA driver cannot checkpoint", "570 or later"),
        (Facts(mps="/tmp/nvidia-mps/control"), "CUDA MPS (/tmp/nvidia-mps/control)", "without MPS"),
        (Facts(nccl_groups=("default", "tp")), "NCCL communicators are alive ('default', 'tp')", "destroy"),
        (Facts(ipc_tensors=3), "3 tensors are shared with other processes by CUDA IPC", "drop them"),
        (Facts(peers=((0, 1), (1, 0))), "reach each other's memory (0 to 1, 1 to 0)", "MEMSAVER_PEER_ACCESS"),
        (Facts(managed_bytes=1 << 30), "1073741824 bytes of managed memory", "free it"),
        (Facts(helper=False), "memsaver-hibernate is missing", "install memsaver again"),
        (Facts(enabled=False), "memsaver is disabled", "MEMSAVER_ENABLED"),
    ],
)
def test_each_has_a_reason_that_says_what_to_do(facts: Facts, reason: str, remedy: str) -> None:
    [told] = obstacles(facts)
    assert reason in told
    assert remedy in told


def test_all_of_them_are_told_at_once() -> None:
    assert len(obstacles(Facts(can_checkpoint=False, mps="here", ipc_tensors=1, nccl_groups=("a",)))) == 4


def test_nothing_stands_in_the_way_of_a_plain_process() -> None:
    assert obstacles(Facts()) == []


def test_what_hinders_the_cuda_driver_does_not_hinder_the_host_s() -> None:
    assert obstacles(Facts(has_context=False, mps="here", can_checkpoint=False)) == []


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
        assert communicators.nccl_groups() == ()
    finally:
        torch.distributed.destroy_process_group()
