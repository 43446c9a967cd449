"""vLLM as an ``Engine``. The memory is in vLLM's workers, where the plugin ``memsaver_core.compat.vllm`` manages it.
vLLM's own pause and sleep drain, freeze and continue requests."""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

from memsaver_core.compat.patching import wrap
from memsaver_core.compat.vllm.block_limit import CALL as BLOCK_LIMIT
from memsaver_core.contract import errors
from memsaver_core.contract.policies import RestorePolicy
from memsaver_core.contract.requests import SCHEDULING, DrainMode, MemoryRequest
from memsaver_core.ranks.protocol import Answer, ExpectRelease, Plain, SleepNow, TakeOutcome
from memsaver_core.rendezvous import started
from memsaver_core.resizing import KV_CACHE
from memsaver_server.engine import never
from memsaver_server.engine.gate import Gate, InFlightRequest
from memsaver_server.engine.limited_pages import LimitedPages
from memsaver_server.engine.verification import LENGTH, PROMPT
from memsaver_server.integrations.adapter.calls import NestedRequests, is_done
from memsaver_server.ranks import RankMemory

logger = logging.getLogger("memsaver")

#: The methods by which an ``LLM`` generates; one may call another.
CALLS = ("generate", "chat", "beam_search", "encode", "embed", "classify", "score", "reward", "wait_for_completion")

#: A limit for each call of vLLM in a verification or a resize, seconds.
CALL_S = 60.0
STOP_S = 10.0
#: The load of an excluded engine, more requests than any has: vLLM's front end chooses the engine with the fewest.
BUSY = 1 << 40

_T = TypeVar("_T")


class VllmMemory(RankMemory):
    """Releases inside vLLM's own sleep."""

    channel: VllmEngine

    def start(self, message: Plain) -> Future[list[Plain]]:
        return self.channel.start(message, self.part)

    def release_awake(self, request: MemoryRequest, again: bool) -> list[Answer]:
        discards_weights = request.restore.get("weights") == RestorePolicy.DISCARD
        level = 2 if discards_weights and request.concerns("weights") else 1
        if again and level == 1:
            # The ranks alone: vLLM's sleep would clear its large table of blocks once more. At level 2 it also empties
            # a KV connector's tier.
            return self.ask(SleepNow(request, level))
        answers = self.ask(ExpectRelease(request))
        if any(answer.failure is not None for answer in answers):
            return answers
        self.progress.asking()  # a rank that is put to sleep is at work, as it is with a message
        try:
            self.wait(self.channel.sleep(level, self.part))
        except errors.GroupFailedError:
            raise
        except Exception as error:
            self.ask(TakeOutcome())  # so that no rank still expects the release
            raise errors.MemsaverError(f"the engine cannot go to sleep: {error}; repeat the call, or resume") from error
        outcomes = dict(zip(self.asked, self.ask(TakeOutcome()), strict=True))
        # An engine that counts as asleep, because a part was released before, did not ask its ranks.
        asked = {self.dp_rank(rank) for rank, each in outcomes.items() if each.report or each.failure}
        if silent := {self.dp_rank(rank) for rank in outcomes} - asked:
            with self.only([number for number in silent if number is not None]):
                outcomes |= zip(self.asked, self.ask(SleepNow(request, level)), strict=True)
        return list(outcomes.values())


class VllmEngine(Gate):
    """An engine over either front end of vLLM. A request first enters the gate, then vLLM's scheduler."""

    #: The data-parallel ranks of the engine cores, of which there may be one.
    dp_ranks: frozenset[int] = frozenset({0})

    def __init__(self, core: Any, model_config: Any) -> None:
        """``core`` is the front end's ``engine_core``. Its processes are watched, one for each data-parallel rank; a
        core in this process, or in Ray, has none."""
        super().__init__("vllm")
        # The data-parallel ranks of the engine cores that are asleep, paused or excluded.
        self._asleep: frozenset[int] = frozenset()
        self._paused: frozenset[int] = frozenset()
        self._excluded: frozenset[int] = frozenset()
        self._wake_up: Future[Any] | None = None
        self.model_name = str(getattr(model_config, "model", ""))
        manager = getattr(getattr(core, "resources", None), "engine_manager", None)
        processes = {f"engine core {number}": each.pid for number, each in enumerate(getattr(manager, "processes", ()))}
        self.memory = VllmMemory(self, processes, dp_ranks=sorted(self.dp_ranks) if len(self.dp_ranks) > 1 else ())

    # Calls of the front end, none of which blocks. Those that have ``dp_ranks`` reach these engine cores alone, if any
    # are given.

    @abstractmethod
    def start(self, message: Plain, dp_ranks: Collection[int] = ()) -> Future[list[Plain]]:
        """See ``Channel``; for ``memory``."""

    @abstractmethod
    def call(self, name: str, *arguments: Any, dp_ranks: Collection[int] = ()) -> Future[Any]:
        """Begin a call of vLLM's method ``name``."""

    @abstractmethod
    def generate(self, prompt: Any, parameters: Any) -> Future[Any]:
        """Have vLLM generate from one prompt; the result is its last ``RequestOutput``."""

    @abstractmethod
    def pending(self, dp_ranks: Collection[int] = ()) -> list[str]:
        """Return the names of the requests in flight."""

    def sleep(self, level: int, dp_ranks: Collection[int] = ()) -> Future[None]:
        """Begin vLLM's own sleep: level 1 keeps the weights, 2 discards them."""
        self._asleep |= frozenset(dp_ranks or self.dp_ranks)
        return self.call("sleep", level, "keep", dp_ranks=dp_ranks)

    def wake_up(self, tags: list[str] | None, dp_ranks: Collection[int]) -> None:
        """Begin vLLM's own wake-up of ``tags``, or of all if None."""
        self._wake_up = self.call("wake_up", tags, dp_ranks=dp_ranks)
        self._wake_up.add_done_callback(_log_failure)

    # Methods of ``Engine``.

    def open_admission(self) -> None:
        if opening := (self._paused | self._asleep) - self._excluded:
            self.wake_up(None if opening & self._asleep else [SCHEDULING], opening)
        self._paused, self._asleep = self._paused & self._excluded, self._asleep & self._excluded
        super().open_admission()

    def drain(
        self,
        timeout_s: float,
        mode: DrainMode = "wait",
        given_up: Callable[[], bool] = never,
        dp_ranks: Collection[int] = (),
    ) -> None:
        super().drain(timeout_s, mode, given_up)
        drained = frozenset(dp_ranks or self.dp_ranks)
        try:
            self.pause(mode, timeout_s, given_up, dp_ranks)
        except errors.DrainTimeoutError:
            if running := drained - self._paused:
                self.wake_up([SCHEDULING], running)
            raise
        self._paused |= drained

    def pause(
        self, mode: DrainMode, timeout_s: float, given_up: Callable[[], bool] = never, dp_ranks: Collection[int] = ()
    ) -> None:
        """Have vLLM abort, finish or freeze its requests, and begin no others; raises as ``drain``."""
        pausing = self.call("sleep", 0, mode, dp_ranks=dp_ranks)
        if not is_done(pausing, timeout_s, given_up):
            pausing.cancel()
            raise errors.DrainTimeoutError(timeout_s, self.pending(dp_ranks))
        pausing.result()

    def verify_tokens(self) -> list[int]:
        """See ``VerifiableEngine``; vLLM's scheduler runs for a moment. Raises UnsupportedError if requests are frozen,
        MemsaverError if it takes longer than ``CALL_S``."""
        if frozen := self.pending():
            raise errors.UnsupportedError(
                f"{len(frozen)} request(s) are frozen and would run along; to verify, release with mode wait or abort"
            )
        _in_time(self.call("wake_up", None if self._asleep else [SCHEDULING]))
        self._asleep, self._paused = frozenset(), self.dp_ranks
        try:
            from vllm import SamplingParams

            greedy = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
            _in_time(self.call("reset_prefix_cache"))
            # Salted, so that no prefix is found in what a KV connector keeps.
            prompt = {"prompt_token_ids": list(PROMPT), "cache_salt": uuid.uuid4().hex}
            output = _in_time(self.generate(prompt, greedy))
            _in_time(self.call("reset_prefix_cache"))
            return list(output.outputs[0].token_ids)
        finally:
            self.pause("abort", STOP_S)  # ends a prompt, too, that was not computed in time

    def flush_cache(self) -> None:
        """Forget also what a KV connector keeps."""
        self.call("reset_prefix_cache", False, True).result()

    def repair(self, tags: Sequence[str], lost: Sequence[str]) -> None:
        """Reset the prefix cache again: vLLM did so as it fell asleep, but a part may have been released since. With a
        large cache this takes milliseconds. Nobody waits for it, as vLLM does it before later requests."""
        if "kv_cache" in lost:
            self.call("reset_prefix_cache", dp_ranks=self._asleep).add_done_callback(_log_failure)


class ApiServerEngine(LimitedPages, VllmEngine):
    """An engine over vLLM's asynchronous client, called from threads other than that of the client's loop. Requests are
    tasks of that loop. They wait in front of the gate but are never inside it: vLLM drains those that have entered."""

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._core: Any = getattr(client, "engine_core", None)
        names = getattr(self._core, "core_engines", ())  # by which vLLM's front end addresses its engine cores
        self._cores = {int.from_bytes(name, "little"): name for name in names} if len(names) > 1 else {}
        if self._cores:
            self.dp_ranks = frozenset(self._cores)
            wrap(self._core, "get_core_engine_for_request", self._choose, again=True)
        self._waiting: set[asyncio.Event] = set()
        super().__init__(self._core, getattr(getattr(client, "vllm_config", None), "model_config", None))

    @property
    def is_closed(self) -> bool:
        return self._closed is not None

    def refusal(self, path: str, dp_rank: str | None) -> str:
        """Return why a request, which may name an engine, is refused although others are served; or nothing."""
        if not self._excluded:
            return ""
        asleep = f"the data-parallel engine(s) {', '.join(map(str, sorted(self._excluded)))} are released"
        if path.endswith("lora_adapter"):
            return f"{asleep}, and every engine has to load an adapter; resume them first"
        return asleep if dp_rank is not None and dp_rank.strip() in map(str, self._excluded) else ""

    # Methods of ``DataParallelEngine``.

    def check_dp_ranks(self, dp_ranks: Sequence[int]) -> None:
        if not self._cores:
            raise errors.UnsupportedError("this server has one engine (--data-parallel-size): leave out dp_ranks")
        if missing := [rank for rank in dp_ranks if rank not in self._cores]:
            raise errors.BadRequestError(f"dp_ranks: there is no engine {missing[0]}; there are {sorted(self._cores)}")
        if getattr(getattr(self._client.vllm_config, "model_config", None), "is_moe", True):
            raise errors.UnsupportedError(
                "the engines of a model with experts compute each step together, so none can be released alone: leave "
                "out dp_ranks"
            )

    def exclude(self, dp_ranks: Collection[int]) -> None:
        self._excluded = frozenset(dp_ranks)

    def _choose(self, choose: Callable[[Any], bytes], request: Any) -> bytes:
        """Choose an engine that serves: by vLLM's own choice, to which excluded ones seem busy. In vLLM's event loop.
        Raises AdmissionClosedError if the request names one, by its rank or as one that belongs to another."""
        excluded, core = self._excluded, self._core
        if request.request_id in core.reqs_in_flight:
            return choose(request)
        counts = core.lb_engines
        core.lb_engines = [
            [BUSY, *each[1:]] if int.from_bytes(name, "little") in excluded else each
            for name, each in zip(core.core_engines, counts, strict=True)
        ]
        try:
            chosen = choose(request)
        finally:
            core.lb_engines = counts
        if (number := int.from_bytes(chosen, "little")) in excluded:
            core.reqs_in_flight.pop(request.request_id, None)
            if hasattr(core, "engine_inflight"):  # what vLLM has counted as well, from 0.33 on
                core.engine_inflight[chosen] -= 1
            raise errors.AdmissionClosedError(f"the data-parallel engine {number} is released")
        return chosen

    async def enter(self) -> None:
        """Return once a request may enter; raise AdmissionClosedError if it would have to wait and no more may."""
        with self._changed:
            if self._closed is None:
                return
            if len(self._waiting) >= self._hold:
                raise errors.AdmissionClosedError(self._closed)
            opened = asyncio.Event()
            self._waiting.add(opened)
        try:
            await opened.wait()
        finally:
            with self._changed:
                self._waiting.discard(opened)

    def open_admission(self) -> None:
        super().open_admission()
        with self._changed:
            waiting, self._waiting = self._waiting, set()
        for opened in waiting:
            self._loop.call_soon_threadsafe(opened.set)

    def start(self, message: Plain, dp_ranks: Collection[int] = ()) -> Future[list[Plain]]:
        return asyncio.run_coroutine_threadsafe(self._ask_workers(message, dp_ranks), self._loop)

    def call(self, name: str, *arguments: Any, dp_ranks: Collection[int] = ()) -> Future[Any]:
        whole = not dp_ranks or self.dp_ranks == frozenset(dp_ranks)
        call = getattr(self._client, name)(*arguments) if whole else self._ask_cores(dp_ranks, name, *arguments)
        return asyncio.run_coroutine_threadsafe(call, self._loop)

    def generate(self, prompt: Any, parameters: Any) -> Future[Any]:
        async def generated() -> Any:
            async for output in self._client.generate(prompt, parameters, f"memsaver-{uuid.uuid4().hex}"):
                last = output
            return last

        return asyncio.run_coroutine_threadsafe(generated(), self._loop)

    def pending(self, dp_ranks: Collection[int] = ()) -> list[str]:
        states = dict(getattr(getattr(self._client, "output_processor", None), "request_states", {}))
        if dp_ranks:
            cores, where = {self._cores[each] for each in dp_ranks}, self._core.reqs_in_flight
            states = {name: state for name, state in states.items() if where.get(name) in cores}
        return sorted(str(getattr(state, "external_req_id", name)) for name, state in states.items())

    def is_alive(self) -> bool:
        return not self._client.errored

    # Methods of ``LimitedPages``. A page is a block, with its memory on one GPU.

    def ask_pages(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Call a method of the engine core's ``BlockLimit``."""
        if len(getattr(self._core, "core_engines", ())) >= 2:
            return {"obstacle": "it has several engine cores, each with a cache"}
        call = self.call("collective_rpc", BLOCK_LIMIT, None, (name, *arguments))
        answer = cast(dict[str, Any], _in_time(call, "take a call between two steps"))
        if name in ("read", "keep") and "result" in answer:
            tags = [tag for status in self.memory.statuses if status is not None for tag in status.tags]
            largest = max((tag.bytes for tag in tags if tag.tag == KV_CACHE), default=0)
            answer["result"]["page_bytes"] = max(1, largest // answer["result"]["total"])
        return answer

    def back_pages(self, pages: int, before: int) -> None:
        self.memory.resize(pages, before)

    async def _ask_workers(self, message: Plain, dp_ranks: Collection[int]) -> list[Plain]:
        """Return the answers of every engine core's workers; ``collective_rpc`` returns those of the first alone."""
        if not self._cores:
            return cast(list[Plain], await self._client.collective_rpc("memsaver", args=(message,)))
        cores = dp_ranks or self._cores
        groups = await self._ask_cores(cores, "collective_rpc", "memsaver", None, (message,), None)
        return [answer for group in groups for answer in group]

    async def _ask_cores(self, dp_ranks: Collection[int], name: str, *arguments: Any) -> list[Any]:
        """Call a method of these engine cores, as vLLM's front end calls it of all; return what each answers."""
        call = partial(self._core._call_utility_async, name, *arguments)
        return await asyncio.gather(*(call(engine=self._cores[each]) for each in sorted(dp_ranks)))


class OfflineEngine(VllmEngine):
    """An engine over an ``LLM``, whose calls must not overlap: they run one after the other, in the order they came."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._lock = threading.Lock()  # held during each call, generation included
        self._beginning = threading.Lock()
        self._last: Future[Any] = started(lambda: None)
        super().__init__(llm.llm_engine.engine_core, getattr(llm.llm_engine, "model_config", None))

    def gate_calls(self) -> None:
        """Make each call by which the ``LLM`` generates a request of the gate, which overlaps no other call."""
        requests = NestedRequests(self._generating)

        def gated(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with requests.request(name):
                return call(*args, **kwargs)

        for name in CALLS:
            wrap(self._llm, name, partial(gated, name), again=True)

    @contextmanager
    def _generating(self, name: str | None) -> Iterator[InFlightRequest]:
        """Run the block, in which the ``LLM`` generates, alone and after the last wake-up. Raises the wake-up's error
        if it failed: the engine stays paused, and the block would not return."""
        with self.request(name) as request:
            if self._wake_up is not None:
                self._wake_up.result()
            with self._lock:
                yield request

    def start(self, message: Plain, dp_ranks: Collection[int] = ()) -> Future[list[Plain]]:
        return self._begin(lambda: self._llm.collective_rpc("memsaver", args=(message,)))

    def call(self, name: str, *arguments: Any, dp_ranks: Collection[int] = ()) -> Future[Any]:
        return self._begin(lambda: getattr(self._llm, name)(*arguments))

    def generate(self, prompt: Any, parameters: Any) -> Future[Any]:
        call = getattr(self._llm.generate, "__wrapped__", self._llm.generate)  # past the gate, which is closed
        return self._begin(lambda: call([prompt], parameters, use_tqdm=False)[0])

    def pending(self, dp_ranks: Collection[int] = ()) -> list[str]:
        """Return no names: an ``LLM`` generates only inside its callers' calls, and the gate names those."""
        return []

    def pause(
        self, mode: DrainMode, timeout_s: float, given_up: Callable[[], bool] = never, dp_ranks: Collection[int] = ()
    ) -> None:
        pausing = self.call("sleep", 0, "keep" if mode == "wait" else mode)  # the gate is drained: no call generates
        if not is_done(pausing, timeout_s, given_up):
            raise errors.DrainTimeoutError(timeout_s, ["a call of the LLM that has not returned"])
        pausing.result()

    def is_alive(self) -> bool:
        return not getattr(getattr(self._llm.llm_engine.engine_core, "resources", None), "engine_dead", False)

    def _begin(self, call: Callable[[], _T]) -> Future[_T]:
        """Begin a call, in a separate thread: a call that hangs must not keep the process from ending."""

        def in_turn(before: Future[Any]) -> _T:
            wait([before])
            with self._lock:
                return call()

        with self._beginning:
            begun = started(partial(in_turn, self._last))
            self._last = begun
        return begun


def _in_time(call: Future[_T], what: str = "compute the verification prompt") -> _T:
    if not is_done(call, CALL_S):
        raise errors.MemsaverError(f"vLLM did not {what} in {CALL_S:g} s")
    return call.result()


def _log_failure(done: Future[Any]) -> None:
    if not done.cancelled() and done.exception() is not None:
        logger.error("vLLM did not continue as it should after a wake-up: %s", done.exception())
