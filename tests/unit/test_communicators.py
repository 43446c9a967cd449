"""NCCL communicators, on a library with NCCL's functions whose ranks really wait for each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import memsaver_core as ms
from tests.native import nccl
from tests.native.nccl import PERSISTENT_BYTES, SUSPENDABLE_BYTES, Ranks
from tests.programs import output_of

pytestmark = pytest.mark.timeout(1200)  # it may have to wait until tests of another folder have built the library

RESIDENT = "[device.process_bytes for device in ms.read_devices()][0]"
COUNTED = (
    "[(each.name, each.rank, each.suspendable_bytes, each.suspended_bytes, each.persistent_bytes, each.suspended) "
    "for each in communicators.found()]"
)


@pytest.fixture(scope="module")
def started_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with nccl.started(2, tmp_path_factory.mktemp("pair"), names=("tp", "pp"), MEMSAVER_DRIVER="host") as ranks:
        yield ranks


@pytest.fixture
def pair(started_pair: Ranks) -> Iterator[Ranks]:
    yield started_pair
    assert started_pair.ask("communicators.resume()") == ["None"] * 2


def values(answers: list[str]) -> list[Any]:
    return [ast.literal_eval(answer) for answer in answers]


@pytest.mark.guards("idle NCCL communicators held gigabytes while the engine slept")
def test_all_ranks_suspend_and_resume(pair: Ranks) -> None:
    """The bytes are counted by NCCL, and gone from the process."""
    for call in ("suspend", "resume"):  # the first calls load code, which is resident memory as well
        pair.ask(f"communicators.{call}()")
    [before] = values(pair.ask(RESIDENT, [0]))
    for rank, counted in enumerate(values(pair.ask(COUNTED))):
        assert counted == [(name, rank, SUSPENDABLE_BYTES, 0, PERSISTENT_BYTES, False) for name in ("tp", "pp")]
    freed = {"tp": SUSPENDABLE_BYTES, "pp": SUSPENDABLE_BYTES}
    assert values(pair.ask("communicators.usable()")) == [True, True]
    assert values(pair.ask("communicators.suspend()")) == [freed, freed]
    assert values(pair.ask("communicators.usable()")) == [False, False]
    for rank, counted in enumerate(values(pair.ask(COUNTED))):
        assert counted == [(name, rank, 0, SUSPENDABLE_BYTES, PERSISTENT_BYTES, True) for name in ("tp", "pp")]
    [asleep] = values(pair.ask(RESIDENT, [0]))
    assert before - asleep >= 1.9 * SUSPENDABLE_BYTES
    assert values(pair.ask("communicators.suspend()")) == [{}, {}]  # a repeat is success
    assert pair.ask("communicators.resume()") == ["None", "None"]
    [awake] = values(pair.ask(RESIDENT, [0]))
    assert awake - asleep >= 1.9 * SUSPENDABLE_BYTES
    assert values(pair.ask("communicators.usable()")) == [True, True]
    assert pair.ask("communicators.resume()") == ["None", "None"]


def test_they_are_a_tag_of_the_status(pair: Ranks) -> None:
    """Restored as they were, so their policy is shown as ``host``; the status has what was counted last."""
    tag = "[(t.tag, t.restore, t.state, t.bytes, t.resident_bytes, t.released_bytes) for t in ms.status().tags]"
    pair.ask("communicators.found()")
    both = 2 * SUSPENDABLE_BYTES
    assert values(pair.ask(tag)) == [[("communicators", "host", "resident", both, both, 0)]] * 2
    assert pair.ask("ms.status().state") == ["'resident'"] * 2
    pair.ask("communicators.suspend()")
    assert values(pair.ask(tag)) == [[("communicators", "host", "released", both, 0, both)]] * 2
    assert pair.ask("ms.status().state") == ["'released'"] * 2


def test_one_rank_alone_does_not_suspend_them(pair: Ranks) -> None:
    [said] = pair.ask("ms.release_with(ms.MemoryRequest(communicators='suspend'))", [0])
    assert "UnsupportedError" in said
    assert "communicators.suspend() in the process of each" in said
    assert pair.ask("ms.status().state") == ["'resident'"] * 2


def test_names_choose(pair: Ranks) -> None:
    assert values(pair.ask("communicators.suspend(['pp'])")) == [{"pp": SUSPENDABLE_BYTES}] * 2
    assert values(pair.ask("[each.suspended for each in communicators.statuses()]")) == [[False, True]] * 2
    assert pair.ask("communicators.resume(['pp', 'tp'])") == ["None"] * 2
    assert pair.ask("communicators.suspend(['dp'])", [0]) == [
        "UnsupportedError: this process has no communicator 'dp'; nothing was done"
    ]


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_rank_that_does_not_come_is_told(pair: Ranks) -> None:
    """The call ends at its deadline and names the communicator. When the rank comes after all, all of them can go
    back."""
    late = "MemsaverError: the suspend of communicator tp has not returned: another rank has not called it"
    [told] = pair.ask("communicators.suspend(timeout_s=0.3)", [0])
    assert told.startswith(late)
    [told] = pair.ask("communicators.found()[0].obstacle", [0])
    assert "has not returned" in told
    [told] = pair.ask("communicators.resume(timeout_s=0.1)", [0])
    assert told.startswith(late)
    assert values(pair.ask("communicators.suspend(['tp'])", [1])) == [{"tp": SUSPENDABLE_BYTES}]
    [told] = pair.ask("communicators.resume(['tp'], timeout_s=0.1)", [0])
    assert "the suspend of communicator pp has not returned" in told
    assert values(pair.ask("communicators.suspend(['pp'])", [1])) == [{"pp": SUSPENDABLE_BYTES}]
    assert pair.ask("communicators.resume()") == ["None", "None"]
    assert values(pair.ask("[each.suspended for each in communicators.found()]")) == [[False, False]] * 2


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_rank_that_died_is_told(tmp_path: Path) -> None:
    with nccl.started(2, tmp_path, MEMSAVER_DRIVER="host") as ranks:
        ranks.children[1].kill()
        [told] = ranks.ask("communicators.suspend(timeout_s=0.3)", [0])
        assert "the suspend of communicator tp has not returned" in told
        assert ranks.ask("ms.status().state", [0]) == ["'resident'"]


def test_an_error_of_nccl_names_the_communicator(pair: Ranks) -> None:
    """What was suspended before it can be resumed, by all ranks."""
    pair.ask("fail(comms['pp'], 'suspend', 5)")
    told = pair.ask("communicators.suspend()")
    expected = "MemsaverError: the suspend of communicator pp failed: ncclCommSuspend failed: invalid usage"
    assert told == [expected] * 2
    assert values(pair.ask("[each.suspended for each in communicators.found()]")) == [[True, False]] * 2
    assert pair.ask("communicators.resume()") == ["None"] * 2
    assert values(pair.ask("communicators.suspend()")) == [{"tp": SUSPENDABLE_BYTES, "pp": SUSPENDABLE_BYTES}] * 2


@pytest.mark.parametrize(
    ("version", "environment", "obstacle"),
    [
        (22809, {}, "NCCL 2.28.9 can neither suspend nor count it, so what it holds stays; install NCCL 2.29.7"),
        (23007, {"NCCL_CUMEM_ENABLE": "0"}, "NCCL_CUMEM_ENABLE=0, so what it holds stays; start the engine"),
        (23007, {"MEMSAVER_COMMUNICATORS": "off"}, "MEMSAVER_COMMUNICATORS=off; unset it"),
    ],
)
@pytest.mark.guards("idle NCCL communicators held gigabytes while the engine slept")
def test_what_prevents_it_is_told_with_what_to_do(
    tmp_path: Path, version: int, environment: dict[str, str], obstacle: str
) -> None:
    """Nothing is entered, so no rank waits for another."""
    with nccl.started(2, tmp_path, version=version, MEMSAVER_DRIVER="host", **environment) as ranks:
        [told] = ranks.ask("communicators.found()[0].obstacle", [0])
        assert told.startswith(f"'{obstacle}")
        [told] = ranks.ask("communicators.suspend(['tp'])", [0])
        assert told.startswith(f"UnsupportedError: communicator tp: {obstacle}")
        assert told.endswith("nothing was suspended")
        assert ranks.ask("communicators.suspend()", [0]) == ["{}"]


@pytest.mark.parametrize(("suspended", "failed"), [(True, False), (False, True), (False, False)])
def test_a_service_does_not_wait_at_its_end_for_what_is_suspended_or_dead(
    tmp_path: Path, suspended: bool, failed: bool
) -> None:
    """The interpreter's end, which takes NCCL down, is passed over; without need it is not."""
    with nccl.started(2, tmp_path, MEMSAVER_DRIVER="host") as ranks:
        ranks.ask("__import__('atexit').register(__import__('time').sleep, 600)", [0])
        if suspended:
            ranks.ask("communicators.suspend()")
        end = f"__import__('importlib').import_module('memsaver_server.cli.serving').end_at_once(failed={failed})"
        if suspended or failed:
            assert ranks.ask(end, [0]) == [""]
            assert ranks.children[0].process.wait(600) == 0
        else:
            assert ranks.ask(end, [0]) == ["None"]


def test_one_rank_alone_shares_nothing(tmp_path: Path) -> None:
    with nccl.started(1, tmp_path, MEMSAVER_DRIVER="host") as ranks:
        assert ranks.ask("communicators.found()") == ["()"]


def test_a_name_is_taken_once_and_freed(pair: Ranks) -> None:
    again = "communicators.register('pp', comms['pp'], ranks=2, rank=0)"
    [told] = pair.ask(again, [0])
    assert told.startswith("ConfigurationError: a communicator 'pp' is registered already")
    pair.ask("communicators.unregister('pp')", [0])
    assert values(pair.ask("[each.name for each in communicators.found()]", [0])) == [["tp"]]
    assert pair.ask(again, [0]) == ["None"]


@pytest.mark.guards("checkpointing one rank of several hung the next one")
def test_ranks_hibernate_in_step(tmp_path: Path) -> None:
    """Every step on all ranks before the next. While a communicator holds memory, a rank refuses the first step."""
    used = "[device.used_bytes for device in ms.read_devices()][0]"
    with nccl.started(2, tmp_path, MEMSAVER_DRIVER="host") as ranks:
        for told in ranks.ask("hibernation.lock()"):
            assert told.startswith("UnsupportedError: this process cannot be hibernated: communicator tp is alive")
        assert ranks.ask("hibernation.obstacles(suspending=True)") == ["[]"] * 2
        ranks.ask("globals().update(ones=ms.adopt(torch.ones(1 << 20), 'weights', restore='host'))")
        before = values(ranks.ask(used))
        assert all(size >= 4 << 20 for size in before)
        for _ in range(10):
            for step in ("communicators.suspend()", "hibernation.lock()", "hibernation.checkpoint()"):
                assert not [answer for answer in ranks.ask(step) if "Error" in answer]
            assert values(ranks.ask(used)) == [0, 0]
            for step in ("hibernation.restore()", "hibernation.unlock()", "communicators.resume()"):
                assert not [answer for answer in ranks.ask(step) if "Error" in answer]
            assert values(ranks.ask(used)) == before
        assert ranks.ask("float(ones.sum())") == [str(float(1 << 20))] * 2


ENGINES = """
import types
import torch.distributed.distributed_c10d as c10d
from memsaver_core import communicators

class Backend:
    def __init__(self, comm):
        self._comm_ptr = lambda: comm

class Group:  # of torch's processes, or of vLLM's or SGLang's parallel_state
    def __init__(self, size=1, comm=0, **parts):
        self.size, self.rank = lambda: size, lambda: 0
        self.ranks, self.unique_name = [0, 1], "tp:0"
        self._get_backend = lambda device: Backend(comm)
        vars(self).update(parts)

class PyNccl:
    available, world_size, rank = True, 2, 0
    device, nccl = types.SimpleNamespace(index=None), types.SimpleNamespace(lib=library)
    def __init__(self, comm):
        self.comm = ctypes.c_void_p(comm)

def joined(name):
    return join(f"{folder}/{name}", 2, rank)

used, lazy, alone, gloo = Group(2, joined("used")), Group(2), Group(1, 7), Group(2)
groups = {used: "0", lazy: "1", alone: "2", gloo: "3"}
c10d._world = types.SimpleNamespace(
    pg_map=dict.fromkeys(groups), pg_names=groups,
    pg_backend_config={group: "cpu:gloo" if group is gloo else "cuda:nccl" for group in groups},
)
torch.distributed.get_process_group_ranks = lambda group: list(range(group.size()))
in_vllm = Group(device_communicator=types.SimpleNamespace(pynccl_comm=PyNccl(joined("vllm"))))
off = Group(device_communicator=types.SimpleNamespace(pynccl_comm=types.SimpleNamespace(available=False)))
in_sglang = Group(pynccl_comm=PyNccl(joined("sglang")))
for module, present in (("vllm", [in_vllm, off]), ("sglang.srt", [in_sglang])):
    references = {number: (lambda group=group: group) for number, group in enumerate(present)}
    state = types.SimpleNamespace(_groups=references | {"ended": lambda: None})
    sys.modules[f"{module}.distributed.parallel_state"] = state
"""


def test_those_of_engines_are_found(tmp_path: Path) -> None:
    """By torch's, vLLM's and SGLang's names, on real communicators: all are suspended and come back.

    A group that has not communicated yet has no communicator, and none is made.
    """
    code = nccl.prelude() + "import sys, torch\nfolder, rank = sys.argv[1], int(sys.argv[2])\n" + ENGINES
    code += "print([each.name for each in communicators.found()])\n"
    code += "print(communicators.suspend())\ncommunicators.resume()\n"
    code += "print([each.suspended for each in communicators.found()])\n"
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda rank: output_of(code, str(tmp_path), rank, MEMSAVER_DRIVER="host"), "01"))
    names = ["torch:0:0,1", "vllm:tp:0:0,1", "sglang:tp:0:0,1"]
    expected = [names, dict.fromkeys(names, SUSPENDABLE_BYTES), [False] * 3]
    for told in both:
        assert [ast.literal_eval(line) for line in told.splitlines()] == expected


def test_regions_do_not_take_the_tag() -> None:
    with pytest.raises(ms.ConfigurationError, match="the tag 'communicators' is reserved for what NCCL holds"):
        ms.region("communicators")


def test_nothing_is_loaded_for_it() -> None:
    """A process without NCCL has none afterwards either."""
    code = "from memsaver_core.communicators import nccl\nprint(nccl.loaded(), nccl.loaded_paths())"
    assert output_of(code, by_itself=True) == "None ()\n"
