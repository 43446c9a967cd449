"""What is changed in vLLM's engine core, on its calls as vLLM 0.26 has them. The real ones run in tests/gpu."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from memsaver_core.compat.patching import wrap
from memsaver_core.compat.vllm import asleep, core, tier
from memsaver_core.contract.errors import OutOfHostMemoryError, UnsupportedError
from memsaver_core.ranks.protocol import Failure

SETTINGS = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="memsaver"))


class Worker:
    def __init__(self) -> None:
        self.level = 0
        self.fails = ""

    def sleep(self, level: int) -> None:
        self._fail("sleep")
        self.level = level

    def wake_up(self, tags: Any = None) -> None:
        self._fail("wake_up")
        self.level = 0

    def _fail(self, call: str) -> None:
        if self.fails == call:
            self.fails = ""
            raise OutOfHostMemoryError("no host memory", needed_bytes=7)

    def memsaver_call(self, name: str, **arguments: Any) -> tuple[Failure | None, Any, bool]:
        failure, result, _ = asleep.call_worker(self, name, **arguments)
        return failure, result, self.level == 2


class Executor:
    def __init__(self) -> None:
        self.vllm_config = SETTINGS
        self.workers = [Worker(), Worker()]
        self.is_sleeping = False

    def collective_rpc(self, method: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return [getattr(worker, method)(*args, **(kwargs or {})) for worker in self.workers]

    def sleep(self, level: int = 1) -> None:
        if not self.is_sleeping:
            self.collective_rpc("sleep", kwargs={"level": level})
            self.is_sleeping = True

    def wake_up(self, tags: Any = None) -> None:
        if self.is_sleeping:
            self.collective_rpc("wake_up", kwargs={"tags": tags})
            self.is_sleeping = False

    @property
    def levels(self) -> list[int]:
        return [worker.level for worker in self.workers]


class EngineCore:
    def __init__(self) -> None:
        self.vllm_config = SETTINGS
        self.model_executor = Executor()
        self.paused = False
        self.pausing: Future[None] | None = None
        self.scheduler = SimpleNamespace(connector=None, has_requests=lambda: False)
        self.resets: list[bool] = []

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def resume_scheduler(self) -> None:
        self.paused = False

    def _reset_caches(self, _running: bool = True, connector: bool = True) -> None:
        self.resets.append(connector)

    def sleep(self, level: int = 1, mode: str = "abort") -> Future[None] | None:
        self.paused = True
        if level:
            tier.reset_but_tier(EngineCore._reset_caches, self)
        if self.pausing is None:
            self.model_executor.sleep(level)
            return None
        future: Future[None] = Future()

        def complete(_: Future[None]) -> None:
            try:
                future.set_result(self.model_executor.sleep(level))
            except Exception as error:
                future.set_exception(error)

        self.pausing.add_done_callback(complete)
        return future


@pytest.fixture
def engine() -> EngineCore:
    engine = EngineCore()
    wrap(engine, "sleep", lambda call, *args: core.sleep_or_serve(lambda _, *given: call(*given), engine, *args))
    executor = engine.model_executor
    for name in ("sleep", "wake_up"):
        wrap(executor, name, lambda call, *args: core.on_all_workers(lambda _, *given: call(*given), executor, *args))
    return engine


@pytest.mark.guards("an engine that could not sleep never generated again")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_sleep_that_fails_on_one_worker_leaves_all_awake_and_serving(engine: EngineCore, failing: int) -> None:
    engine.model_executor.workers[failing].fails = "sleep"
    with pytest.raises(OutOfHostMemoryError, match="no host memory") as raised:
        engine.sleep(1)
    assert raised.value.needed_bytes == 7
    assert engine.model_executor.levels == [0, 0]
    assert not engine.model_executor.is_sleeping
    assert not engine.paused
    engine.sleep(1)
    assert engine.model_executor.levels == [1, 1]


def test_a_sleep_that_fails_once_requests_have_ended_is_undone_too(engine: EngineCore) -> None:
    engine.pausing = Future()
    engine.model_executor.workers[1].fails = "sleep"
    asleep = engine.sleep(1, "wait")
    assert asleep is not None
    assert engine.paused
    engine.pausing.set_result(None)
    with pytest.raises(OutOfHostMemoryError):
        asleep.result()
    assert not engine.paused


def test_an_engine_that_was_paused_stays_paused(engine: EngineCore) -> None:
    engine.paused = True
    engine.model_executor.workers[0].fails = "sleep"
    with pytest.raises(OutOfHostMemoryError):
        engine.sleep(1)
    assert engine.paused


def test_no_request_is_served_by_weights_that_are_gone(engine: EngineCore) -> None:
    engine.model_executor.workers[1].fails = "sleep"
    with pytest.raises(core.WeightsGoneError, match="load them again"):
        engine.sleep(2)
    assert engine.model_executor.levels == [0, 0]
    assert engine.paused


@pytest.mark.guards("an engine that could not sleep never generated again")
def test_a_level_that_vllm_lacks_is_refused_before_anything_is_paused(engine: EngineCore) -> None:
    with pytest.raises(UnsupportedError, match="level 3"):
        engine.sleep(3)
    assert not engine.paused


def test_a_wake_up_that_fails_can_be_repeated(engine: EngineCore) -> None:
    engine.sleep(1)
    engine.model_executor.workers[0].fails = "wake_up"
    with pytest.raises(OutOfHostMemoryError):
        engine.model_executor.wake_up()
    assert engine.model_executor.is_sleeping
    engine.model_executor.wake_up()
    assert engine.model_executor.levels == [0, 0]


class OffloadingConnector:
    """Stands in for vLLM's, by its name."""


def test_what_a_connector_keeps_outlasts_a_sleep_that_keeps_the_weights(engine: EngineCore) -> None:
    """vLLM's own resets forget it. The real one runs in ``tests/vllm``."""
    engine.scheduler.connector = OffloadingConnector()
    for level in (1, 2):
        engine.sleep(level)
        engine.model_executor.wake_up()
    tier.reset_but_tier(EngineCore._reset_caches, engine)
    assert engine.resets == [False, True, True]


def test_a_connector_that_cannot_follow_a_sleep_is_named(engine: EngineCore) -> None:
    engine.scheduler.connector = SimpleNamespace()
    with pytest.raises(UnsupportedError, match="the KV connector SimpleNamespace may use the KV cache"):
        engine.sleep(1)
    assert not engine.paused


@pytest.mark.parametrize(("method", "resets"), [("reload_weights", 1), ("get_weights_version", 0)])
def test_other_weights_have_other_caches(engine: EngineCore, method: str, resets: int) -> None:
    forgotten: list[str] = []
    engine.scheduler = SimpleNamespace(
        connector=OffloadingConnector(), reset_connector_cache=lambda: forgotten.append(method)
    )
    core.collective_rpc(lambda _core, asked, *_: asked, engine, method)
    assert len(forgotten) == resets
