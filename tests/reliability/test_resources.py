"""Resources that really run out, in child processes; and a copy that stalls."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from memsaver_core import _native
from memsaver_core.contract.errors import BackupError, OutOfDeviceMemoryError, OutOfHostMemoryError
from tests.native import injection
from tests.programs import output_of
from tests.reliability.surroundings import in_child
from tests.unit.saver_memory import MIB, PAGE, content, fill
from tests.waiting import wait_until


def make(folder: Path | str = "/tmp", capacity: int = 256 * MIB) -> _native.Saver:
    return _native.Saver(driver="host", host_capacity=capacity, file_folder=str(folder), verify="full")


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_file_descriptors_run_out(tmp_path: Path) -> None:
    """Without a descriptor for the backup file a release is refused with nothing unmapped; it works afterwards."""

    def body() -> None:
        saver = make(tmp_path)
        address = saver.allocate(0, "t", "file", MIB)
        written = fill(address, MIB, 1)
        taken = []
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = len(os.listdir("/proc/self/fd")) + 100  # other tests may have left some open
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, limit), hard))
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        with pytest.raises(BackupError, match=r"EMFILE.*ulimit -n"):
            saver.release([], [], {})
        for descriptor in taken:
            os.close(descriptor)
        assert saver.audit() == []
        assert content(address, MIB) == written
        saver.release([], [], {})
        saver.resume([])
        assert content(address, MIB) == written

    in_child(body)


@pytest.mark.guards("a backup larger than host memory ended in the OOM killer")
def test_address_space_runs_out() -> None:
    """If the system refuses host memory, it is an error, nothing is lost, and the retry works.

    In a new process: one that is forked from here may unmap much while it runs, as what other tests have left.
    """
    program = "from tests.reliability import test_resources as t; t.run_out_of_addresses()"
    output_of(program, by_itself=True, **injection.in_child())


def run_out_of_addresses() -> None:
    saver = make()
    address = saver.allocate(0, "t", "host", 128 * MIB)
    written = fill(address, 128 * MIB, 1)
    with open("/proc/self/statm") as file:
        mapped = int(file.read().split()[0]) * PAGE
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + 40 * MIB, unlimited[1]))
    with pytest.raises(OutOfHostMemoryError, match="t"):
        saver.release([], [], {})
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    assert saver.audit() == []
    saver.resume([])  # the undo needs a little memory too
    assert content(address, 128 * MIB) == written
    saver.release([], [], {})
    saver.resume([])
    assert content(address, 128 * MIB) == written


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_the_device_is_taken_during_a_resume() -> None:
    """If memory is taken between the check and its use, the resume fails and is undone, and the retry works."""
    saver = make(capacity=16 * MIB)
    addresses = [saver.allocate(0, tag, "host", 4 * MIB) for tag in ("a", "b")]
    written = [fill(address, 4 * MIB, seed) for seed, address in enumerate(addresses)]
    saver.release([], [], {})
    saver.delay("create", 3600)  # free memory has been checked by then
    taken: list[int] = []
    failures: list[Exception] = []

    def resume() -> None:
        try:
            saver.resume([])
        except OutOfDeviceMemoryError as error:
            failures.append(error)

    before = saver.counts()["create"]
    thread = threading.Thread(target=resume)
    thread.start()
    wait_until(lambda: saver.counts()["create"] != before)
    saver.delay("create", 0)  # for other allocations
    taken.append(saver.allocate(0, "tenant", "discard", 14 * MIB))
    saver.heal()
    thread.join()
    assert len(failures) == 1
    assert "tag" in str(failures[0])
    assert saver.audit() == []
    saver.free(taken[0])
    saver.resume([])
    assert [content(address, 4 * MIB) for address in addresses] == written


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_status_answers_while_a_copy_stalls() -> None:
    """It keeps reporting which operation is running."""
    saver = make()
    fill(saver.allocate(0, "t", "host", 4 * MIB), 4 * MIB, 1)
    saver.delay("copy_to_host", 3600)
    thread = threading.Thread(target=saver.release, args=([], [], {}))
    thread.start()
    wait_until(lambda: saver.counts().get("copy_to_host", 0) != 0)
    answers = [saver.status() for _ in range(50)]  # while the copy is held
    saver.heal()
    thread.join()
    assert {answer["state"] for answer in answers} == {"releasing"}
    assert {answer["operation"] for answer in answers} == {"release"}
    assert answers[-1]["operation_seconds"] > answers[0]["operation_seconds"]
    assert answers[-1]["total_bytes"] == 4 * MIB


@pytest.mark.guards("host memory stayed resident after a resume, or freeing it slowed the resume")
def test_a_resume_does_not_wait_for_what_is_freed_after_it() -> None:
    """The resume is over and its memory in use while host memory that is no longer needed is unpinned."""
    saver = _native.Saver(driver="host", host_capacity=64 * MIB, retention="free", verify="full")
    address = saver.allocate(0, "t", "host", 4 * MIB)
    written = fill(address, 4 * MIB, 1)
    saver.release([], [], {})
    saver.delay("unregister_host", 3600)
    resume = threading.Thread(target=saver.resume, args=([],))
    resume.start()
    resume.join(600)
    waited = resume.is_alive()
    wait_until(lambda: saver.counts().get("unregister_host", 0) != 0)  # the memory is freed all the same
    status = saver.status()
    found = content(address, 4 * MIB)
    fill(address, 4 * MIB, 2)
    saver.heal()
    assert not waited
    assert (status["state"], status["operation"]) == ("resident", "")
    assert found == written
    wait_until(lambda: saver.status()["host_backup"]["capacity_bytes"] == 0)


def test_a_process_that_ends_unpins_nothing() -> None:
    """The driver may have ended before: each slice would fail, with a warning."""
    saver = _native.Saver(driver="host", host_capacity=64 * MIB, verify="full")
    fill(saver.allocate(0, "t", "host", 4 * MIB), 4 * MIB, 1)
    saver.release([], [], {})
    saver.resume([])
    saver.drop_backups([], keep_memory=True)
    saver.close()
    saver.trim_backup_memory(at_once=True)
    assert saver.counts().get("unregister_host", 0) == 0


@pytest.mark.parametrize("retention", ["trim", "free"])
@pytest.mark.guards("an operation waited forever, and nothing said why", "memory grew with every cycle")
def test_retention_never_blocks(retention: str) -> None:
    """The thread that unpins backups after a resume and the next resume do not deadlock, and host memory stays the
    same over many cycles."""
    saver = _native.Saver(driver="host", host_capacity=64 * MIB, retention=retention, verify="full")
    address = saver.allocate(0, "t", "host", 2 * MIB)
    written = fill(address, 2 * MIB, 1)
    for _ in range(300):
        saver.release([], [], {})
        saver.resume([])
    assert content(address, 2 * MIB) == written
    assert saver.audit() == []


def test_an_unknown_device_leaves_nothing_behind() -> None:
    saver = make()
    with pytest.raises(ValueError, match="no host device 7"):
        saver.allocate(7, "t", "host", PAGE)
    assert saver.status()["tags"] == []
    assert saver.audit() == []
