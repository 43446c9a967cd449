"""Reasons against hibernating a process: each is detected and refused with a message of its own."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing

import memsaver_core as ms
from memsaver_core import communicators
from memsaver_core.hibernation import helper, preconditions
from memsaver_core.hibernation.preconditions import Facts, obstacles
from memsaver_core.reports import CommunicatorStatus

OLD = CommunicatorStatus("old", 2, 0, obstacle="NCCL 2.28.9 cannot suspend it; install NCCL 2.29.7")
NEW = CommunicatorStatus("new", 2, 0, suspendable_bytes=1)

NEEDS_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the host driver's answer")


@pytest.mark.parametrize(
    ("facts", "reason", "remedy"),
    [
        (Facts(can_checkpoint=False), "the NVIDIA driver cannot checkpoint", "570 or later"),
        (Facts(mps="/tmp/nvidia-mps/control"), "CUDA MPS (/tmp/nvidia-mps/control)", "without MPS"),
        (Facts(communicators=(OLD,)), "NCCL communicator old is alive: NCCL 2.28.9 cannot", "install NCCL 2.29.7"),
        (Facts(communicators=(NEW,)), "NCCL communicator new is alive", "suspend it first, or destroy it"),
        (Facts(others=("a buffer is shared; free it",)), "a buffer is shared", "free it"),
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
    assert len(obstacles(Facts(can_checkpoint=False, mps="here", ipc_tensors=1, communicators=(OLD,)))) == 4


def test_communicators_that_are_or_will_be_suspended_are_no_reason() -> None:
    suspended = replace(NEW, suspendable_bytes=0, suspended_bytes=1, suspended=True)
    assert obstacles(Facts(communicators=(suspended,))) == []
    assert obstacles(Facts(communicators=(NEW, suspended)), suspending=True) == []
    [told] = obstacles(Facts(communicators=(OLD, NEW)), suspending=True)
    assert "communicator old" in told


def test_what_only_an_integration_sees_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preconditions, "_checks", [])
    preconditions.register_check(lambda: ["the engine shares a buffer; start it without"])
    assert preconditions.registered_checks() == ("the engine shares a buffer; start it without",)


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
