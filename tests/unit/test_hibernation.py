"""Hibernation on the host driver: the states, helper and failures of a GPU, on a device without a context."""

from __future__ import annotations

import gc
import os
import signal
import textwrap
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch

import memsaver_core as ms
from memsaver_core import hibernation
from memsaver_core.hibernation import helper
from tests.native import injection
from tests.programs import Child, output_of

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host driver's twins of tests/gpu")

MIB = 1 << 20


@dataclass
class Kept:
    tag: str
    tensor: torch.Tensor

    def is_intact(self) -> bool:
        return float(self.tensor.sum()) == self.tensor.numel()


@pytest.fixture
def kept() -> Iterator[Kept]:
    gc.collect()  # tensors that errors of earlier tests hold would end in the middle of this one
    tag = f"t-{uuid.uuid4().hex[:8]}"
    with ms.region(tag, restore="host"):
        tensor = torch.ones(MIB)
    yield Kept(tag, tensor)
    ms.resume()


def used_bytes() -> int:
    return sum(device.used_bytes for device in ms.read_devices())


def phases(report: ms.OperationReport) -> list[str]:
    return [phase.name for phase in report.phases]


def test_what_was_not_released_goes_and_comes_back(kept: Kept) -> None:
    """The device counts nothing of a hibernated process, released or not; a resume of any tag wakes the whole
    process."""
    before = used_bytes()
    assert before >= 4 * MIB
    report = ms.release(["workspace"], hibernate=True)
    assert phases(report)[-1] == "hibernate"
    assert sum(device.delta_bytes for device in report.phases[-1].devices) == -before
    assert (ms.status().hibernated, used_bytes()) == (True, 0)
    assert ms.release(hibernate=True).released_bytes == 0  # a repeat is success
    assert phases(ms.resume(["workspace"]))[0] == "wake"
    assert (ms.status().hibernated, used_bytes()) == (False, before)
    assert kept.is_intact()


def test_what_is_asked_for_meanwhile_waits(kept: Kept) -> None:
    ms.release(hibernate=True)
    with ThreadPoolExecutor(1) as pool:

        def allocate() -> torch.Tensor:
            with ms.region(kept.tag, restore="host"):
                return torch.ones(10)

        waiting = pool.submit(allocate)
        assert ms.status().hibernated
        assert not waiting.done()
        ms.resume()
        assert float(waiting.result().sum()) == 10
    assert kept.is_intact()


@pytest.mark.guards("freeing a released tensor released its memory twice")
def test_what_is_freed_meanwhile_does_not_come_back(kept: Kept) -> None:
    with ms.region(kept.tag, restore="host"):
        passing = torch.ones(MIB)
    before = used_bytes()
    ms.release(["workspace"], hibernate=True)
    del passing
    ms.resume()
    assert used_bytes() == before - 4 * MIB
    assert kept.is_intact()


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_a_failed_hibernation_is_undone(kept: Kept, step: str) -> None:
    """The tags are released as far as the release got; the process runs on, and repeat and resume both work."""
    injection.fail_step(step)
    with pytest.raises(ms.DriverError, match=f"{step} failed: INJECTED; the process runs on as before") as raised:
        ms.release([kept.tag], hibernate=True)
    assert (raised.value.call, raised.value.code) == (step, "INJECTED")
    assert (ms.status().state, ms.status().hibernated) == ("released", False)
    ms.release([kept.tag], hibernate=True)
    assert ms.status().hibernated
    ms.resume()
    assert kept.is_intact()


def test_an_undo_that_fails_is_done_again(kept: Kept) -> None:
    """A failed hibernation never leaves the process locked."""
    injection.fail_step("checkpoint")
    injection.fail_step("unlock")
    with pytest.raises(ms.DriverError, match="runs on as before"):
        ms.release(hibernate=True)
    assert not ms.status().hibernated
    ms.resume()
    assert kept.is_intact()


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_a_failed_restore_leaves_it_hibernated(kept: Kept) -> None:
    """Nothing is lost, and the resume can be repeated."""
    ms.release(hibernate=True)
    injection.fail_step("restore", times=2)
    for _ in range(2):
        with pytest.raises(ms.DriverError, match="restore failed: INJECTED; the process is still hibernated"):
            ms.resume()
        assert (ms.status().state, ms.status().hibernated) == ("released", True)
    ms.resume()
    assert kept.is_intact()


def test_a_failed_unlock_is_done_again(kept: Kept) -> None:
    ms.release(hibernate=True)
    injection.fail_step("unlock")
    report = ms.resume()
    assert report.phases[0].details["unlock_repeats"] == 1
    assert kept.is_intact()
    ms.release(hibernate=True)
    injection.fail_step("unlock", times=2)
    with pytest.raises(ms.DriverError, match="its calls still wait; resume again"):
        ms.resume()
    assert ms.status().hibernated
    ms.resume()
    assert kept.is_intact()


def helper_pid() -> int | None:
    """Return the process id of the helper; None if it has ended."""
    running = hibernation.this_process._helper
    return running.pid if running is not None and running.alive else None


def test_a_killed_helper_is_replaced(kept: Kept) -> None:
    """The driver, not the helper, knows what is hibernated."""
    ms.release(hibernate=True)
    helper = helper_pid()
    assert helper is not None
    os.kill(helper, signal.SIGKILL)
    os.waitid(os.P_PID, helper, os.WEXITED | os.WNOWAIT)
    ms.resume()
    assert helper_pid() not in (None, helper)
    assert kept.is_intact()


@pytest.mark.parametrize("step", ["hibernate", "wake"])
@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_helper_that_hangs_is_replaced(kept: Kept, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """The wait is bounded, the error names the step, the reported state is true, and a repeat works."""
    calls = {"hibernate": lambda: ms.release(["workspace"], hibernate=True), "wake": ms.resume}
    calls["hibernate"]()
    if step == "hibernate":
        ms.resume()
    asked = {"hibernate": "lock", "wake": "restore"}[step]
    pid = helper_pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    told = f"process {pid}\\) did not answer for 0.2 s during '{asked}'; repeat"
    with monkeypatch.context() as patched:
        patched.setattr(helper, "STEP_S", 0.2)
        with pytest.raises(ms.MemsaverError, match=told):
            calls[step]()
    assert ms.status().hibernated is (step == "wake")
    assert (used_bytes() == 0) is (step == "wake")
    assert helper_pid() not in (None, pid)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    calls[step]()
    ms.resume()
    assert kept.is_intact()


@pytest.mark.guards("checkpointing one rank of several hung the next one")
def test_each_step_is_taken_alone_and_a_repeat_does_nothing(kept: Kept) -> None:
    """While locked, the process holds its memory and allocations wait; the checkpoint gives the memory back."""
    before = used_bytes()

    def allocate() -> torch.Tensor:
        with ms.region(kept.tag, restore="host"):
            return torch.ones(10)

    assert set(hibernation.lock()) == {"lock_seconds"}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(allocate)
        assert (hibernation.lock(), used_bytes(), ms.status().hibernated) == ({}, before, True)
        assert set(hibernation.checkpoint()) == {"checkpoint_seconds"}
        assert (hibernation.lock(), hibernation.checkpoint(), used_bytes()) == ({}, {}, 0)
        assert set(hibernation.restore()) == {"restore_seconds"}
        assert (hibernation.restore(), used_bytes(), ms.status().hibernated) == ({}, before, True)
        assert not waiting.done()
        assert set(hibernation.unlock()) == {"unlock_seconds"}
        assert float(waiting.result().sum()) == 10
    assert (hibernation.unlock(), hibernation.restore(), ms.status().hibernated) == ({}, {}, False)
    assert kept.is_intact()


@pytest.mark.parametrize("step", ["lock", "checkpoint", "restore", "unlock"])
@pytest.mark.guards("checkpointing one rank of several hung the next one")
def test_a_step_that_fails_leaves_the_state_before_it(kept: Kept, step: str) -> None:
    """So the steps before it can be undone, in reverse order, and the failed one can be repeated."""
    steps = ["lock", "checkpoint", "restore", "unlock"]
    before = used_bytes()
    held = {"lock": before, "checkpoint": before, "restore": 0, "unlock": before}[step]
    for earlier in steps[: steps.index(step)]:
        getattr(hibernation, earlier)()
    injection.fail_step(step, times=2)
    with pytest.raises(ms.DriverError, match=f"{step} failed: INJECTED"):
        getattr(hibernation, step)()
    if step != "unlock":  # of which the second fault met the repeat
        with pytest.raises(ms.DriverError, match=f"{step} failed: INJECTED"):
            getattr(hibernation, step)()
    assert (used_bytes(), ms.status().hibernated) == (held, step != "lock")
    getattr(hibernation, step)()
    assert hibernation.restore().keys() <= {"restore_seconds"}
    hibernation.unlock()
    assert (used_bytes(), ms.status().hibernated) == (before, False)
    assert kept.is_intact()


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
@pytest.mark.guards("checkpointing one rank of several hung the next one")
def test_a_step_that_failed_after_it_was_done_is_undone(kept: Kept, step: str) -> None:
    """The driver, not the answer, tells what was done."""
    before = used_bytes()
    if step == "checkpoint":
        hibernation.lock()
    injection.fail_step(step, after=True)
    with pytest.raises(ms.DriverError, match=f"{step} failed: INJECTED"):
        getattr(hibernation, step)()
    assert (used_bytes(), ms.status().hibernated) == (before, step == "checkpoint")
    hibernation.unlock()
    assert kept.is_intact()


def test_steps_in_a_wrong_order_are_refused(kept: Kept) -> None:
    with pytest.raises(ms.DriverError, match="checkpoint failed: ILLEGAL_STATE; the process runs on as before"):
        hibernation.checkpoint()
    hibernation.lock()
    hibernation.checkpoint()
    with pytest.raises(ms.DriverError, match="unlock failed: ILLEGAL_STATE; the process is still hibernated"):
        hibernation.unlock()
    hibernation.restore()
    hibernation.unlock()
    assert kept.is_intact()


def test_each_step_of_a_trim_has_its_own_delta() -> None:
    trims = ["trim_workspaces", "empty_cache", "trim_graphs", "trim_pinned"]
    report = ms.release(["workspace"], trim=True)
    found = [phase for phase in report.phases if phase.name in trims]
    assert [phase.name for phase in found] == trims
    assert all(len(phase.devices) == len(report.devices) for phase in found)
    assert not [name for name in phases(ms.release(["workspace"])) if name.startswith("trim")]
    ms.release(hibernate=True, trim=False)
    assert not [name for name in phases(ms.resume()) if name.startswith("trim")]


# Tests in a child process.

SETUP = textwrap.dedent(
    """
    import os, signal, subprocess, sys
    import torch
    import memsaver_core as ms
    from memsaver_core import hibernation
    from tests import forks
    from tests.native import injection

    with ms.region("weights"):
        weights = torch.ones(1 << 20)
    """
)


def program(code: str) -> str:
    return SETUP + textwrap.dedent(code)


def settings(**changes: str) -> dict[str, str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MEMSAVER_")}
    return {**inherited, "MEMSAVER_DRIVER": "host", **injection.in_child(), **changes}


def run(code: str, **changes: str) -> str:
    return output_of(program(code), inherited=settings(**changes))


def test_a_process_that_cannot_be_restored_is_failed() -> None:
    told = run(
        """
        ms.release(hibernate=True)
        injection.fail_step("restore", lost=True)
        for call in (ms.resume, ms.resume, ms.release, lambda: ms.release(hibernate=True)):
            try:
                call()
            except ms.ContextLostError as error:
                print(error)
        print(ms.status().state, ms.status().failure)
        print(ms.hibernation_obstacles())
        os._exit(0)
        """
    ).splitlines()
    assert len(told) == 6
    assert all("cannot restore this process; restart it" in line for line in told)
    assert told[4].startswith("failed ")


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_a_wake_needs_the_memory_that_a_co_tenant_took() -> None:
    """Out of memory with figures; after the co-tenant ends, the same call works."""
    name = f"hibernated-{uuid.uuid4().hex[:8]}"
    told = run(
        """
        ms.release(["kv_cache"], hibernate=True)
        code = "import sys, torch, memsaver_core as ms\\nwith ms.region('theirs'): t = torch.ones(3 << 18)\\n"
        code += "print('has it', flush=True); sys.stdin.read()"
        other = forks.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdout.readline() == "has it\\n"
        try:
            ms.resume()
        except ms.OutOfDeviceMemoryError as error:
            print(error.needed_bytes, error.free_bytes, error.device, ms.status().hibernated, error)
        other.communicate()
        ms.resume()
        print(float(weights.sum()))
        """,
        MEMSAVER_HOST_DEVICE=name,
        MEMSAVER_HOST_CAPACITY=str(6 * MIB),
    ).splitlines()
    assert told[0].startswith(f"{4 * MIB} {3 * MIB} 0 True restore failed: OUT_OF_MEMORY")
    assert "still hibernated: free device memory and repeat the call" in told[0]
    assert told[1] == str(float(MIB))


@pytest.mark.guards("a process was killed in the middle of an operation")
def test_a_killed_engine_leaves_nothing_behind() -> None:
    """The helper ends with it, and its device memory is free."""
    name = f"hibernated-{uuid.uuid4().hex[:8]}"
    changes = {"MEMSAVER_HOST_DEVICE": name, "MEMSAVER_HOST_CAPACITY": str(6 * MIB)}
    code = """
        ms.release(["kv_cache"], hibernate=True)
        print(hibernation.this_process._helper.pid, flush=True)
        sys.stdin.read()
        """
    with Child("-c", program(code), inherited=settings(**changes)) as engine:
        helper = os.pidfd_open(int(engine.read_line()))
        engine.kill()
    with os.fdopen(helper):
        import select

        assert select.select([helper], [], [], 600)[0], "the helper outlived its engine"
    assert run("print(ms.read_devices()[0].used_bytes)", **changes).split() == [str(4 * MIB)]


def test_the_product_has_no_faults() -> None:
    """Only the tests' module fails on request: neither a driver nor the helper of the product does."""
    told = run(
        """
        from memsaver_core import process
        print([name for name in ("fail", "delay", "heal", "counts") if hasattr(process.saver(), name)])
        injection.fail_step("lock")
        ms.release(hibernate=True)
        print(ms.status().hibernated)
        os.remove(hibernation.helper.PATH.with_name(f"step-faults.{os.getpid()}"))
        """,
        TESTS_NATIVE_MODULE="",
    )
    assert told.splitlines() == ["[]", "True"]
