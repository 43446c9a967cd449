"""The scheduler alone, over a runner that computes with integers and detects every wrong step."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from memsaver_server.engine import AdmissionClosedError, CacheMode, DrainMode, DrainTimeoutError
from memsaver_server.reference.requests import Request, Sampling
from memsaver_server.reference.runner import Row
from memsaver_server.reference.scheduler import Scheduler
from tests.waiting import wait_until

VOCABULARY = 1009


def next_token(history: Sequence[int]) -> int:
    """The token after ``history``; it depends on every token and its position."""
    value = 17
    for token in history:
        value = (value * 31 + token + 1) % VOCABULARY
    return value


def answer_to(prompt: Sequence[int], tokens: int) -> list[int]:
    history = list(prompt)
    for _ in range(tokens):
        history.append(next_token(history))
    return history[len(prompt) :]


class ArithmeticRunner:
    """Stores tokens in place of keys and values, and computes from what it stored."""

    chunk = 4
    length = 256
    slots = 3
    max_batch = 2
    slot_bytes = 1
    stop_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.cache: list[list[int | None]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.released = False
        self.touched_released = 0
        self.lost_context = False
        self.break_next = False
        self.steps = 0
        self.threads: set[int] = set()
        self.resident = self.slots
        self.wipe()

    def wipe(self) -> None:
        self.cache = [[None] * self.length for _ in range(self.slots)]

    def compute(self, rows: Sequence[Row]) -> list[int]:
        self._enter()
        assert 1 <= len(rows) <= self.max_batch
        assert len({slot for slot, _, _ in rows}) == len(rows)
        for slot, start, tokens in rows:
            assert slot < self.resident, "a slot without memory was used"
            assert len(tokens) == 1 or (len(rows) == 1 and start % self.chunk == 0 and len(tokens) <= self.chunk)
            self.cache[slot][start : start + len(tokens)] = tokens
        return [self._next(slot, start + len(tokens)) for slot, start, tokens in rows]

    def resize(self, slots: int) -> None:
        self.threads.add(threading.get_ident())
        if self.break_next:
            self.break_next = False
            raise MemoryError("too little")
        self.resident = slots
        self.cache[slots:] = [[None] * self.length for _ in range(len(self.cache) - slots)]

    def check(self) -> None:
        if self.lost_context:
            raise RuntimeError("context lost")

    def close(self) -> None:
        self.cache = []

    def _enter(self) -> None:
        self.threads.add(threading.get_ident())
        self.entered.set()
        assert self.gate.wait(600)
        self.touched_released += self.released
        self.steps += 1
        if self.break_next:
            self.break_next = False
            raise ArithmeticError("a broken step")

    def _next(self, slot: int, end: int) -> int:
        history = self.cache[slot][:end]
        assert None not in history, "read a position that was never written"
        return next_token(history)  # type: ignore[arg-type]


@pytest.fixture
def runner() -> ArithmeticRunner:
    return ArithmeticRunner()


@pytest.fixture
def scheduler(runner: ArithmeticRunner) -> Iterator[Scheduler]:
    scheduler = Scheduler(lambda: runner)
    yield scheduler
    runner.gate.set()
    scheduler.close()


def ask(prompt: Sequence[int], tokens: int, name: str = "r") -> Request:
    return Request(prompt=list(prompt), sampling=Sampling(max_new_tokens=tokens), name=name)


def test_more_requests_than_slots_and_batches_all_get_their_own_answer(scheduler: Scheduler) -> None:
    prompts = [list(range(n, 2 * n)) for n in range(1, 14)]
    futures = [scheduler.enqueue(ask(prompt, 5 + len(prompt))) for prompt in prompts]
    for prompt, future in zip(prompts, futures, strict=True):
        done = future.result(600)
        assert done.output == answer_to(prompt, 5 + len(prompt))
        assert done.finish == {"type": "length", "length": 5 + len(prompt)}


def test_everything_runs_on_one_thread(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    scheduler.enqueue(ask([1], 3)).result(600)
    assert scheduler.call(threading.get_ident) in runner.threads
    assert len(runner.threads) == 1


def test_an_error_while_making_the_runner_is_raised_by_the_constructor() -> None:
    def fail() -> ArithmeticRunner:
        raise ValueError("no such model")

    with pytest.raises(ValueError, match="no such model"):
        Scheduler(fail)


def test_an_answer_ends_at_the_end_of_its_slot(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    done = scheduler.enqueue(ask(range(250), 100)).result(600)
    assert len(done.prompt) + len(done.output) == runner.length


def test_equal_beginnings_are_computed_once(scheduler: Scheduler) -> None:
    prompt = list(range(11))
    first = scheduler.enqueue(ask(prompt, 4)).result(600)
    second = scheduler.enqueue(ask(prompt, 4)).result(600)
    assert (first.reused, second.reused) == (0, 8)
    assert first.output == second.output


@pytest.mark.guards("the prefix cache pointed to discarded pages")
def test_prefixes_do_not_outlive_the_pages_that_held_them(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    """A prefix that was cached before the KV cache was released is not found afterwards."""
    prompt = list(range(11))
    first = scheduler.enqueue(ask(prompt, 4)).result(600)
    scheduler.close_admission("released")
    scheduler.drain(60, "wait")
    runner.wipe()
    scheduler.call(scheduler.forget_cache)
    scheduler.open_admission()
    second = scheduler.enqueue(ask(prompt, 4)).result(600)
    assert second.reused == 0
    assert second.output == first.output


@pytest.mark.guards("a request during sleep hung or used released memory")
def test_closed_admission_refuses_with_the_reason(scheduler: Scheduler) -> None:
    """At once."""
    scheduler.close_admission("memory is released")
    with pytest.raises(AdmissionClosedError, match="memory is released"):
        scheduler.enqueue(ask([1], 1))
    scheduler.open_admission()
    assert scheduler.enqueue(ask([1], 1)).result(600).output == answer_to([1], 1)


@pytest.mark.guards("a request during sleep hung or used released memory")
def test_held_requests_wait_up_to_the_bound_and_reach_no_step(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    """They are computed only once admission is open."""
    scheduler.close_admission("memory is released", hold=2)
    scheduler.drain(60, "wait")
    held = [scheduler.enqueue(ask([n], 3)) for n in range(2)]
    with pytest.raises(AdmissionClosedError, match="memory is released; 2 requests wait already"):
        scheduler.enqueue(ask([9], 3))
    scheduler.drain(0, "wait")  # held requests hold nothing up
    scheduler.call(lambda: None)  # a full turn of the scheduler's thread
    assert runner.steps == 0
    scheduler.open_admission()
    assert [future.result(600).output for future in held] == [answer_to([n], 3) for n in range(2)]


def test_a_held_request_that_is_cancelled_frees_its_place(scheduler: Scheduler) -> None:
    scheduler.close_admission("paused", hold=1)
    assert scheduler.enqueue(ask([1], 3)).cancel()
    assert scheduler.enqueue(ask([2], 3))


@pytest.mark.guards("memory was unmapped while kernels still used it")
def test_drain_waits_for_what_was_accepted(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    """A drain returns only when no step runs any more."""
    futures = [scheduler.enqueue(ask([n], 40)) for n in range(7)]
    scheduler.close_admission("releasing")
    scheduler.drain(60, "wait")
    assert all(future.done() for future in futures)
    steps = runner.steps
    scheduler.call(lambda: None)
    assert runner.steps == steps


def test_a_drain_that_takes_too_long_names_what_held_it_up(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    runner.gate.clear()
    future = scheduler.enqueue(ask([5], 6, name="slow"))
    assert runner.entered.wait(600)
    scheduler.close_admission("releasing")
    for mode in ("wait", "keep"):
        with pytest.raises(DrainTimeoutError) as timeout:
            scheduler.drain(0.01, mode)  # type: ignore[arg-type]
        assert timeout.value.pending == ("slow",)
    runner.gate.set()
    assert future.result(600).output == answer_to([5], 6)  # nothing was frozen


@pytest.mark.parametrize("mode", ["wait", "keep"])
@pytest.mark.guards("nobody could cancel an operation that waited")
def test_a_drain_that_is_given_up_freezes_nothing(
    scheduler: Scheduler, runner: ArithmeticRunner, mode: DrainMode
) -> None:
    runner.gate.clear()
    future = scheduler.enqueue(ask([5], 6, name="slow"))
    assert runner.entered.wait(600)
    scheduler.close_admission("releasing")
    with pytest.raises(DrainTimeoutError, match="slow"):
        scheduler.drain(3600, mode, lambda: True)
    runner.gate.set()
    assert future.result(600).output == answer_to([5], 6)


def test_abort_answers_with_the_tokens_so_far(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    runner.gate.clear()
    running = scheduler.enqueue(ask([5], 200))
    assert runner.entered.wait(600)
    waiting = [scheduler.enqueue(ask([n], 200)) for n in range(6)]
    drained = threading.Thread(target=scheduler.drain, args=(60, "abort"))
    drained.start()
    wait_until(lambda: scheduler._quiesced)  # set under the lock, which is held until all are aborted
    runner.gate.set()
    drained.join()
    for future in (running, *waiting):
        done = future.result(0)
        assert done.finish is not None
        assert done.finish["type"] == "abort"
    assert running.result(0).output == answer_to([5], 200)[: len(running.result(0).output)]


@pytest.mark.parametrize("lost", [False, True])
def test_frozen_requests_go_on_with_the_same_answer(scheduler: Scheduler, runner: ArithmeticRunner, lost: bool) -> None:
    prompts = [list(range(n, n + 6)) for n in range(5)]
    futures = [scheduler.enqueue(ask(prompt, 60)) for prompt in prompts]
    for _ in range(8):
        scheduler.close_admission("releasing")
        scheduler.drain(60, "keep")
        scheduler.drain(0, "wait")  # frozen requests hold nothing up
        if lost:
            runner.wipe()
            scheduler.call(scheduler.forget_cache)
        scheduler.open_admission()
    for prompt, future in zip(prompts, futures, strict=True):
        assert future.result(600).output == answer_to(prompt, 60)


def test_cancelled_requests_give_their_slots_back(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    futures = [scheduler.enqueue(ask([n], 250)) for n in range(6)]
    for future in futures:
        future.cancel()
    assert scheduler.enqueue(ask([7], 4)).result(600).output == answer_to([7], 4)
    scheduler.drain(60, "wait")


def test_a_broken_step_fails_its_requests_alone(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    runner.break_next = True
    with pytest.raises(ArithmeticError):
        scheduler.enqueue(ask([1], 4)).result(600)
    assert scheduler.is_alive()
    assert scheduler.enqueue(ask([2], 4)).result(600).output == answer_to([2], 4)


@pytest.mark.guards("health probes confused a sleeping engine with a dead one")
def test_a_lost_context_ends_the_engine(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    """It does not report itself alive."""
    runner.break_next = runner.lost_context = True
    with pytest.raises(ArithmeticError):
        scheduler.enqueue(ask([1], 4)).result(600)
    scheduler._thread.join(600)
    assert not scheduler.is_alive()
    with pytest.raises(RuntimeError, match="context lost"):
        scheduler.enqueue(ask([1], 4))
    with pytest.raises(RuntimeError, match="context lost"):
        scheduler.call(lambda: None)
    scheduler.drain(0, "wait")  # nothing will be computed again: nothing to wait for


def test_closing_fails_what_is_in_flight(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    runner.gate.clear()
    futures = [scheduler.enqueue(ask([n], 200)) for n in range(6)]
    assert runner.entered.wait(600)
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    wait_until(lambda: scheduler._failure)
    runner.gate.set()
    closing.join()
    for future in futures:
        with pytest.raises(AdmissionClosedError):
            future.result(0)
    assert not scheduler.is_alive()
    scheduler.close()


@pytest.mark.guards("memory was unmapped while kernels still used it")
def test_no_step_ever_touches_released_memory(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    """With clients and an operator at once: no step runs between drain and reopening, and no answer is wrong."""
    chooser = random.Random(4)
    plan = [(chooser.choice(["wait", "keep", "keep"]), chooser.random() < 0.5) for _ in range(60)]
    stop = threading.Event()

    def client(seed: int) -> int:
        local, served = random.Random(seed), 0
        while not stop.is_set():
            prompt = [local.randrange(9) for _ in range(local.randrange(1, 30))]
            tokens = local.randrange(1, 40)
            try:
                future = scheduler.enqueue(ask(prompt, tokens))
            except AdmissionClosedError:
                continue
            assert future.result(600).output == answer_to(prompt, tokens)
            served += 1
        return served

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(client, seed) for seed in range(8)]
        for mode, lost in plan:
            scheduler.close_admission("releasing", hold=chooser.randrange(4))
            scheduler.drain(60, mode)  # type: ignore[arg-type]
            runner.released = True
            scheduler.call(runner.wipe if lost else lambda: None)  # a full turn of the scheduler's thread
            runner.released = False
            if lost:
                scheduler.call(scheduler.forget_cache)
            scheduler.open_admission()
        stop.set()
        assert sum(done.result(600) for done in clients) > 0
    assert runner.touched_released == 0


@pytest.mark.parametrize("mode", ["wait", "preempt"])
def test_resizes_under_random_load(scheduler: Scheduler, runner: ArithmeticRunner, mode: CacheMode) -> None:
    """No step uses a slot without memory, and every request gets its own answer."""
    chance = random.Random(7)
    requests = []
    for _ in range(60):
        prompt, tokens = [chance.randrange(5) for _ in range(chance.randint(1, 20))], chance.randint(1, 12)
        requests.append((prompt, tokens, scheduler.enqueue(ask(prompt, tokens))))
        if chance.random() < 0.5:
            pages = chance.randint(1, 3)
            if pages < scheduler.kv_cache().kept:
                scheduler.limit_kv_cache(pages, 600, mode)
                assert scheduler.kv_cache().needed <= pages
            scheduler.resize_kv_cache(pages)
            assert (scheduler.kv_cache().kept, runner.resident) == (pages, pages)
    for prompt, tokens, future in requests:
        assert future.result(600).output == answer_to(prompt, tokens)
    assert len(runner.threads) == 1


def test_a_limit_that_is_given_up_leaves_the_cache_as_it_was(scheduler: Scheduler, runner: ArithmeticRunner) -> None:
    runner.gate.clear()
    futures = [scheduler.enqueue(ask([n], 3, name=f"r{n}")) for n in range(3)]
    wait_until(lambda: scheduler.kv_cache().used == 3)
    with pytest.raises(DrainTimeoutError, match="the KV cache is as before") as late:
        scheduler.limit_kv_cache(1, 600, given_up=lambda: True)
    assert sorted(late.value.pending) == ["r1", "r2"]
    runner.gate.set()
    for number, future in enumerate(futures):
        assert future.result(600).output == answer_to([number], 3)
    scheduler.limit_kv_cache(1, 600)
    assert scheduler.kv_cache().needed <= 1
    runner.break_next = True
    with pytest.raises(MemoryError):
        scheduler.resize_kv_cache(1)
    assert scheduler.kv_cache().kept == runner.resident == 3
