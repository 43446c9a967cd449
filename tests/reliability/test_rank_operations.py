"""Operations over several processes: what is checked before, what is undone, and what is told."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from memsaver_core import (
    DriverError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    PhaseLog,
    RestorePolicy,
    UnsupportedError,
    process,
)
from memsaver_core.contract.requests import MemoryRequest, Tagged
from memsaver_core.ranks import protocol
from memsaver_core.release_resume import total_host_bytes
from memsaver_core.settings import CoreSettings
from memsaver_server.ranks import memory as rank_memory
from tests.reliability.conftest import Start
from tests.reliability.rank_engine import KEPT, RANKS, Group


def released(group: Group) -> list[set[str]]:
    return [{tag for tag, size in state["released"].items() if size} for state in group.look()]


def content(group: Group, *tags: str) -> list[list[str]]:
    return [[state["content"][tag] for tag in tags] for state in group.look()]


def test_the_steps_are_taken_in_order(start: Start) -> None:
    """And reported once, as taken by all ranks together."""
    group, memory = start()
    before = content(group, *KEPT)
    report = memory.release(MemoryRequest(hibernate=True))
    names = [phase.name for phase in report.phases]
    assert [name for name in names if name in ("pause", "suspend_communicators", "lock", "hibernate")] == [
        *("pause", "pause", "suspend_communicators", "lock", "hibernate")
    ]
    tags = {tag.tag: tag for tag in report.tags}
    assert tags["communicators"].released_bytes == RANKS * (8 << 20)
    status = memory.status()
    assert (status.state, status.hibernated, status.communicators[0].suspended) == ("released", True, True)
    again = memory.release(MemoryRequest(hibernate=True))
    assert again.released_bytes == 0
    report = memory.resume(Tagged(tags=("kv_cache",)))
    assert [phase.name for phase in report.phases] == ["wake", "unlock", "restore", "resume_communicators"]
    assert released(group) == [{"weights", "disk", "t"}] * RANKS
    memory.resume(Tagged())
    assert content(group, *KEPT) == before


def test_one_rank_is_an_engine_too(start: Start) -> None:
    group, memory = start(1)
    before = content(group, *KEPT)
    memory.release(MemoryRequest(hibernate=True))
    assert memory.status().hibernated
    memory.resume(Tagged())
    assert content(group, *KEPT) == before


def test_a_tag_of_one_rank_alone(start: Start) -> None:
    """As of a layer that only one rank has."""
    group, memory = start()
    before = content(group, *KEPT)
    group.tell("Hold", rank=2, bytes=4096)
    memory.release(MemoryRequest(tags=("t",)))
    memory.release(MemoryRequest(tags=("held",), restore={"held": RestorePolicy.ZERO}))
    assert released(group) == [{"t"}, {"t"}, {"t", "held"}, {"t"}]
    memory.resume(Tagged(tags=("held",)))
    memory.release(MemoryRequest())
    assert released(group)[2] == {"kv_cache", "weights", "disk", "t", "held", "communicators"}
    memory.resume(Tagged())
    assert released(group) == [set()] * RANKS
    assert content(group, *KEPT) == before


@pytest.mark.guards("one rank or device failed while the others went on")
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_rank_that_fails_half_way_is_undone(start: Start, nth: int) -> None:
    """Only what this operation released is resumed."""
    group, memory = start()
    memory.release(MemoryRequest(tags=("t",)))
    before = content(group, *KEPT, "kv_cache")
    group.tell("FailCall", rank=2, call="unmap", nth=nth)
    with pytest.raises(DriverError, match=r"^rank 2: .*unmap"):
        memory.release(MemoryRequest())
    assert released(group) == [{"t"}] * RANKS
    assert content(group, *KEPT) == [each[: len(KEPT)] for each in before]
    memory.release(MemoryRequest())
    memory.resume(Tagged())
    assert released(group) == [set()] * RANKS


@pytest.mark.guards("one rank or device failed while the others went on", "content was wrong after a restore")
def test_what_a_release_kept_by_an_override_survives_a_failed_resume(start: Start) -> None:
    """The ranks that had resumed release it again in the same way."""
    group, memory = start()
    before = content(group, "kv_cache")
    memory.release(MemoryRequest(restore={"kv_cache": RestorePolicy.HOST}))
    group.arm(3, "resume", "error", after=False)
    with pytest.raises(DriverError, match=r"^rank 3: "):
        memory.resume(Tagged())
    memory.resume(Tagged())
    assert content(group, "kv_cache") == before


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_a_device_that_is_full_is_found_before_any_rank_resumes(start: Start) -> None:
    """The error has the device's number as the service counts devices."""
    group, memory = start()
    memory.release(MemoryRequest())
    group.tell("Hold", rank=1, bytes=1000 << 10)
    log = PhaseLog(memory.read_devices)
    with pytest.raises(OutOfDeviceMemoryError, match=r"^rank 1: ") as short:
        memory.resume(Tagged(), log=log)
    assert (log.failed, log.phases, short.value.device) == ("prepare", (), 1)
    assert released(group) == [{"weights", "disk", "kv_cache", "t", "communicators"}] * RANKS
    group.tell("LetGo")
    memory.resume(Tagged())
    assert released(group) == [set()] * RANKS


@pytest.mark.guards("one rank or device failed while the others went on")
def test_memory_is_reserved_on_all_ranks_or_on_none(start: Start) -> None:
    group, memory = start()
    before = content(group, *KEPT)
    needed = memory.release(MemoryRequest()).released_bytes - RANKS * (8 << 20)  # communicators take theirs back
    group.tell("FailCall", rank=2, call="create", nth=2)
    with pytest.raises(DriverError, match=r"^rank 2: .*create"):
        memory.reserve(Tagged())
    assert memory.status().reserved_by_device == {}
    memory.reserve(Tagged())
    assert memory.status().reserved_by_device == dict.fromkeys(range(RANKS), needed // RANKS)
    memory.resume(Tagged())
    assert content(group, *KEPT) == before
    memory.release(MemoryRequest())
    memory.reserve(Tagged(tags=("kv_cache",)))
    memory.give_back_reserved()
    assert memory.status().reserved_by_device == {}
    assert sum(device.used_bytes for device in memory.read_devices()) == 0
    memory.resume(Tagged())


@pytest.mark.guards("a backup larger than host memory ended in the OOM killer")
def test_host_memory_that_is_short_is_found_before_any_rank_releases(start: Start) -> None:
    group, memory = start(host_backup_limit=1 << 16)
    log = PhaseLog(memory.read_devices)
    with pytest.raises(OutOfHostMemoryError, match=r"^rank 0: the backups need 196608 bytes"):
        memory.release(MemoryRequest(), log=log)
    assert (log.failed, log.phases) == ("prepare", ())
    assert released(group) == [set()] * RANKS
    memory.release(MemoryRequest(tags=("kv_cache",)))


def test_the_limits_of_all_ranks_are_no_more_than_the_host_has(start: Start) -> None:
    """Each may use most of it."""
    host = total_host_bytes()
    _, memory = start(host_backup_limit=host // 2)
    assert memory.status().host_backup.limit_bytes == host
    _, memory = start(host_backup_limit=1 << 20)
    assert memory.status().host_backup.limit_bytes == RANKS << 20


@pytest.mark.guards("a backup larger than host memory ended in the OOM killer")
def test_host_memory_that_is_short_for_all_ranks_is_found_before_any_releases(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is enough for each of them alone."""
    group, memory = start()
    free = 3 * 196608
    monkeypatch.setattr(rank_memory, "available_host_bytes", lambda: free)
    with pytest.raises(OutOfHostMemoryError, match=r"all ranks need 786432 more bytes .* 589824 are free") as short:
        memory.release(MemoryRequest())
    assert (short.value.needed_bytes, short.value.free_bytes) == (RANKS * 196608, free)
    assert released(group) == [set()] * RANKS
    memory.release(MemoryRequest(restore={"weights": RestorePolicy.DISCARD}))
    memory.resume(Tagged())
    free = RANKS * 196608
    memory.release(MemoryRequest())


@pytest.mark.guards("idle NCCL communicators held gigabytes while the engine slept")
def test_communicators_that_must_stay_stay_and_prevent_a_hibernation(start: Start) -> None:
    """Each rank is named, before anything is released."""
    group, memory = start(communicators="off")
    with pytest.raises(UnsupportedError, match=r"rank 3: .*MEMSAVER_COMMUNICATORS=off.*nothing was released"):
        memory.release(MemoryRequest(hibernate=True))
    assert released(group) == [set()] * RANKS
    memory.release(MemoryRequest())
    assert released(group) == [{"weights", "disk", "kv_cache", "t"}] * RANKS


@pytest.mark.parametrize(("setting", "communicators"), [("keep", None), ("auto", "keep")])
def test_communicators_are_kept_if_asked(
    start: Start, monkeypatch: pytest.MonkeyPatch, setting: Any, communicators: Any
) -> None:
    """By a setting or by the caller; a hibernation suspends them."""
    monkeypatch.setattr(process, "core_settings", lambda: CoreSettings(communicators=setting))
    group, memory = start(communicators=setting)
    kept = MemoryRequest(communicators=communicators)
    memory.release(kept)
    assert released(group) == [{"weights", "disk", "kv_cache", "t"}] * RANKS
    memory.resume(Tagged())
    assert released(group) == [set()] * RANKS
    for tags in ((), ("kv_cache",)):
        memory.release(MemoryRequest(tags=tags, communicators="suspend"))
        assert all("communicators" in each for each in released(group))
        memory.resume(Tagged())
    memory.release(MemoryRequest(hibernate=True))
    memory.resume(Tagged())
    assert released(group) == [set()] * RANKS
    for contradiction in ({"hibernate": True}, {"tags": ("communicators",)}):
        with pytest.raises(ValidationError, match="contradicts hibernate"):
            MemoryRequest(communicators="keep", **contradiction)


def test_a_field_that_is_new_reaches_every_rank(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class Newer(MemoryRequest):
        newer: bool = False

    _, memory = start()
    asked: list[protocol.Request] = []
    ask = memory.ask
    monkeypatch.setattr(memory, "ask", lambda request, *limits: asked.append(request) or ask(request, *limits))
    memory.release(Newer(newer=True))
    moved = [each.memory for each in asked if isinstance(each, protocol.Move)]
    assert len(moved) > 1  # kept content, and what is discarded
    assert all(isinstance(each, Newer) and each.newer for each in moved)


def test_communicators_are_released_alone_or_with_everything(start: Start) -> None:
    group, memory = start()
    memory.release(MemoryRequest(tags=("weights",)))
    assert released(group) == [{"weights"}] * RANKS
    memory.release(MemoryRequest(tags=("communicators",)))
    assert released(group) == [{"weights", "communicators"}] * RANKS
    memory.resume(Tagged(tags=("weights",)))
    assert released(group) == [set()] * RANKS
