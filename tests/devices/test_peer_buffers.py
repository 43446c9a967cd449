"""A buffer of each rank of a group, read by all of them, suspended and resumed."""

from __future__ import annotations

import json

import pytest
import torch

from tests.devices.peer_rank import all_do, group_of
from tests.devices.sharing_peer import hash_of

SIZE = 2 << 20


def _ranks(device: str) -> int:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return 2 if device == "cuda" else 3


def test_every_rank_reads_every_buffer_after_each_suspension(device: str) -> None:
    ranks = _ranks(device)
    with group_of(device, ranks, SIZE) as group:
        before = all_do(group, "addresses")
        for cycle in range(2):
            for number, rank in enumerate(group):
                rank.ask(f"write {10 * cycle + number + 1}")
            all_do(group, "suspend")
            assert all_do(group, "imported") == ["0"] * ranks
            assert all_do(group, "suspend") == ["null"] * ranks  # a repeat is success
            assert all_do(group, "resume") == ["null"] * ranks
            expected = [hash_of(10 * cycle + number + 1, SIZE) for number in range(ranks)]
            assert [json.loads(told) for told in all_do(group, "read")] == [expected] * ranks
        assert all_do(group, "addresses") == before


def test_a_rank_that_is_gone_is_named(device: str) -> None:
    ranks = _ranks(device)
    with group_of(device, ranks, SIZE) as group:
        all_do(group, "suspend")
        group[-1].process.kill()
        group[-1].process.wait()
        told = json.loads(group[0].ask("resume"))
        assert f"raised rank 0 of a group did not get the memory of rank {ranks - 1}" in told
