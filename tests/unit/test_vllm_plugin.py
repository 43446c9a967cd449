"""The vLLM plugin on the host driver: real memory in worker processes, behind vLLM's interfaces.

tests/gpu/test_vllm_gpu.py runs the same with vLLM itself.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Lock
from types import SimpleNamespace
from typing import Any

import pytest

from memsaver_core import PhaseLog
from memsaver_core.compat.vllm import allocator as config
from memsaver_core.compat.vllm import asleep
from memsaver_core.contract.errors import (
    ConfigurationError,
    DrainTimeoutError,
    DriverError,
    MemsaverError,
    NotResidentError,
    OutOfDeviceMemoryError,
    UnknownTagError,
    UnsupportedError,
)
from memsaver_core.contract.policies import RestorePolicy
from memsaver_core.contract.requests import MemoryRequest, Tagged
from memsaver_core.ranks.protocol import (
    ANSWERS,
    REQUESTS,
    VERSION,
    Answer,
    ExpectRelease,
    Failure,
    Introduce,
    Move,
    Plain,
    Request,
    TakeOutcome,
)
from memsaver_core.rendezvous import started
from memsaver_server.integrations.vllm.engine import VllmMemory
from tests import forks
from tests.native import injection
from tests.programs import output_of
from tests.waiting import wait_until

STANDIN = Path(__file__).parents[1] / "data" / "vllm_standin"
ALL = {"weights", "kv_cache", "runtime", "workspace"}

# -- a worker in its own process ---------------------------------------------------------------------------------------


class Model:
    """What a test asks about the worker's tensors."""

    def __init__(self) -> None:
        from memsaver_core.compat.vllm.plugin import register

        register()
        register()
        from vllm.v1.worker.gpu_worker import Worker

        model_config = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="cumem", quantization=None)
        parallel_config = SimpleNamespace(local_world_size=2)
        self.worker = Worker(SimpleNamespace(model_config=model_config, parallel_config=parallel_config))
        self.worker.init_device()
        self.worker.load_model()
        self.worker.initialize_from_config(3)
        assert self.worker.compile_or_warm_up_model() == "warm"
        self.weights = self.worker.model_runner.model.weight.detach().clone()

    def tags(self) -> dict[str, tuple[str, int]]:
        import memsaver_core as ms

        return {tag.tag: (tag.restore, tag.released_bytes) for tag in ms.status().tags}

    def allocations(self) -> dict[str, int]:
        import memsaver_core as ms

        return {tag.tag: tag.allocations for tag in ms.status().tags}

    def content(self) -> dict[str, bool]:
        """Whether the tensors are as after the start. Ask only for resident ones."""
        runner = self.worker.model_runner
        return {
            "weights": bool((runner.model.weight == self.weights).all()),
            "buffers": bool((runner.model.scale == 2.5).all()),
            "kept parameters": bool((runner.model.kept == 3.5).all()),
            "kv_cache": all(bool((cache == 7).all()) for cache in runner.kv_caches),
            "kv_cache_zero": all(bool((cache == 0).all()) for cache in runner.kv_caches),
            "draft": bool((runner.draft_scale == 5).all()),
            "runtime": bool((runner.positions == runner.block_table).all() and runner.positions[-1] == 65535),
        }

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self.worker, name)(*arguments)

    def weight(self) -> list[float]:
        """The values of the weights. Ask only for resident ones."""
        return sorted(set(self.worker.model_runner.get_model().weight.flatten().tolist()))

    def quantize(self, format: str | None) -> None:
        self.worker.vllm_config.model_config.quantization = format

    def attend_by_mla(self, use: bool) -> None:
        self.worker.vllm_config.model_config.use_mla = use

    def write_weights(self) -> None:
        self.worker.model_runner.model.weight.data.copy_(self.weights)

    def start_again(self) -> None:
        """Restore the state after the start."""
        from vllm.v1.worker.gpu_model_runner import BLOCKS

        from memsaver_core import process
        from memsaver_core.compat.vllm import cache_memory

        process.saver().heal()
        self.have_host_memory(False)
        self.worker.wake_up()
        cache_memory.resize(self.worker.model_runner, BLOCKS)
        self.write_weights()
        self.worker.model_runner.model.scale.fill_(2.5)
        self.worker.model_runner.model.kept.data.fill_(3.5)
        self.worker.model_runner.draft_scale.fill_(5)
        for cache in self.worker.model_runner.kv_caches:
            cache.fill_(7)
        self.worker.model_runner.woken = 0

    def cache(self, blocks: int) -> dict[str, Any]:
        """What the first ``blocks`` blocks of each layer have, what the device has, and the blocks in the tables."""
        import memsaver_core as ms

        runner = self.worker.model_runner
        [table] = runner.input_batch.block_table.block_tables
        return {
            "values": [sorted(set(cache[:blocks].flatten().tolist())) for cache in runner.kv_caches],
            "used": ms.read_devices()[0].used_bytes,
            "tables": [table.block_table.cpu.tolist(), table.block_table.gpu.tolist()],
        }

    def woken(self) -> int:
        return int(self.worker.model_runner.woken)

    def fail(self, call: str, kind: str, times: int) -> None:
        from memsaver_core import process

        process.saver().fail(call, kind=kind, times=times)

    def delay(self, call: str, seconds: float) -> None:
        from memsaver_core import process

        process.saver().delay(call, seconds)

    def have_host_memory(self, only: bool) -> None:
        """Whether the device has no memory but the host's."""
        from memsaver_core import process

        process.backend().has_host_memory = lambda _index: only  # type: ignore[method-assign]

    def arm(self, step: str, kind: str, after: bool) -> None:
        """Fail once at ``step``, a message or vLLM's own sleep: before or after it took effect."""
        from memsaver_core.compat.vllm import plugin

        backend = self.worker._get_sleep_mode_backend()
        owner, name = (backend, "suspend") if step == "sleep" else (plugin._rank, "carry_out")
        call = getattr(owner, name)

        def faulty(request: Any) -> Any:
            if step not in ("sleep", type(request).__name__):
                return call(request)
            delattr(owner, name)
            if after:
                call(request)
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "hang":
                Event().wait()
            raise DriverError("this rank was made to fail", call="test")

        setattr(owner, name, faulty)

    def answer(self, message: Plain) -> Plain:
        answer: Plain = self.worker.memsaver(message)
        return answer

    def sleep(self, level: int) -> None:
        self.worker.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.worker.wake_up(tags)


def serve() -> None:
    """The main function of a worker process: executes commands from standard input, a socket, until it closes."""
    connection = Connection(os.dup(0))
    sys.path.insert(0, str(STANDIN))
    model = Model()
    connection.send(None)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((getattr(model, name)(*arguments), None))
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {error}"))


class Rank:
    """A worker as its executor sees it. Its calls are those of ``Model``, one at a time."""

    def __init__(self, **environment: str) -> None:
        settings = {"MEMSAVER_DRIVER": "host", "MEMSAVER_VLLM": "1", **environment}
        self._alone = Lock()
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", f"from {__name__} import serve; serve()"]
        self._process = forks.Popen(command, env={**os.environ, **settings, **injection.in_child()}, stdin=theirs)
        theirs.close()
        self._connection = Connection(ours.detach())

    def wait(self) -> None:
        """Return once it is loaded."""
        assert self._connection.poll(600)
        self._connection.recv()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            with self._alone:
                self._connection.send((name, arguments))
                result, error = self._connection.recv()
            if error is not None:
                raise RuntimeError(error)
            return result

        return call

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        self._connection.close()
        self._process.wait(600)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(600)


class Executor:
    """Calls its ranks as vLLM's executor does, with plain data; like that, it ignores a second sleep."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = ranks
        self.is_sleeping = False
        self.levels: list[int] = []  # of each call of ``sleep``

    def call(self, message: Plain) -> list[Plain]:
        plain = json.dumps(message)
        answers: list[Plain] = self._each(lambda rank: json.loads(json.dumps(rank.answer(json.loads(plain)))))
        return answers

    def put_to_sleep(self, level: int) -> None:
        if not self.is_sleeping:
            self._each(lambda rank: rank.sleep(level))
        self.is_sleeping = True

    def _each(self, call: Callable[[Rank], Any]) -> list[Any]:
        """Call all ranks at once."""
        return [future.result() for future in [started(partial(call, rank)) for rank in self.ranks]]

    def start(self, message: Plain, dp_ranks: Sequence[int] = ()) -> Future[list[Plain]]:
        return started(lambda: self.call(message))

    def sleep(self, level: int, dp_ranks: Sequence[int] = ()) -> Future[None]:
        self.levels.append(level)
        return started(lambda: self.put_to_sleep(level))


@contextmanager
def two_workers(**environment: str) -> Iterator[list[Rank]]:
    """Each on its own device."""
    ranks = [Rank(MEMSAVER_HOST_DEVICE=f"rank{number}-{os.getpid()}", **environment) for number in range(2)]
    for each in ranks:
        each.wait()
    yield ranks
    for each in ranks:
        each.close()


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Rank]]:
    with two_workers() as ranks:
        yield ranks


@pytest.fixture
def group(workers: list[Rank]) -> list[Rank]:
    for each in workers:
        each.start_again()
    return workers


@pytest.fixture
def rank(group: list[Rank]) -> Rank:
    return group[0]


def ask(rank: Rank, request: Request) -> Answer:
    return ANSWERS.decode(rank.answer(REQUESTS.encode(request)))


def released(rank: Rank) -> set[str]:
    return {tag for tag, (_, size) in rank.tags().items() if size}


# -- the plugin --------------------------------------------------------------------------------------------------------


def run(code: str, *, by_itself: bool = False, **environment: str) -> str:
    paths = [str(STANDIN), str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "server")]
    settings = {"PYTHONPATH": os.pathsep.join(paths), "MEMSAVER_DRIVER": "host", **environment}
    return output_of(code, by_itself=by_itself, **settings).strip()


REGISTER = "from memsaver_core.compat.vllm.plugin import register; register(); register(); import sys\n"
MAKE = """
from types import SimpleNamespace
from vllm.v1.worker.gpu_worker import Worker
from vllm.device_allocator import get_mem_allocator_instance
config = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="cumem")
worker = Worker(SimpleNamespace(model_config=config))
print(type(get_mem_allocator_instance()).__name__)
"""


def test_messages_are_in_vllms_log() -> None:
    """vLLM's server imports a package that has the root logger write errors alone. The audit log stays apart."""
    code = "import logging; logging.root.setLevel(logging.ERROR); import vllm.logger\n" + REGISTER
    code += 'for name in ("memsaver", "memsaver.audit"): logging.getLogger(name).info(name)'
    assert run(code) == "memsaver"


def test_a_users_own_logging_stays() -> None:
    code = (
        "import logging, sys; logging.basicConfig(stream=sys.stdout, format='root: %(message)s', level=logging.INFO)\n"
    )
    code += f"logging.getLogger('memsaver').setLevel(logging.ERROR); import vllm.logger\n{REGISTER}"
    code += "logging.getLogger('memsaver').info('not heard'); logging.getLogger('memsaver').error('heard')"
    assert run(code) == "root: heard"


def test_registering_imports_nothing_of_vllm() -> None:
    code = REGISTER + "print([name for name in sys.modules if name.split('.')[0] == 'vllm'])"
    assert run(code, by_itself=True) == "[]"


@pytest.mark.parametrize(
    ("switch", "sleeping", "backend", "ours"),
    [
        ("1", True, "cumem", True),
        ("", True, "memsaver", True),
        ("", True, "cumem", False),
        ("0", True, "cumem", False),
        ("1", False, "cumem", False),
        ("1", True, "another", False),
    ],
)
def test_only_an_engine_that_is_set_up_so_sleeps_by_memsaver(
    monkeypatch: pytest.MonkeyPatch, switch: str, sleeping: bool, backend: str, ours: bool
) -> None:
    monkeypatch.setenv("MEMSAVER_VLLM", switch)
    model_config = SimpleNamespace(enable_sleep_mode=sleeping, sleep_mode_backend=backend)
    assert config.is_wanted(model_config) is ours


@pytest.mark.parametrize(
    ("environment", "allocator"),
    [
        ({"MEMSAVER_VLLM": "1"}, "MemsaverAllocator"),
        ({}, "CuMemAllocator"),
        ({"MEMSAVER_VLLM": "1", "MEMSAVER_ENABLED": "0"}, "CuMemAllocator"),
    ],
)
def test_the_allocator_is_vllms_own_unless_asked_for(environment: dict[str, str], allocator: str) -> None:
    assert run(REGISTER + MAKE, **environment) == allocator


def test_communicators_are_suspended_by_one_alone() -> None:
    """An option from 0.33 on has vLLM do so; without memsaver it is vLLM's own concern."""
    code = REGISTER + MAKE.replace(
        'sleep_mode_backend="cumem"', 'sleep_mode_backend="cumem", enable_nccl_comm_suspend=True'
    )
    assert run(code) == "CuMemAllocator"
    with pytest.raises(
        AssertionError, match=r"ConfigurationError: .* start the engine without --enable-nccl-comm-suspend"
    ):
        run(code, MEMSAVER_VLLM="1")


@pytest.mark.parametrize(("environment", "setting"), [({}, "0"), ({"NCCL_GRAPH_REGISTER": "1"}, "1")])
def test_nccl_registers_no_graphs_unless_the_user_says_so(environment: dict[str, str], setting: str) -> None:
    """What it has registered cannot be replayed after a resume; a warning says so."""
    code = """
import logging, os
import torch.distributed as dist
logging.basicConfig(stream=sys.stdout)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.get_backend_config = lambda: "cuda:nccl"
worker.init_device()
print("set:", os.environ["NCCL_GRAPH_REGISTER"])
"""
    printed = run(REGISTER + MAKE + code, MEMSAVER_VLLM="1", **environment)
    assert f"set: {setting}" in printed
    assert ("may hang on replay" in printed) == (setting == "1")


def test_a_backend_of_that_name_exists_without_the_switch() -> None:
    code = "from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory as Factory\n"
    code += "print(Factory.get_backend_class('memsaver').preserves_communicators())"
    assert run(REGISTER + code) == "True"


def test_a_switch_that_is_neither_on_nor_off_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSAVER_VLLM", "yes")
    with pytest.raises(ConfigurationError, match="MEMSAVER_VLLM"):
        config.switch()


def test_a_change_that_fails_leaves_the_module_as_it_is() -> None:
    code = """
from memsaver_core.compat.patching import when_imported
def patch(module):
    raise RuntimeError("no such thing")
when_imported("vllm.plugins", patch)
import vllm.plugins
print(vllm.plugins.load_endpoint_plugins(), type(vllm.plugins.__spec__.loader).__name__)
"""
    assert run(code) == "[] SourceFileLoader"


def test_what_is_imported_already_is_changed_at_once() -> None:
    code = """
import vllm.platforms.interface
from memsaver_core.compat.patching import when_imported
seen = []
when_imported("vllm.platforms.interface", lambda module: seen.append(module.__name__))
print(seen)
"""
    assert run(code) == "['vllm.platforms.interface']"


def test_a_process_group_of_one_does_not_stand_in_the_way_of_hibernation(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM creates NCCL groups for a single worker too."""
    import torch.distributed.distributed_c10d as c10d

    from memsaver_core import communicators

    class Group:
        def size(self) -> int:
            return 1

    groups = [Group()]
    world = SimpleNamespace(
        pg_map=dict.fromkeys(groups),
        pg_backend_config=dict.fromkeys(groups, "cuda:nccl"),
        pg_names=dict.fromkeys(groups, "tp"),
    )
    monkeypatch.setattr(c10d, "_world", world)
    assert communicators.found() == ()


# -- a worker ----------------------------------------------------------------------------------------------------------


@pytest.mark.guards("tensors were recorded under the wrong tag")
def test_each_kind_of_memory_is_under_its_tag(rank: Rank) -> None:
    """Attention metadata is allocated beside the cache, and is not released with it."""
    allocations = rank.allocations()
    assert set(allocations) == ALL
    assert allocations["kv_cache"] == 3
    policies = {tag: policy for tag, (policy, _) in rank.tags().items()}
    assert policies == {"weights": "host", "runtime": "host", "kv_cache": "zero", "workspace": "zero"}


@pytest.mark.guards("undefined KV cache pages produced NaN")
def test_level_1_keeps_all_but_the_cache(rank: Rank) -> None:
    """The cache comes back as zeros, not as undefined content."""
    rank.sleep(1)
    assert released(rank) == ALL
    rank.wake_up()
    assert rank.content() == {
        "weights": True,
        "buffers": True,
        "kept parameters": True,
        "kv_cache": False,
        "kv_cache_zero": True,
        "draft": True,
        "runtime": True,
    }
    assert rank.woken() == 1


def test_level_2_gives_the_weights_up_and_restores_buffers(rank: Rank) -> None:
    rank.sleep(2)
    rank.wake_up(["weights"])
    assert released(rank) == {"kv_cache"}
    rank.write_weights()
    rank.wake_up(["kv_cache"])
    content = rank.content()
    assert content["weights"]
    assert content["buffers"]
    assert content["runtime"]


@pytest.mark.guards("resuming everything failed on tags that were never released")
def test_after_level_2_the_cache_may_come_back_first(rank: Rank) -> None:
    """Buffers are written back once the weights are resident, never before."""
    rank.sleep(2)
    rank.wake_up(["kv_cache"])
    assert released(rank) == {"weights"}
    rank.wake_up(["weights"])
    rank.write_weights()
    content = rank.content()
    assert content["weights"]
    assert content["buffers"]
    assert content["draft"]


def test_openrlhf(rank: Rank) -> None:
    """Its engine sleeps from the start. Weights wake up alone for an update, and again with the cache for a rollout."""
    rank.sleep(1)
    for step in (1.0, 2.0):
        rank.wake_up(["weights"])
        assert released(rank) == {"kv_cache"}
        rank.call("reload_weights", step)
        for tag in ("weights", "kv_cache"):
            rank.wake_up([tag])
        assert released(rank) == set()
        assert rank.weight() == [step]
        content = rank.content()
        assert content["kv_cache_zero"]
        assert content["runtime"]
        rank.sleep(1)


@pytest.mark.guards("a second release or resume failed")
def test_sleeping_twice_and_waking_twice(rank: Rank) -> None:
    """The second call of each is success."""
    rank.sleep(1)
    rank.sleep(1)
    rank.wake_up()
    rank.wake_up()
    assert rank.content()["weights"]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("by_service", [False, True])
def test_on_a_device_without_memory_what_is_kept_stays(group: list[Rank], level: int, by_service: bool) -> None:
    for each in group:
        each.have_host_memory(True)
    memory = VllmMemory(Executor(group))
    if by_service:
        memory.release(MemoryRequest(restore={"weights": RestorePolicy.DISCARD} if level == 2 else {}))
    else:
        for each in group:
            each.sleep(level)
    gone = {"kv_cache", "workspace"} | ({"weights"} if level == 2 else set())
    assert [released(each) for each in group] == [gone, gone]
    if by_service:
        memory.resume(Tagged())
    for each in group:
        each.wake_up()
        content = each.content()
        assert content["runtime"]
        assert content["kv_cache_zero"]
        assert content["weights"] or level == 2


@pytest.mark.parametrize(
    ("restore", "levels"), [({}, [1]), ({"weights": RestorePolicy.DISCARD}, [1, 2])], ids=["kept", "discarded"]
)
def test_a_release_on_several_ranks_puts_vllm_to_sleep_once(
    group: list[Rank], restore: dict[str, RestorePolicy], levels: list[int]
) -> None:
    """Each time takes long with a large cache. Discarded weights need level 2, which empties a connector's tier."""
    executor = Executor(group)
    memory = VllmMemory(executor)
    memory.release(MemoryRequest(restore=restore))
    assert executor.levels == levels
    assert [released(each) for each in group] == [ALL, ALL]
    memory.resume(Tagged())


def test_a_second_sleep_at_level_2_leaves_released_weights_alone(rank: Rank) -> None:
    """It restores the buffers that the first one saved."""
    rank.sleep(2)
    rank.wake_up(["kv_cache"])
    rank.sleep(2)
    assert released(rank) == ALL
    rank.wake_up()
    assert rank.content()["buffers"]


def test_the_backend_refuses_levels_that_a_worker_cannot_return_from(rank: Rank) -> None:
    with pytest.raises(RuntimeError, match="UnsupportedError: sleep level 3"):
        rank.sleep(3)
    assert not released(rank)


def test_what_the_service_asks_for_is_released_and_no_more(rank: Rank) -> None:
    ask(rank, ExpectRelease(MemoryRequest(tags=("kv_cache",))))
    rank.sleep(1)
    assert released(rank) == {"kv_cache"}
    report = ask(rank, TakeOutcome()).report
    assert report is not None
    assert [tag.tag for tag in report.tags] == ["kv_cache"]
    assert ask(rank, TakeOutcome()).report is None
    status = ask(rank, Move("resume", MemoryRequest(tags=("kv_cache",)))).status
    assert status is not None
    assert status.state == "resident"


@pytest.mark.guards("one rank or device failed while the others went on")
def test_errors_are_answers(rank: Rank) -> None:
    """A rank that raised would leave vLLM's executor waiting for the answers of the others."""
    for name in ("Dance", "Resume"):  # unknown, and without its fields
        failure = ANSWERS.decode(rank.answer({"version": VERSION, "type": name, "fields": {}})).failure
        assert failure is not None
        assert failure.error == "ConfigurationError"


def test_another_version_of_the_protocol_is_refused(rank: Rank) -> None:
    """By the rank in an answer, and by the service when it reads one: the message says what to install."""
    failure = ANSWERS.decode(rank.answer({**REQUESTS.encode(Introduce()), "version": VERSION + 1})).failure
    assert failure is not None
    assert f"rank protocol {VERSION + 1}" in failure.message
    assert "install the same version" in failure.message
    for strange in (
        {},
        {"version": 0},
        {"version": VERSION},
        {"version": VERSION, "type": "Answer", "fields": {"a": 1}},
    ):
        with pytest.raises(ConfigurationError, match="rank protocol"):
            ANSWERS.decode(strange)


def test_errors_of_a_rank_are_the_errors_that_they_were() -> None:
    """Class, message and attributes cross as plain data; what is not memsaver's names its class."""
    error = Failure.of(OutOfDeviceMemoryError("too little", 5, 3, 1), "restore")
    answer = ANSWERS.decode(json.loads(json.dumps(ANSWERS.encode(Answer(status=None, failure=error)))))
    assert answer.failure == error
    again = error.to_error("rank 1: ")
    assert (type(again), str(again)) == (OutOfDeviceMemoryError, "rank 1: too little")
    assert vars(again) == {"needed_bytes": 5, "free_bytes": 3, "device": 1}
    assert str(Failure.of(ValueError("odd")).to_error()) == "ValueError: odd"
    late = DrainTimeoutError(0.5, ["a", "b"])
    answer = ANSWERS.decode(json.loads(json.dumps(ANSWERS.encode(Answer(status=None, failure=Failure.of(late))))))
    assert answer.failure is not None
    again = answer.failure.to_error()
    assert (type(again), str(again), again.details()) == (DrainTimeoutError, str(late), late.details())


# -- several ranks -----------------------------------------------------------------------------------------------------


def test_ranks_are_one_memory(group: list[Rank]) -> None:
    memory = VllmMemory(Executor(group))
    assert memory.enabled()
    assert {tag.tag for tag in memory.status().tags} == ALL
    assert [device.index for device in memory.read_devices()] == [0, 1]
    status = ask(group[0], Introduce()).status
    assert status is not None
    one = sum(tag.bytes for tag in status.tags)
    report = memory.release(MemoryRequest())
    assert report.released_bytes == 2 * one
    assert memory.status().state == "released"
    assert all(set(tag.mapped_by_device) <= {0, 1} for tag in memory.status().tags)
    assert all(tag.bytes_by_device == {0: tag.bytes // 2, 1: tag.bytes // 2} for tag in memory.status().tags)
    assert [phase.name for phase in report.phases].count("pause") == 2  # first what is kept, then what is not
    memory.resume(Tagged())
    assert memory.status().state == "resident"
    assert all(rank.content()["weights"] and rank.content()["runtime"] for rank in group)


class Core:
    """An engine core whose workers sleep."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="memsaver")
        )
        self.model_executor = SimpleNamespace(sleeping_tags={"weights", "kv_cache"})
        self.ranks = ranks

    def collective_rpc(self, method: str, *args: Any, of_rank_1: tuple[Any, ...] | None = None) -> Any:
        def call(_core: Any, name: str, _timeout: Any, given: tuple[Any, ...], kwargs: Any = None) -> list[Any]:
            first, second = self.ranks
            others = given if of_rank_1 is None or given[0] == asleep.END else (asleep.WRITE, method, *of_rank_1)
            return [first.call(name, *given), second.call(name, *others)]

        return asleep.write(call, self, method, 1.0, args)


@pytest.mark.parametrize("level", [1, 0])
def test_weights_are_written_while_they_sleep(group: list[Rank], level: int) -> None:
    """Also if they do not, but the executor believes it."""
    for each in group if level else ():
        each.sleep(1)
    assert Core(group).collective_rpc("reload_weights", 3.0) == ["loaded 3.0", "loaded 3.0"]
    for each in group:
        each.wake_up()
        assert each.weight() == [3.0]
        assert each.content()["buffers"]


def test_no_worker_takes_an_update_that_fails_on_one(group: list[Rank]) -> None:
    for each in group:
        each.sleep(1)
    core = Core(group)
    with pytest.raises(MemsaverError, match="a file is damaged"):
        core.collective_rpc("reload_weights", 3.0, of_rank_1=(3.0, "damaged"))
    with pytest.raises(UnsupportedError, match=r"has made tensors anew \(weight\)"):
        core.collective_rpc("reload_weights", 3.0, of_rank_1=(3.0, "of another kernel"))
    group[1].quantize("fp8")
    with pytest.raises(UnsupportedError, match="of the format fp8 are computed on the device"):
        core.collective_rpc("reload_weights", 3.0)
    group[1].quantize(None)
    group[1].attend_by_mla(True)
    with pytest.raises(UnsupportedError, match="of the format MLA are computed on the device"):
        core.collective_rpc("reload_weights", 3.0)
    group[1].attend_by_mla(False)
    for each in group:
        each.wake_up()
        assert each.content()["weights"]
    for each in group:
        each.sleep(2)
    with pytest.raises(NotResidentError, match="resume it first"):
        core.collective_rpc("reload_weights", 3.0)


def test_a_tag_that_no_rank_has_is_unknown(group: list[Rank]) -> None:
    memory = VllmMemory(Executor(group))
    with pytest.raises(UnknownTagError):
        memory.release(MemoryRequest(tags=("nothing",)))
    assert memory.release(MemoryRequest(tags=("cuda_graph",))).released_bytes == 0


@pytest.mark.guards("one rank or device failed while the others went on")
def test_one_rank_that_cannot_release_keeps_all_awake(group: list[Rank]) -> None:
    """The ranks that had released are resumed, with their content."""
    memory = VllmMemory(Executor(group))
    group[1].fail("unmap", "invalid_value", 1)
    with pytest.raises(MemsaverError, match="rank 1") as failed:
        memory.release(MemoryRequest())
    assert isinstance(failed.value, DriverError)
    assert [released(rank) for rank in group] == [set(), set()]
    assert all(content["weights"] and content["kv_cache"] for content in (rank.content() for rank in group))
    assert memory.release(MemoryRequest()).released_bytes > 0  # a repeat works
    memory.resume(Tagged())


@pytest.mark.guards(
    "one rank or device failed while the others went on",
    "running out of memory or other resources killed the process",
)
def test_one_rank_that_cannot_resume_keeps_all_asleep(group: list[Rank]) -> None:
    """The ranks that had resumed release again; the repeat brings everything back."""
    memory = VllmMemory(Executor(group))
    memory.release(MemoryRequest())
    group[0].fail("create", "out_of_memory", 1)
    with pytest.raises(OutOfDeviceMemoryError, match="rank 0"):
        memory.resume(Tagged())
    assert [released(rank) for rank in group] == [ALL, ALL]
    memory.resume(Tagged())
    assert [released(rank) for rank in group] == [set(), set()]
    assert all(rank.content()["weights"] and rank.content()["buffers"] for rank in group)


def test_a_failed_resume_keeps_what_vllm_saved_at_level_2(group: list[Rank]) -> None:
    """On the ranks that had resumed, too: they give their discarded weights up again."""
    memory = VllmMemory(Executor(group))
    level_2 = MemoryRequest(restore={"weights": RestorePolicy.DISCARD})
    for failing in group:
        memory.release(level_2)
        failing.fail("create", "out_of_memory", 1)
        with pytest.raises(OutOfDeviceMemoryError):
            memory.resume(Tagged())
        assert [released(rank) for rank in group] == [ALL, ALL]
        memory.resume(Tagged())
        for rank in group:
            rank.write_weights()
        for content in (rank.content() for rank in group):
            assert content["buffers"]
            assert content["draft"]
            assert content["kept parameters"]


@pytest.mark.guards("releasing everything failed after one tag had been released")
def test_what_was_released_in_parts_is_released_whole(group: list[Rank]) -> None:
    """VLLM takes itself to be asleep after the first part, and does not ask its workers again."""
    memory = VllmMemory(Executor(group))
    memory.release(MemoryRequest(tags=("kv_cache",)))
    assert released(group[0]) == {"kv_cache"}
    memory.release(MemoryRequest())
    assert [released(rank) for rank in group] == [ALL, ALL]
    memory.resume(Tagged(tags=("weights",)))
    assert memory.status().state == "released"
    memory.resume(Tagged())
    assert all(rank.content()["weights"] for rank in group)


def test_a_rank_that_is_gone_is_an_error(group: list[Rank]) -> None:
    executor = Executor(group)
    memory = VllmMemory(executor)
    executor.ranks = []  # asks nobody, and cannot say what became of them

    def call(message: Plain) -> list[Plain]:
        raise RuntimeError("worker 1 died")

    executor.call = call  # type: ignore[method-assign]
    with pytest.raises(MemsaverError, match="cannot be reached for the preparation: worker 1 died"):
        memory.release(MemoryRequest())


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_how_far_the_ranks_are_is_seen_while_they_work(group: list[Rank]) -> None:
    """A worker that works answers nobody, and yet its phase and progress are reported, and end with it."""
    memory = VllmMemory(Executor(group))
    for rank in group:
        rank.delay("unmap", 0.5)
    log = PhaseLog(memory.read_devices)
    with ThreadPoolExecutor(1) as pool:
        release = pool.submit(memory.release, MemoryRequest(), log=log)

        def is_pausing() -> bool:
            """Both are those of the slowest rank."""
            assert not release.done()
            seen = memory.status().progress
            return log.now == "pause" and seen.operation == "release" and 0 < seen.done_bytes <= seen.total_bytes

        wait_until(is_pausing)
        assert release.result().released_bytes > 0
    assert memory.status().progress.operation == ""
    assert [phase.name for phase in log.phases][:2] == ["synchronize", "pause"]
    assert len(log.starts) == len(log.phases)
    memory.resume(Tagged())


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_rank_that_cannot_be_looked_at_is_told_by_what_it_was_asked(group: list[Rank]) -> None:
    """For example one on another host, on which its process ids mean something else."""

    class Far(Executor):
        def call(self, message: Plain) -> list[Plain]:
            answers = super().call(message)
            for answer, location in zip(answers, ({"mark": 0}, {"fd": 9999}), strict=True):
                if message["type"] == "Introduce":
                    answer["fields"]["introduction"]["progress"].update(location)
                elif message["type"] == "Move" and message["fields"]["operation"] == "resume":
                    seen.append((log.now, memory.status().progress.operation))
            return answers

    seen: list[tuple[str, str]] = []
    memory = VllmMemory(Far(group))
    memory.release(MemoryRequest())
    log = PhaseLog(memory.read_devices)
    memory.resume(Tagged(), log=log)
    assert seen == [("restore", "")] * 2
    assert all(rank.content()["weights"] for rank in group)


@pytest.mark.guards(
    "an operation waited forever, and nothing said why",
    "one rank or device failed while the others went on",
)
def test_the_phase_in_which_a_rank_failed_is_told(group: list[Rank]) -> None:
    """Whatever the ranks did after that to undo it."""
    memory = VllmMemory(Executor(group))
    for call, phase in (("synchronize", "synchronize"), ("unmap", "pause")):
        group[1].fail(call, "invalid_value", 1)
        log = PhaseLog(memory.read_devices)
        with pytest.raises(DriverError, match="rank 1"):
            memory.release(MemoryRequest(), log=log)
        assert log.failed == phase
