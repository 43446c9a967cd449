"""Real vLLM's engine core with its ``OffloadingConnector``, whose tier in host memory a sleep keeps.

It needs no GPU: workers are played, as in ``test_blocks``, and copy blocks a step after they are told to.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from memsaver_core.compat.vllm import core, tier
from memsaver_core.contract.errors import UnsupportedError
from tests.vllm.test_blocks import SIZE, Engine, Executor

pytestmark = pytest.mark.slow

PROMPT = [*range(50, 50 + 4 * SIZE + 3)]


class TieredExecutor(Executor):
    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        self.tier: dict[int, list[int]] = {}
        self.later: dict[int, Any] = {}  # stores of the step before
        self.loads = 0
        self.slept: list[int] = []

    def init_kv_output_aggregator(self, _connector: Any) -> None:
        pass

    def get_kv_connector_handshake_metadata(self) -> None:
        """It has none: no other engine asks it for blocks."""

    reset_mm_cache = reset_encoder_cache = get_kv_connector_handshake_metadata

    def collective_rpc(self, *_: Any, **__: Any) -> list[str]:
        return ["the workers'"]

    def sleep(self, level: int) -> None:
        self.slept.append(level)
        self.worker.cache = {}  # zeros, of which no token is computed
        self.is_sleeping = True

    def wake_up(self, tags: Any = None) -> None:
        self.is_sleeping = False

    def execute_model(self, step: Any, non_block: bool = False) -> Future[Any]:
        done, received = self._move(step.kv_connector_metadata)
        answer = super().execute_model(step, non_block)
        if done or received:
            from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
            from vllm.v1.outputs import KVConnectorOutput

            reported = OffloadingWorkerMetadata(completed_jobs=dict.fromkeys(done, 1))
            told = KVConnectorOutput(finished_recving=received, kv_connector_worker_meta=reported)
            output = replace(answer.result(), kv_connector_output=told)
            self._last = answer = Future()
            answer.set_result(output)
        return answer

    def _move(self, jobs: Any) -> tuple[list[int], set[str]]:
        """Carry out the stores of the step before, and this one's loads."""
        cache = self.worker.cache
        for job in self.later.values():
            for one, other in zip(job.src_spec.block_ids, job.dst_spec.block_ids, strict=True):
                self.tier[int(other)] = [cache.get(int(one) * SIZE + place, 0) for place in range(SIZE)]
        for job in jobs.load_jobs.values():
            self.loads += 1
            for one, other in zip(job.src_spec.block_ids, job.dst_spec.block_ids, strict=True):
                cache.update({int(other) * SIZE + place: token for place, token in enumerate(self.tier[int(one)])})
        done = [*self.later, *jobs.load_jobs]
        self.later = dict(jobs.store_jobs)
        return done, {job.req_id for job in jobs.load_jobs.values()}


class Tiered(Engine):
    def __init__(self) -> None:
        from vllm.config import KVTransferConfig

        transfer = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"cpu_bytes_to_use": 1 << 20},
        )
        super().__init__(False, TieredExecutor, kv_transfer_config=transfer)
        self.executor: TieredExecutor = self.core.model_executor

    def generate(self, name: str) -> list[int]:
        self.add(name, PROMPT, 20)
        self.run(lambda: name in self.ended)
        return self.outputs[name]

    def sleep_and_wake_up(self, level: int) -> None:
        self.core.sleep(level)
        self.core.wake_up()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tiered]:
    monkeypatch.setattr(core, "is_wanted", lambda _: True)
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield Tiered()
    from vllm import envs

    getattr(envs, "disable_envs_cache", lambda: None)()


def test_a_sleep_keeps_what_was_offloaded(engine: Tiered) -> None:
    """Its last stores are not submitted yet when the sleep comes."""
    tokens = engine.generate("first")
    assert engine.executor.loads == 0
    assert engine.core.scheduler.has_requests()
    engine.sleep_and_wake_up(1)
    assert engine.executor.slept == [1]
    assert engine.generate("second") == tokens
    assert engine.executor.loads > 0


def test_requests_that_the_sleep_ends_store_no_zeros(engine: Tiered) -> None:
    """Nothing is found of a request whose stores were pending."""
    tokens = engine.generate("first")
    engine.run()
    engine.core.reset_prefix_cache(reset_connector=True)
    engine.add("second", PROMPT, 20)
    engine.run(lambda: len(engine.outputs["second"]) == 1)
    assert engine.executor.later
    engine.sleep_and_wake_up(1)
    for name in ("third", "fourth"):
        engine.core.reset_prefix_cache()
        assert engine.generate(name) == tokens
        engine.run()
    assert engine.executor.loads == 1


def test_other_weights_have_other_caches(engine: Tiered) -> None:
    """A sleep that gives them up, and a call that writes them, forget what was offloaded."""
    engine.generate("first")
    engine.sleep_and_wake_up(2)
    engine.generate("second")
    engine.core.collective_rpc("reload_weights")
    engine.core.reset_prefix_cache()
    engine.generate("third")
    assert engine.executor.loads == 0
    engine.sleep_and_wake_up(1)
    engine.core.collective_rpc("get_weights_version")
    engine.generate("fourth")
    assert engine.executor.loads > 0


def test_a_sleep_beside_a_connector_that_cannot_follow_is_refused(engine: Tiered) -> None:
    """Later versions of vLLM ask connectors at the start."""
    own = engine.core.scheduler.connector
    engine.core.scheduler.connector = SimpleNamespace()
    with pytest.raises(UnsupportedError, match="the KV connector SimpleNamespace may use the KV cache"):
        engine.core.sleep(1)
    assert not engine.core.is_scheduler_paused()
    engine.core.scheduler.connector = own
    tier.check_connector(engine.core)
