"""memsaver's routes inside vLLM's HTTP application, with stand-ins for the application, its engine client and its
workers.

The workers are processes with real memory. tests/gpu/test_vllm_gpu.py asks vLLM's own server.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request

from memsaver_core.compat.vllm import block_limit
from memsaver_core.contract.errors import UnsupportedError
from memsaver_core.ranks.protocol import ANSWERS, Answer, Introduction
from memsaver_server.engine import AdmissionClosedError
from memsaver_server.integrations.vllm import engine
from memsaver_server.integrations.vllm.plugin import RoutesPlugin, attach_to
from tests.unit.test_vllm_plugin import ALL, Executor, Rank, group, released, workers
from tests.waiting import wait_until

__all__ = ["group", "workers"]


class EngineClient:
    """Stands in for vLLM's asynchronous client: pauses, sleeps and counts as that does."""

    def __init__(self, ranks: list[Rank]) -> None:
        model_config = SimpleNamespace(enable_sleep_mode=True, sleep_mode_backend="memsaver")
        self.vllm_config = SimpleNamespace(model_config=model_config)
        self.executor = Executor(ranks)
        self.paused = asyncio.Event()
        self.running: dict[str, asyncio.Event] = {}
        self.output_processor = SimpleNamespace(request_states=self.running)
        self.resets = 0
        self.may_reset = asyncio.Event()
        self.may_reset.set()
        self.may_generate = asyncio.Event()
        self.begun: list[str] = []
        self.errored = False
        self.core: Any = None
        self.update_error = ""
        self.resources = SimpleNamespace()
        self.engine_core = SimpleNamespace(resources=self.resources)

    async def complete(self, request: Any) -> dict[str, Any]:
        return await asyncio.to_thread(self.executor.ranks[0].content)

    async def collective_rpc(self, method: str, timeout: Any = None, args: tuple[Any, ...] = ()) -> Any:
        if method == block_limit.CALL:
            return block_limit.answer(self.core, *args)
        if method == "reload_weights" and self.update_error:
            raise RuntimeError(self.update_error)
        return await asyncio.to_thread(self.executor.call, *args) if method == "memsaver" else []

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.paused.set()
        if mode == "wait":
            await asyncio.gather(*(running.wait() for running in self.running.values()))
        if level:
            await asyncio.to_thread(self.executor.put_to_sleep, level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.begun.append("wake_up")
        if tags is None:
            for rank in self.executor.ranks:
                await asyncio.to_thread(rank.wake_up)
            self.executor.is_sleeping = False
        self.paused.clear()

    async def reset_prefix_cache(self, running: bool = False, connector: bool = False) -> bool:
        self.begun.append("reset_prefix_cache")
        await self.may_reset.wait()
        self.resets += 1
        return True

    async def generate(self, prompt: Any, parameters: Any, request_id: str) -> AsyncIterator[Any]:
        await self.may_generate.wait()
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(range(parameters.max_tokens)))])


class World:
    """A vLLM server with the plugin."""

    def __init__(self, ranks: list[Rank], client: type[EngineClient] = EngineClient) -> None:
        self._bound = socket.socket()
        self._bound.bind(("127.0.0.1", 0))
        self._bound.listen()  # a request that comes before the server waits for it
        self._serving = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(client(ranks))), daemon=True)
        self._thread.start()
        assert self._serving.wait(600)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self._bound.getsockname()[1]}", timeout=600, verify=False)

    async def _serve(self, client: EngineClient) -> None:
        self._loop = asyncio.get_running_loop()
        self.client = client
        self.core = subprocess.Popen(["sleep", "3600"])
        core = SimpleNamespace(name="EngineCore_DP0", pid=self.core.pid)
        self.client.resources.engine_manager = SimpleNamespace(processes=[core])
        app = FastAPI()

        @app.post("/v1/completions")
        async def completions(request: Request) -> dict[str, Any]:
            return await client.complete(request)

        @app.post("/sleep")
        async def sleep() -> str:
            return "vLLM's own"

        @app.get("/health")
        async def health() -> str:
            return "vLLM's own"

        plugin = RoutesPlugin()
        plugin.attach_router(app)
        await plugin.init_state(self.client, app.state, SimpleNamespace(host="127.0.0.1", uds=None))
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        self._serving.set()
        await self._server.serve(sockets=[self._bound])

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def collective_rpc(self, method: str) -> None:
        """As vLLM's own routes, and a trainer in its process, call the workers."""
        asyncio.run_coroutine_threadsafe(self.client.collective_rpc(method), self._loop).result(600)

    def run(self, call: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        self.http.close()
        self.core.kill()
        self.core.wait()
        self._server.should_exit = True
        self._thread.join(600)


@pytest.fixture
def world(group: list[Rank]) -> Iterator[World]:
    world = World(group)
    yield world
    world.close()


@pytest.mark.guards(
    "memory was reported free before it was free",
    "a request during sleep hung or used released memory",
    "one rank or device failed while the others went on",
)
def test_memory_goes_and_comes_on_every_rank(world: World) -> None:
    """Measured, on all ranks or none; requests are refused meanwhile."""
    ranks = world.client.executor.ranks
    answer = world.post("/release_memory_occupation").json()
    assert answer["success"], answer
    assert [released(rank) for rank in ranks] == [ALL, ALL]
    refused = world.post("/v1/completions")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert world.http.get("/is_sleeping").json() == {"is_sleeping": True}
    assert world.post("/resume_memory_occupation").json()["success"]
    assert world.post("/v1/completions").json()["weights"]
    wait_until(lambda: not world.client.paused.is_set())  # the last thing that a wake-up does
    assert not world.client.executor.is_sleeping


def test_a_wake_up_does_not_wait_for_what_vllm_does_before_it_takes_requests(world: World) -> None:
    """vLLM's engine core takes calls and requests in the order in which they are sent."""
    world.post("/release_memory_occupation").raise_for_status()
    world.client.may_reset.clear()
    world.client.begun.clear()
    assert world.http.post("/wake_up", timeout=600).json()["success"]
    world.run(world.client.may_reset.set)
    wait_until(lambda: world.client.resets == 1)
    assert world.client.begun == ["reset_prefix_cache", "wake_up"]


@pytest.mark.parametrize("wake_ups", [["/wake_up?tags=weights", "/wake_up?tags=kv_cache"], ["/wake_up"]])
@pytest.mark.guards("generation answered from memory whose content was discarded")
def test_vllms_own_sleep_passes_by_the_service(world: World, wake_ups: list[str]) -> None:
    """After level 2 nothing is generated until a call to the workers has reloaded the weights."""
    answer = world.post("/sleep?level=2").json()
    assert {tag["tag"] for tag in answer["tags"] if tag["released_bytes"]} == ALL
    assert world.http.get("/health").json()["status"] == "ok"  # ours: asleep is not dead
    for wake_up in wake_ups:
        assert world.post(wake_up).json()["success"]
    for method, status in (("start_weight_update", 503), ("get_load", 503), ("reload_weights", 200)):
        world.collective_rpc(method)
        assert world.post("/v1/completions").status_code == status
    content = world.post("/v1/completions").json()
    assert content["buffers"]
    assert content["runtime"]


def test_the_caller_of_an_update_names_it(world: World) -> None:
    """Also while the weights are asleep. Nothing in vLLM's calls says what they write."""

    def version() -> str | None:
        held: str | None = world.http.get("/memory_occupation").json()["weights_version"]
        return held

    for asleep in (False, True):
        if asleep:
            world.post("/release_memory_occupation").raise_for_status()
        named = world.post("/content_written", weights_version=f"{asleep} 1")
        assert (named.status_code, named.json()["weights_version"]) == (200, f"{asleep} 1")
        world.collective_rpc("get_weights_version")
        assert version() == f"{asleep} 1"
        world.collective_rpc("reload_weights")
        assert version() is None
        world.post("/content_written", weights_version=f"{asleep} 2").raise_for_status()
        world.client.update_error = "a file is damaged"
        with pytest.raises(RuntimeError, match="damaged"):
            world.collective_rpc("reload_weights")
        assert version() is None
        world.client.update_error = ""
        world.post("/content_written", weights_version=f"{asleep} 3").raise_for_status()
    assert world.post("/resume_memory_occupation", weights_version="True 2").status_code == 409
    assert world.post("/resume_memory_occupation", weights_version="True 3").json()["weights_version"] == "True 3"


@pytest.mark.guards("a rank was killed while memory was released, and probes went on saying that it was well")
def test_the_death_of_the_engine_core_is_told_by_vllms_own_probe(world: World) -> None:
    """And requests are refused, which vLLM would let in."""
    world.post("/release_memory_occupation").raise_for_status()
    world.core.kill()
    wait_until(lambda: world.http.get("/health").status_code == 503)
    assert f"engine core 0 (process {world.core.pid}) has ended" in world.http.get("/health").json()["reason"]
    wait_until(lambda: "engine core 0" in world.post("/v1/completions").text)  # after the probes, and the log
    assert world.post("/v1/completions").status_code == 503


@pytest.mark.guards("one rank or device failed while the others went on")
def test_a_failed_rank_leaves_all_awake_and_serving(world: World) -> None:
    """The answer names the rank; admission is as before."""
    world.client.executor.ranks[1].fail("unmap", "invalid_value", 1)
    failed = world.post("/release_memory_occupation")
    assert failed.status_code == 500
    assert "rank 1" in failed.json()["message"]
    assert failed.json()["error"]["phase"] == "pause"
    assert world.post("/v1/completions").json()["weights"]


@pytest.mark.parametrize(
    ("path", "call", "phase"),
    [("release", "synchronize", "synchronize"), ("release", "unmap", "pause"), ("resume", "create", "restore")],
)
@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_rank_that_hangs_is_named_by_its_phase(
    group: list[Rank], monkeypatch: pytest.MonkeyPatch, path: str, call: str, phase: str
) -> None:
    """Not by the earlier drain, nor as not started. The operation goes on, and its final state is true."""
    monkeypatch.setenv("MEMSAVER_PHASE_TIMEOUT_S", "0.3")
    with closing(World(group)) as world:
        if path == "resume":
            ready = world.post("/release_memory_occupation", **{"tags": ["kv_cache"], "async": True}).json()
            wait_until(lambda: world.http.get(ready["location"]).json()["status"] == "succeeded")
        group[1].delay(call, 2.0)
        stuck: dict[str, Any] = {}

        def is_stuck_there() -> bool:
            """A repeat joins it. On a busy machine, another phase may take as long, and is named before."""
            answer = world.post(f"/{path}_memory_occupation", tags=["kv_cache"])
            assert answer.status_code == 504, answer.text
            stuck.update(answer.json()["error"])
            return bool(stuck["phase"] == phase)

        wait_until(is_stuck_there)
        operation = f"/operations/{stuck['operation_id']}"
        wait_until(lambda: world.http.get(operation).json()["status"] != "running")
        answer = world.http.get(operation).json()["answer"]
        assert answer["success"], answer


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_how_far_the_ranks_are_is_told(world: World) -> None:
    """An operation that makes progress is not reported as stuck."""
    for rank in world.client.executor.ranks:
        rank.delay("unmap", 0.5)
    started = world.post("/release_memory_occupation", **{"async": True}).json()
    seen = []
    while (now := world.http.get(started["location"]).json())["status"] != "succeeded":
        seen.append((now["phase"], now["progress"] and now["progress"]["done_bytes"]))
    assert len({done for phase, done in seen if phase == "pause" and done is not None}) > 1


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_drain_that_takes_too_long_is_undone(world: World) -> None:
    """The answer names the request; generation goes on."""
    world.client.running["request-7"] = asyncio.Event()
    late = world.post("/release_memory_occupation", timeout_s=0.05)
    assert late.status_code == 504
    assert "request-7" in late.json()["message"]
    assert world.post("/v1/completions").json()["weights"]
    assert not world.client.paused.is_set()


@pytest.mark.guards("nobody could cancel an operation that waited")
def test_a_drain_that_is_cancelled_is_undone(world: World) -> None:
    """Generation goes on."""
    world.client.running["request-7"] = asyncio.Event()
    started = world.post("/release_memory_occupation", **{"timeout_s": 3600, "async": True}).json()
    wait_until(world.client.paused.is_set)
    assert world.http.delete(started["location"]).json()["status"] == "cancelled"
    assert world.post("/v1/completions").json()["weights"]
    wait_until(lambda: not world.client.paused.is_set())


@pytest.mark.guards("an abort waited behind the drain of another release")
def test_an_abort_overtakes_the_drain_of_another_release(world: World) -> None:
    world.client.running["request-7"] = asyncio.Event()
    weak = world.post("/release_memory_occupation", **{"timeout_s": 3600, "async": True}).json()
    wait_until(world.client.paused.is_set)
    strong = world.post("/release_memory_occupation", mode="abort").json()
    assert (strong["operation_id"], strong["success"]) == (weak["operation_id"], True)


def test_requests_wait_while_generation_is_paused(world: World) -> None:
    assert world.post("/pause_generation", mode="keep").json()["success"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(world.post, "/v1/completions")
        assert world.http.get("/health").status_code == 200
        assert not waiting.done()
        assert world.post("/continue_generation").json()["success"]
        assert waiting.result(600).status_code == 200


@pytest.mark.guards("the prefix cache pointed to discarded pages")
def test_the_cache_is_reset_with_its_memory(world: World) -> None:
    """No prefix leads to discarded pages."""
    world.post("/release_memory_occupation", tags=["kv_cache"])
    world.post("/resume_memory_occupation")
    assert world.client.resets == 1
    assert world.http.get("/flush_cache").status_code == 200
    assert world.client.resets == 2


def test_a_verification_that_hangs_fails_the_release(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And generation goes on; a verification that ends is not disturbed by the one before it."""
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=SimpleNamespace))
    monkeypatch.setattr(engine, "CALL_S", 0.2)
    failed = world.post("/release_memory_occupation", verify="token")
    assert failed.status_code == 500
    assert "did not compute the verification prompt in 0.2 s" in failed.json()["message"]
    assert world.post("/v1/completions").json()["weights"]
    world.run(world.client.may_generate.set)
    monkeypatch.setattr(engine, "CALL_S", 60.0)
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        world.post(path, verify="token").raise_for_status()


def test_beyond_loopback_nothing_is_served_without_a_key(group: list[Rank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEMSAVER_API_KEY", raising=False)
    app = FastAPI()
    before = len(app.routes)
    plugin = RoutesPlugin()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(EngineClient(group), app.state, SimpleNamespace(host=None, uds=None)))
    assert len(app.routes) == before


def test_beside_other_api_servers_nothing_is_served(group: list[Rank], caplog: pytest.LogCaptureFixture) -> None:
    """Each of them has a part of the requests. ``vllm serve`` starts one for each data-parallel engine by default."""
    app = FastAPI()
    before = len(app.routes)
    plugin = RoutesPlugin()
    plugin.attach_router(app)
    args = SimpleNamespace(host="127.0.0.1", uds=None, api_server_count=2)
    asyncio.run(plugin.init_state(EngineClient(group), app.state, args))
    assert len(app.routes) == before
    wait_until(lambda: "start it with --api-server-count 1" in caplog.text)


def test_an_engine_that_sleeps_otherwise_keeps_its_own_routes(group: list[Rank]) -> None:
    app = FastAPI()
    before = len(app.routes)
    client = EngineClient(group)
    client.vllm_config.model_config.sleep_mode_backend = "another"
    plugin = RoutesPlugin()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(client, app.state, SimpleNamespace(host="127.0.0.1", uds=None)))
    asyncio.run(plugin.init_state(None, app.state, SimpleNamespace(host="127.0.0.1", uds=None)))
    assert len(app.routes) == before


class Offline:
    """Stands in for vLLM's ``LLM``: it generates in the caller's thread, and its calls must not overlap."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.executor = Executor(ranks)
        self.llm_engine = SimpleNamespace(engine_core=SimpleNamespace())
        self.entered = threading.Event()
        self.leave = threading.Event()
        self.leave.set()
        self.may_wake_up = threading.Event()
        self.may_wake_up.set()
        self.wake_up_error = ""
        self._busy = threading.Lock()

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        with self._alone():
            return self.executor.call(*args) if method == "memsaver" else []

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        with self._alone():
            if level:
                self.executor.put_to_sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        with self._alone():
            assert self.may_wake_up.wait(600)
            if self.wake_up_error:
                raise RuntimeError(self.wake_up_error)
            if tags is None:
                for rank in self.executor.ranks:
                    rank.wake_up()
                self.executor.is_sleeping = False

    def reset_prefix_cache(self, running: bool = False, connector: bool = False) -> None:
        with self._alone():
            pass

    def generate(self) -> dict[str, bool]:
        with self._alone():
            self.entered.set()
            assert self.leave.wait(600)
            content: dict[str, bool] = self.executor.ranks[0].content()
            return content

    def chat(self) -> dict[str, bool]:
        return self.generate()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        assert self._busy.acquire(blocking=False), "two calls at once"
        try:
            yield
        finally:
            self._busy.release()


@pytest.mark.guards(
    "memory was unmapped while kernels still used it",
    "a request during sleep hung or used released memory",
)
def test_beside_an_llm_a_release_waits_for_the_call_in_flight(group: list[Rank]) -> None:
    """Nothing is released during a call, and calls are refused while memory is released."""
    llm = Offline(group)
    with attach_to(llm) as server, httpx.Client(base_url=server.url, timeout=600, verify=False) as http:
        llm.leave.clear()
        with ThreadPoolExecutor(2) as pool:
            answer = pool.submit(llm.chat)
            assert llm.entered.wait(600)
            release = pool.submit(http.post, "/release_memory_occupation")
            assert not released(group[1])
            llm.leave.set()
            assert answer.result(600)["weights"]
            assert release.result(600).json()["success"]
        assert released(group[1]) == ALL
        with pytest.raises(AdmissionClosedError):
            llm.generate()
        assert http.get("/flush_cache").status_code == 200
        assert http.post("/resume_memory_occupation").json()["success"]
        assert llm.generate()["weights"]


def test_beside_an_llm_a_wake_up_that_hangs_keeps_the_service_answering(group: list[Rank]) -> None:
    """Only calls of the ``LLM`` wait for it, in their order."""
    llm = Offline(group)
    with (
        attach_to(llm) as server,
        httpx.Client(base_url=server.url, timeout=600, verify=False) as http,
        ThreadPoolExecutor() as pool,
    ):
        for call in (llm.generate, lambda: http.post("/release_memory_occupation", timeout=600).json()):
            http.post("/release_memory_occupation").raise_for_status()
            llm.may_wake_up.clear()
            assert http.post("/resume_memory_occupation").json()["success"]
            called = pool.submit(call)
            for path in ("/livez", "/metrics", "/memory_occupation"):
                assert http.get(path).status_code == 200
            assert not called.done()
            llm.may_wake_up.set()
            called.result(600)
        assert released(group[1]) == ALL


def test_beside_an_llm_calls_raise_what_a_wake_up_raised(group: list[Rank]) -> None:
    """They would wait for ever in an engine that is paused."""
    llm = Offline(group)
    with attach_to(llm) as server, httpx.Client(base_url=server.url, timeout=600, verify=False) as http:
        http.post("/release_memory_occupation").raise_for_status()
        llm.wake_up_error = "no"
        http.post("/resume_memory_occupation").raise_for_status()
        with pytest.raises(RuntimeError, match="no"):
            llm.generate()
        llm.wake_up_error = ""
        http.post("/pause_generation").raise_for_status()
        http.post("/continue_generation").raise_for_status()
        assert llm.generate()["weights"]


@pytest.mark.guards("generation answered from memory whose content was discarded")
def test_beside_an_llm_a_reload_is_seen(group: list[Rank]) -> None:
    llm = Offline(group)
    with attach_to(llm) as server, httpx.Client(base_url=server.url, timeout=600, verify=False) as http:
        http.post("/sleep?level=2").raise_for_status()
        http.post("/wake_up").raise_for_status()
        with pytest.raises(AdmissionClosedError, match="content of weights"):
            llm.generate()
        llm.collective_rpc("reload_weights")
        assert llm.generate()["runtime"]
        server.lifecycle.content_written([], "step-1")
        assert http.post("/release_memory_occupation").json()["weights_version"] == "step-1"
        llm.collective_rpc("reload_weights")
        assert http.post("/resume_memory_occupation").json()["weights_version"] is None


def test_an_llm_may_be_attached_again(group: list[Rank]) -> None:
    """The service that runs refuses its calls, and sees its updates."""
    llm = Offline(group)
    attach_to(llm).close()
    with attach_to(llm) as server, httpx.Client(base_url=server.url, timeout=600) as http:
        http.post("/sleep?level=2").raise_for_status()
        with pytest.raises(AdmissionClosedError, match="is released"):
            llm.generate()
        http.post("/wake_up").raise_for_status()
        llm.collective_rpc("reload_weights")
        assert llm.chat()["runtime"]


def test_an_llm_that_sleeps_otherwise_is_refused(group: list[Rank]) -> None:
    llm = Offline(group)
    llm.collective_rpc = lambda method, args=(): [ANSWERS.encode(Answer(None, Introduction()))]  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError, match="MEMSAVER_VLLM=1"):
        attach_to(llm)
