"""A served engine that is killed or terminated in the middle of work: effects on its device, its address and the
next engine."""

from __future__ import annotations

import glob
import multiprocessing
import os
import signal
import socket
import struct
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import BinaryIO

import pytest

from memsaver_core import _native
from memsaver_server.client import Client
from tests.amount import amount
from tests.unit.saver_memory import MIB, content, fill

from .serving import HeldServe

CAPACITY = 128 * MIB
SMALL = ("--kv-cache-bytes", "16MiB")
TENANT = 8 * MIB
#: The phases in which a served engine is killed, each with the driver call at which it is held, if any.
PLACES = [
    ("drain", ""),
    ("pause", "copy_to_host"),
    ("pause", "unmap"),
    ("settle", ""),
    ("restore", "copy_to_device"),
    ("wait_for_memory", ""),
    ("repair", ""),
    ("released", ""),
]
RELEASING = ("drain", "pause", "settle")
FORK = multiprocessing.get_context("fork")


@dataclass
class Host:
    """A host device and a folder for backups, shared by engines."""

    name: str
    backups: Path

    def environment(self, capacity: int = CAPACITY) -> dict[str, str]:
        return {
            "MEMSAVER_HOST_DEVICE": self.name,
            "MEMSAVER_HOST_CAPACITY": str(capacity),
            "MEMSAVER_FILE_DIR": str(self.backups),
        }

    @property
    def account(self) -> Path:
        return Path(f"/dev/shm/memsaver-{os.getuid()}-{self.name}")

    def shared_memory(self) -> list[str]:
        return glob.glob(f"/dev/shm/*{self.name}*")

    def saver(self) -> _native.Saver:
        return _native.Saver(
            driver="host",
            host_devices=[self.name],
            host_capacity=CAPACITY,
            file_folder=str(self.backups),
            verify="full",
        )


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(f"killed-{uuid.uuid4().hex[:12]}", tmp_path / "backups")
    host.backups.mkdir()
    yield host
    host.account.unlink(missing_ok=True)


class Tenant:
    """A co-tenant in this process, whose content must stay intact, and which measures what others hold."""

    def __init__(self, host: Host) -> None:
        self.saver = host.saver()
        self.address = self.saver.allocate(0, "tenant", "host", TENANT)
        self.written = fill(self.address, TENANT, 1)

    def others_hold(self) -> int:
        free, total = self.saver.memory_info(0)
        return total - free - TENANT

    def take_the_rest(self) -> None:
        free, _ = self.saver.memory_info(0)
        self.rest = self.saver.allocate(0, "rest", "discard", free)

    def give_the_rest_back(self) -> None:
        self.saver.free(self.rest)

    def check(self) -> None:
        assert self.saver.audit() == []  # no other process holds anything
        self.saver.release([], [], {})
        self.saver.resume([])
        assert content(self.address, TENANT) == self.written


def tokens(client: Client) -> list[int]:
    answer: list[int] = client.generate("what stays is the same", max_new_tokens=6, temperature=0)["output_ids"]
    return answer


def check_cycle(client: Client) -> list[int]:
    """The tokens, after checking that they are the same after a release and a resume."""
    before = tokens(client)
    assert client.release().released_bytes > 0
    assert client.resume().success
    assert tokens(client) == before
    return before


def wait_for_phase(client: Client, operation_id: str, phase: str) -> None:
    """Return once the operation is in the phase, which it does not leave by itself."""
    names = (event.data["name"] for event in client.events(operation_id) if event.name == "phase")
    assert phase in names, f"the operation ended without {phase}"


def stand_still(engine: HeldServe, client: Client, phase: str, call: str) -> None:
    """Begin the operation that reaches the phase, with part of the backup on disk; return once the engine is there."""
    if phase in RELEASING:
        operation = client.start_release(restore={"weights": "file"})
    else:
        client.release(restore={"weights": "file"})
        operation = client.start_resume(wait_for_memory_s=3600)
    wait_for_phase(client, operation.operation_id, phase)
    if call:
        assert engine.read_line() == "standing still"


@pytest.fixture
def port() -> Iterator[int]:
    """A port that a server can bind several times. It stays bound here, not listening: no other process gets it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.long
@pytest.mark.parametrize("over", ["tcp", "unix"])
@pytest.mark.guards("a process was killed in the middle of an operation", "backup files were left behind")
def test_killed_in_each_phase(host: Host, tmp_path: Path, over: str, port: int) -> None:
    """Its memory is free at once, no backup file remains, the co-tenant is unaffected, and the next engine takes
    over the address and device and completes a cycle."""
    path = tmp_path / "engine.sock"
    where = ("--uds", str(path)) if over == "unix" else ("--port", str(port))
    tenant = Tenant(host)
    expected: list[list[int]] = []
    for phase, call in PLACES[over == "unix" :: amount(2, long=1)]:
        with (
            HeldServe(*SMALL, *where, changes=host.environment(), phase=phase, call=call) as engine,
            Client(engine.url) as client,
        ):
            expected.append(check_cycle(client))  # what the last one left does not interfere
            assert tenant.others_hold() > 0
            if phase == "wait_for_memory":
                client.release()
                tenant.take_the_rest()
            if phase == "released":
                client.release()
            else:
                stand_still(engine, client, phase, call)
            assert engine.stop(signal.SIGKILL) == -signal.SIGKILL
        if phase == "wait_for_memory":
            tenant.give_the_rest_back()
        assert tenant.others_hold() == 0, phase
        assert list(host.backups.iterdir()) == [], phase
        assert host.shared_memory() == [str(host.account)], phase  # which belongs to the co-tenant now
        assert path.exists() == (over == "unix")
        tenant.check()
    with HeldServe(*SMALL, *where, changes=host.environment()) as engine, Client(engine.url) as client:
        expected.append(check_cycle(client))
        assert engine.stop() == 0
    assert all(each == expected[0] for each in expected)
    assert tenant.others_hold() == 0
    assert not path.exists()


@pytest.mark.guards("a process was killed in the middle of an operation")
def test_what_the_only_engine_leaves_behind_is_taken_over(host: Host, tmp_path: Path) -> None:
    """Without a co-tenant, the device's account and the socket remain, and hold no memory. The next engine takes
    both over, even with another device size, and removes both at its end."""
    path = tmp_path / "engine.sock"
    over = (*SMALL, "--uds", str(path))
    with HeldServe(*over, changes=host.environment()) as engine, Client(engine.url) as client:
        client.release(["kv_cache"])
        assert client.occupation().devices[0].used_bytes > 0
        assert engine.stop(signal.SIGKILL) == -signal.SIGKILL
    assert path.exists()
    assert host.shared_memory() == [str(host.account)]
    left = host.account.stat().st_ino
    with HeldServe(*over, changes=host.environment(capacity=CAPACITY + MIB)) as engine, Client(engine.url) as client:
        assert host.account.stat().st_ino == left
        assert client.occupation().devices[0].total_bytes == CAPACITY + MIB
        check_cycle(client)
        assert engine.stop() == 0
    assert not path.exists()
    assert host.shared_memory() == []


def hold_all(host: Host, pipe: Connection) -> None:
    saver = host.saver()
    free, _ = saver.memory_info(0)
    saver.allocate(0, "all", "discard", free)
    pipe.send(free)
    signal.pause()


@pytest.mark.guards("a process was killed in the middle of an operation")
def test_a_resume_that_waits_gets_what_a_killed_co_tenant_held(host: Host) -> None:
    """A resume that waits for memory continues once the co-tenant that holds it is killed."""
    with HeldServe(*SMALL, "--port", "0", changes=host.environment()) as engine, Client(engine.url) as client:
        before = tokens(client)
        released = client.release().released_bytes
        ours, theirs = FORK.Pipe()
        co_tenant = FORK.Process(target=hold_all, args=(host, theirs), daemon=True)
        co_tenant.start()
        assert ours.recv() == CAPACITY
        operation = client.start_resume(wait_for_memory_s=3600)
        wait_for_phase(client, operation.operation_id, "wait_for_memory")
        assert client.occupation().state == "resuming"
        co_tenant.kill()
        [done] = [event.data for event in client.events(operation.operation_id) if event.name == "done"]
        co_tenant.join()
        assert done["success"]
        assert done["resumed_bytes"] == released
        assert tokens(client) == before
        assert engine.stop() == 0


@pytest.mark.parametrize("in_flight", [False, True], ids=["at-rest", "in-flight"])
@pytest.mark.guards("a process was killed in the middle of an operation", "the process aborted at exit")
def test_terminated_with_a_part_released(host: Host, tmp_path: Path, in_flight: bool) -> None:
    """SIGTERM with memory partly released, or with a release in flight: exit code 0, all memory is free, and
    account, socket and backups are gone."""
    path = tmp_path / "engine.sock"
    with (
        HeldServe(*SMALL, "--uds", str(path), changes=host.environment(), phase="pause", call="copy_to_host") as engine,
        open(host.account, "rb", buffering=0) as account,
        Client(engine.url) as client,
    ):
        whole = held(account)
        released = client.release(["kv_cache"], restore={"kv_cache": "discard"}).released_bytes
        assert 0 < held(account) == whole - released < whole
        if in_flight:
            stand_still(engine, client, "pause", "copy_to_host")
            assert client.occupation().state == "releasing"
        assert engine.stop() == 0
        assert held(account) == 0
    assert not path.exists()
    assert host.shared_memory() == []
    assert list(host.backups.iterdir()) == []


def held(account: BinaryIO) -> int:
    """The bytes that a host device's account file records for all processes, living or dead."""
    account.seek(0)
    _capacity, *slots = struct.unpack("257Q", account.read(257 * 8))
    return sum(slots)
