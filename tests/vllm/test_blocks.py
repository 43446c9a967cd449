"""Real vLLM's engine core, its scheduler and its block pool, while fewer and more blocks are handed out.

It needs no GPU. The workers are played: a cache of tokens that raises where a block without memory is written or read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from memsaver_core.compat.patching import wrap
from memsaver_core.compat.vllm import block_limit, core

pytestmark = pytest.mark.slow

MODEL = str(Path(__file__).parents[1] / "data" / "qwen2-1.5b")
BLOCKS, SIZE, LONGEST = 64, 16, 256
#: Of a request of LONGEST tokens, and block 0.
LEAST = LONGEST // SIZE + 1


class Worker:
    """Computes each next token from all that it finds in the cache before it."""

    def __init__(self) -> None:
        self.backed = BLOCKS
        self.cache: dict[int, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}

    def resize(self, blocks: int) -> None:
        self.backed = blocks
        self.cache = {place: token for place, token in self.cache.items() if place < blocks * SIZE}

    def compute(self, step: Any) -> Any:
        cached = step.scheduled_cached_reqs
        for name in {*step.finished_req_ids, *(step.preempted_req_ids or ())}:
            self.tokens.pop(name, None)
        for new in step.scheduled_new_reqs:
            self.tokens[new.req_id] = list(new.prefill_token_ids or new.prompt_token_ids)
            self.tables[new.req_id] = list(new.block_ids[0])
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if name in cached.resumed_req_ids:
                self.tokens[name] = list(cached.all_token_ids[name])
                self.tables[name] = []
            self.tables[name] += blocks[0] if blocks else []
        sampled = [self._next(name, starts[name], count) for name, count in step.num_scheduled_tokens.items()]
        names = list(step.num_scheduled_tokens)
        from vllm.v1.outputs import ModelRunnerOutput

        return ModelRunnerOutput(names, {name: place for place, name in enumerate(names)}, sampled)

    def _next(self, name: str, start: int, count: int) -> list[int]:
        tokens = self.tokens[name]
        places = [self._place(name, position) for position in range(start + count)]
        self.cache.update(zip(places[start:], tokens[start : start + count], strict=True))
        if start + count < len(tokens):
            return []
        tokens.append(sum((index + 7) * self.cache[place] for index, place in enumerate(places)) % 9973)
        return tokens[-1:]

    def _place(self, name: str, position: int) -> int:
        block = self.tables[name][position // SIZE]
        assert 0 < block < self.backed, f"block {block} of {self.backed} is used"
        return block * SIZE + position % SIZE


class Executor:
    supported_tasks = ("generate",)
    is_sleeping = False

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.worker = Worker()

    def get_kv_cache_specs(self) -> Any:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        spec = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
        return [{f"model.layers.{layer}.attn": spec for layer in range(2)}]

    def determine_available_memory(self) -> list[int]:
        return [1 << 30]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBNHC"]]

    def initialize_from_config(self, *_: Any) -> None:
        pass

    set_kv_cache_layout = compile_or_warm_up_model = register_failure_callback = initialize_from_config

    def collective_rpc(self, *_: Any) -> list[str]:
        return ["the workers'"]

    def execute_model(self, step: Any, non_block: bool = False) -> Future[Any]:
        """Workers get steps in the order of the calls, and answer later."""
        answer: Future[Any] = Future()
        answer.set_result(self.worker.compute(step) if step.total_num_scheduled_tokens else self._nothing())
        self._last = answer
        return answer

    def sample_tokens(self, grammar: Any, non_block: bool = False) -> Any:
        return self._last if non_block else self._last.result()

    def _nothing(self) -> Any:
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        return EMPTY_MODEL_RUNNER_OUTPUT


class Engine:
    """An engine core, and requests to it."""

    def __init__(self, asynchronous: bool, executor: type[Executor] = Executor, **settings: Any) -> None:
        from vllm import config
        from vllm.v1.engine.core import EngineCore

        for name, wrapper in core.WRAPPERS["vllm.v1.engine.core"].items():
            wrap(EngineCore, name.partition(".")[2], wrapper)
        model = config.ModelConfig(model=MODEL, skip_tokenizer_init=True, max_model_len=LONGEST)
        self.core = EngineCore(
            config.VllmConfig(
                model_config=model,
                cache_config=config.CacheConfig(block_size=SIZE, num_gpu_blocks_override=BLOCKS),
                scheduler_config=config.SchedulerConfig(
                    max_num_seqs=16,
                    max_num_batched_tokens=LONGEST,
                    max_model_len=LONGEST,
                    is_encoder_decoder=False,
                    async_scheduling=asynchronous,
                ),
                device_config=config.DeviceConfig(device="cpu"),
                **settings,
            ),
            executor,
            log_stats=False,
        )
        self.worker: Worker = self.core.model_executor.worker
        self.pool = self.core.scheduler.kv_cache_manager.block_pool
        self.outputs: dict[str, list[int]] = {}
        self.ended: set[str] = set()

    def ask(self, name: str, *arguments: Any) -> Any:
        return self.core.collective_rpc(block_limit.CALL, None, (name, *arguments))["result"]

    def add(self, name: str, prompt: list[int], tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        self.outputs[name] = []
        request = Request(name, prompt, sampling, None, block_hasher=self.core.request_block_hasher)
        self.core.add_request(request)

    def step(self) -> None:
        outputs, _ = self.core.step_fn()
        for each in (outputs or {}).get(0, SimpleNamespace(outputs=())).outputs:
            self.outputs[each.request_id] += each.new_token_ids
            self.ended |= {each.request_id} if each.finish_reason is not None else set()

    def run(self, until: Callable[[], bool] | None = None) -> None:
        for _ in range(3000):
            if until() if until else not self.core.scheduler.has_requests() and not self.core.batch_queue:
                return
            self.step()
        raise AssertionError("it never ends")

    def shrink(self, blocks: int) -> None:
        """As the service does, once none is waited for."""
        assert not self.ask("waiting")
        self.worker.resize(blocks)
        self.ask("keep", blocks)

    def grow(self, blocks: int) -> None:
        self.worker.resize(blocks)
        self.ask("keep", blocks)


REQUESTS = {f"r{number}": [(number * 97 + place * 31) % 9000 + 1 for place in range(40)] for number in range(8)}
#: They share their first two blocks.
REQUESTS |= {f"s{number}": [*range(50, 85), number] for number in range(4)}


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(block_limit.ms, "core_settings", lambda: SimpleNamespace(kv_cache_piece=1))
    monkeypatch.setattr(core, "is_wanted", lambda _: True)
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    engine = Engine(request.param)
    yield engine
    from vllm import envs

    getattr(envs, "disable_envs_cache", lambda: None)()


def begin(engine: Engine) -> None:
    """Requests that need more than the whole cache, some way on."""
    for name, prompt in REQUESTS.items():
        engine.add(name, prompt, 60)
    engine.run(lambda: len(engine.outputs["r3"]) >= 20)


def expected(engine: Engine) -> dict[str, list[int]]:
    """What each request gives by itself."""
    outputs = {}
    for name, prompt in REQUESTS.items():
        engine.add(name, prompt, 60)
        engine.run()
        outputs[name] = engine.outputs[name]
    assert engine.pool.reset_prefix_cache()
    return outputs


def test_requests_that_wait_for_their_end(engine: Engine) -> None:
    tokens = expected(engine)
    begin(engine)
    engine.ask("limit", 24)
    assert engine.ask("waiting") > 0
    assert set(engine.ask("late")) <= set(REQUESTS)
    engine.run(lambda: not engine.ask("waiting"))
    engine.shrink(24)
    state = engine.ask("read")
    assert (state["total"], state["kept"], state["least"], state["page_tokens"]) == (BLOCKS, 24, LEAST, SIZE)
    assert state["needed"] <= 24
    engine.run()
    assert engine.outputs == tokens
    assert engine.ask("read")["used"] == 0


def test_requests_that_are_preempted(engine: Engine) -> None:
    """Between any two steps, with steps in flight; again and again, as in a cache that breathes."""
    tokens = expected(engine)
    begin(engine)
    for blocks in (24, 40, LEAST, 33, 20):
        engine.step()
        if blocks < engine.ask("read")["kept"]:
            engine.ask("limit", blocks)
            engine.ask("preempt")
            assert engine.ask("late") == []
            engine.shrink(blocks)
        else:
            engine.grow(blocks)
        for _ in range(7):
            engine.step()
        assert engine.ask("read")["used"] < blocks
    engine.run()
    assert engine.outputs == tokens


def test_a_new_request_finds_no_prefix_on_a_block_that_goes(engine: Engine) -> None:
    """Or the block would be in use for as long as such requests come."""
    for name in [*(f"r{number}" for number in range(6)), "s0"]:
        engine.add(name, REQUESTS[name], 60)
    engine.run(lambda: len(engine.outputs["s0"]) >= 2)
    engine.ask("limit", LEAST)
    assert "s0" in engine.ask("late")
    engine.core.abort_requests([f"r{number}" for number in range(6)])
    engine.add("s1", REQUESTS["s1"], 60)
    engine.run(lambda: len(engine.outputs["s1"]) >= 2)
    assert engine.ask("late") == ["s0"]
    engine.run(lambda: not engine.ask("waiting"))
    engine.shrink(LEAST)
    engine.run()


def test_a_limit_that_is_taken_back(engine: Engine) -> None:
    tokens = expected(engine)
    begin(engine)
    engine.ask("limit", LEAST)
    engine.step()
    engine.ask("limit", BLOCKS)
    assert engine.ask("waiting") == 0
    engine.run()
    assert engine.outputs == tokens
    assert engine.pool.get_num_free_blocks() == BLOCKS - 1


def test_the_longest_request_fits_the_smallest_cache(engine: Engine) -> None:
    engine.ask("limit", LEAST)
    engine.shrink(LEAST)
    engine.add("long", list(range(1, 101)), LONGEST - 100)
    engine.add("other", list(range(201, 301)), LONGEST - 100)
    engine.run()
    assert [len(engine.outputs[name]) for name in ("long", "other")] == [LONGEST - 100] * 2
    assert engine.pool.get_usage() == 0


def test_prefixes_on_blocks_that_go_are_forgotten(engine: Engine) -> None:
    """And others are not: the caches that a new request finds are right, before and after it grows."""
    tokens = expected(engine)
    for name in REQUESTS:
        engine.add(name, REQUESTS[name], 60)
        engine.run()
    for blocks in (20, BLOCKS, LEAST):
        engine.ask("limit", blocks)
        (engine.grow if blocks == BLOCKS else engine.shrink)(blocks)
        for name in reversed(REQUESTS):
            engine.add(name, REQUESTS[name], 60)
            engine.run()
        assert engine.outputs == tokens


def test_prefixes_that_are_computed_again_are_counted(engine: Engine) -> None:
    def recomputed(count: int) -> int:
        before = engine.ask("read")["recomputed"]
        for number in range(count):
            engine.add(f"p{number}", [(number * 97 + place * 31) % 9000 + 1 for place in range(200)], 10)
            engine.run()
        return int(engine.ask("read")["recomputed"] - before)

    assert [recomputed(3) for _ in range(3)] == [0, 0, 0]
    recomputed(8)  # more than the cache has room for
    assert recomputed(8) > 0
    recomputed(3)
    assert recomputed(3) == 0
    engine.ask("limit", LEAST)
    engine.shrink(LEAST)
    recomputed(3)
    assert recomputed(3) > 0


@pytest.mark.parametrize("waiting", [False, True])
def test_a_sleep_resets_the_cache_of_any_size(engine: Engine, waiting: bool) -> None:
    """vLLM's own, in which the requests that run are kept: it raises if a block stays in use."""
    tokens = expected(engine)
    begin(engine)
    engine.ask("limit", 24)
    if not waiting:
        engine.ask("preempt")
        engine.shrink(24)
    while engine.core.batch_queue:
        engine.core.scheduler.set_pause_state(_paused())
        engine.step()
    engine.core.reset_prefix_cache(reset_running_requests=True)
    assert engine.ask("waiting") == 0
    assert engine.pool.get_usage() == 0
    engine.core.resume_scheduler()
    engine.run()
    assert engine.outputs == tokens


def test_what_cannot_be_limited(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.core.collective_rpc("other") == ["the workers'"]
    monkeypatch.setattr(engine.core.scheduler, "connector", object())
    asked = engine.core.collective_rpc(block_limit.CALL, None, ("read",))
    assert "a KV connector" in asked["obstacle"]
    monkeypatch.setattr(block_limit.ms, "core_settings", lambda: SimpleNamespace(kv_cache_piece=0))
    asked = engine.core.collective_rpc(block_limit.CALL, None, ("read",))
    assert "MEMSAVER_KV_CACHE_PIECE=32MiB" in asked["obstacle"]


def _paused() -> Any:
    from vllm.v1.core.sched.interface import PauseState

    return PauseState.PAUSED_ALL
