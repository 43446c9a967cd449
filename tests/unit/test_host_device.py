"""Host devices: processes that name the same one share its memory, and a killed process loses its share."""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Iterator

import pytest

from memsaver_core import _native
from memsaver_core.contract.errors import ConfigurationError, OutOfDeviceMemoryError
from tests.programs import Child, output_of

MIB = 1 << 20


@pytest.fixture
def name() -> Iterator[str]:
    device = f"test-{uuid.uuid4().hex[:12]}"
    yield device
    gc.collect()  # a caught exception keeps its test's saver in a reference cycle
    assert not os.path.exists(account_of(device)), "the last process to leave takes the account with it"


def account_of(device: str) -> str:
    return f"/dev/shm/memsaver-{os.getuid()}-{device}"


def open_device(device: str, capacity: int = 64 * MIB) -> _native.Saver:
    return _native.Saver(driver="host", host_devices=[device], host_capacity=capacity)


def free_bytes(saver: _native.Saver) -> int:
    return saver.memory_info(0)[0]


TENANT = """
import sys
from memsaver_core import _native
saver = _native.Saver(driver="host", host_devices=[sys.argv[1]], host_capacity=64 << 20)
address = saver.allocate(0, "t", "discard", int(sys.argv[2]))
print("holds", flush=True)
sys.stdin.readline()
"""


def hold(device: str, nbytes: int) -> Child:
    """Another process that holds memory of a host device until told to end."""
    tenant = Child("-c", TENANT, device, str(nbytes))
    assert tenant.read_line() == "holds"
    return tenant


def test_processes_compete(name: str) -> None:
    saver = open_device(name)
    tenant = hold(name, 40 * MIB)
    assert free_bytes(saver) == 24 * MIB
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        saver.allocate(0, "t", "discard", 25 * MIB)
    assert caught.value.free_bytes == 24 * MIB
    address = saver.allocate(0, "t", "discard", 24 * MIB)
    saver.free(address)
    tenant.end()
    assert free_bytes(saver) == 64 * MIB


@pytest.mark.guards("a process was killed in the middle of an operation")
def test_killed_process_gives_its_share_back(name: str) -> None:
    """Its memory and its slot in the account are free at once."""
    saver = open_device(name)
    tenant = hold(name, 60 * MIB)
    assert free_bytes(saver) == 4 * MIB
    tenant.kill()
    assert free_bytes(saver) == 64 * MIB
    saver.free(saver.allocate(0, "t", "discard", 64 * MIB))


@pytest.mark.guards("a process was killed in the middle of an operation")
def test_account_left_by_killed_processes_is_taken_over(name: str) -> None:
    """An account that only killed processes used is empty, and may be opened with another capacity."""
    tenant = hold(name, 60 * MIB)
    tenant.kill()
    assert os.path.exists(account_of(name))
    saver = open_device(name, 32 * MIB)
    assert free_bytes(saver) == 32 * MIB


def test_capacity_must_be_agreed_on(name: str) -> None:
    tenant = hold(name, MIB)
    with pytest.raises(ConfigurationError, match="same value"):
        open_device(name, 32 * MIB)
    tenant.end()


@pytest.mark.guards("memory was reported free before it was free")
def test_released_memory_is_free_for_others(name: str) -> None:
    """Another process can take it as soon as the release has returned."""
    saver = open_device(name)
    saver.allocate(0, "t", "discard", 60 * MIB)
    saver.release([], [], {})
    tenant = hold(name, 60 * MIB)
    with pytest.raises(OutOfDeviceMemoryError):
        saver.resume([])
    tenant.end()
    saver.resume([])
    assert free_bytes(saver) == 4 * MIB


def test_private_devices_do_not_compete() -> None:
    first, second = (_native.Saver(driver="host", host_capacity=8 * MIB) for _ in range(2))
    first.allocate(0, "t", "discard", 8 * MIB)
    second.allocate(0, "t", "discard", 8 * MIB)


@pytest.mark.parametrize("bad", ["../escape", "a/b", "name with spaces"])
def test_names_are_plain(bad: str) -> None:
    with pytest.raises(ConfigurationError, match="letters, digits"):
        open_device(bad)


ENGINE = """
import os, sys, torch
import memsaver_core as ms
with ms.region("weights"):
    weights = torch.ones(1 << 20)
child = os.fork()
if child == 0:
    sys.exit(0)  # through the interpreter's normal exit, with a copy of the parent's state
os.waitpid(child, 0)
print(os.path.exists(sys.argv[1]), flush=True)
sys.exit(0)  # the saver lives to the very end
"""


@pytest.mark.guards("the process aborted at exit", "a forked child used or damaged its parent's memory")
def test_a_clean_end_leaves_nothing_behind(name: str) -> None:
    """The account goes with its last process, but not with a forked child."""
    assert output_of(ENGINE, account_of(name), MEMSAVER_DRIVER="host", MEMSAVER_HOST_DEVICE=name) == "True\n"
    assert not os.path.exists(account_of(name))
