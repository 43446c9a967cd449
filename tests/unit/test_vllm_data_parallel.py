"""Some data-parallel engines of a vLLM server released while the others serve, with real memory in the workers.

The front end is played, as vLLM 0.26 has it; tests/vllm has the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_vllm_plugin import ALL, Executor, Rank, group, released, workers
from tests.unit.test_vllm_routes import EngineClient, World
from tests.waiting import wait_until

__all__ = ["group", "workers"]

NAMES = [b"\0\0", b"\1\0"]


class Core:
    """The engine core of one data-parallel engine."""

    def __init__(self, rank: Rank) -> None:
        self.executor = Executor([rank])
        self.calls: list[str] = []
        self.paused = False
        self.running: dict[str, asyncio.Event] = {}

    async def collective_rpc(self, _method: str, _timeout: Any, args: tuple[Any, ...], _kwargs: Any) -> Any:
        return await asyncio.to_thread(self.executor.call, *args)

    async def sleep(self, level: int, mode: str) -> None:
        self.paused = True
        for name in list(self.running) if mode == "abort" else ():
            self.running.pop(name).set()
        if mode == "wait":
            await asyncio.gather(*(running.wait() for running in self.running.values()))
        if level:
            await asyncio.to_thread(self.executor.put_to_sleep, level)

    async def wake_up(self, tags: list[str] | None) -> None:
        if tags is None:
            await asyncio.to_thread(self.executor.ranks[0].wake_up)
            self.executor.is_sleeping = False
        self.paused = False

    async def reset_prefix_cache(self, *_: Any) -> bool:
        return True


class FrontEnd:
    """vLLM's ``DPLBAsyncMPClient``: it gives a request to the engine with the fewest."""

    def __init__(self, ranks: list[Rank]) -> None:
        self.resources = SimpleNamespace()
        self.core_engines = list(NAMES)
        self.cores = dict(zip(NAMES, map(Core, ranks), strict=True))
        self.lb_engines = [[0, 0], [0, 0]]
        self.reqs_in_flight: dict[str, bytes] = {}

    async def _call_utility_async(self, name: str, *arguments: Any, engine: bytes) -> Any:
        self.cores[engine].calls.append(name)
        return await getattr(self.cores[engine], name)(*arguments)

    def get_core_engine_for_request(self, request: Any) -> bytes:
        number = request.data_parallel_rank
        if number is None:
            number = min(range(2), key=lambda each: self.lb_engines[each][0])
            self.lb_engines[number][0] += 1
        self.reqs_in_flight[request.request_id] = self.core_engines[number]
        return self.core_engines[number]


class Client(EngineClient):
    """vLLM's ``AsyncLLM``, which asks all engines."""

    def __init__(self, ranks: list[Rank]) -> None:
        super().__init__(ranks)
        self.vllm_config.model_config.is_moe = False
        self.engine_core: Any = FrontEnd(ranks)
        self.engine_core.resources = self.resources
        self.cores = list(self.engine_core.cores.values())

    async def complete(self, request: Any) -> dict[str, Any]:
        asked = SimpleNamespace(request_id=f"request-{id(request)}", data_parallel_rank=None)
        name = self.engine_core.get_core_engine_for_request(asked)
        del self.engine_core.reqs_in_flight[asked.request_id]
        core = self.engine_core.cores[name]
        assert not core.paused
        content = await asyncio.to_thread(core.executor.ranks[0].content)
        return {"engine": NAMES.index(name), **content}

    async def _of_all(self, name: str, *arguments: Any) -> Any:
        asked = (self.engine_core._call_utility_async(name, *arguments, engine=each) for each in NAMES)
        return (await asyncio.gather(*asked))[0]

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self._of_all("sleep", level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        await self._of_all("wake_up", tags)

    async def reset_prefix_cache(self, *arguments: Any) -> bool:
        return bool(await self._of_all("reset_prefix_cache", *arguments))


class Server(World):
    """Two engines behind one front end."""

    client: Client

    def served_by(self) -> set[int]:
        answers = [self.post("/v1/completions").raise_for_status().json() for _ in range(4)]
        assert all(answer["weights"] for answer in answers)
        return {answer["engine"] for answer in answers}

    def begin(self, number: int, name: str) -> None:
        """Have a request run on an engine."""
        running = asyncio.Event()
        self.client.output_processor.request_states[name] = running
        self.client.cores[number].running[name] = running
        self.client.engine_core.reqs_in_flight[name] = NAMES[number]

    def states(self) -> dict[int, str]:
        now = self.http.get("/memory_occupation").json()
        return {rank["dp_rank"]: rank["state"] for rank in now["ranks"]}

    def wait_until_open(self, *numbers: int) -> None:
        wait_until(lambda: not any(self.client.cores[number].paused for number in numbers))


@pytest.fixture
def server(group: list[Rank]) -> Iterator[Server]:
    server = Server(group, Client)
    yield server
    server.close()


@pytest.mark.guards("a request during sleep hung or used released memory")
def test_the_others_serve_while_an_engine_is_released(server: Server, group: list[Rank]) -> None:
    """The engine that is asleep gets no request, although it has the fewest."""
    assert server.served_by() == {0, 1}
    server.client.engine_core.lb_engines[1] = [50, 0]
    answer = server.post("/release_memory_occupation", dp_ranks=[0]).raise_for_status().json()
    assert answer["released_bytes"] == sum(size for _, size in group[0].tags().values())
    assert (released(group[0]), released(group[1])) == (ALL, set())
    assert server.states() == {0: "released", 1: "resident"}
    assert server.served_by() == {1}
    assert server.http.get("/readyz").status_code == 200
    for path, headers in (("/v1/completions", {"X-data-parallel-rank": "0"}), ("/v1/load_lora_adapter", {})):
        refused = server.http.post(path, headers=headers)
        assert refused.status_code == 503
        assert "engine(s) 0 are released" in refused.json()["message"]
    assert server.client.cores[1].calls.count("sleep") == 0
    server.client.cores[1].calls.clear()
    assert server.post("/resume_memory_occupation", dp_ranks=[0]).json()["success"]
    server.wait_until_open(0)
    server.client.engine_core.lb_engines[1] = [1, 0]
    assert server.states() == {0: "resident", 1: "resident"}
    assert server.served_by() == {0, 1}
    assert server.client.cores[1].calls == []  # its cached prefixes are as they were
    assert "reset_prefix_cache" in server.client.cores[0].calls


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_an_engine_is_drained_by_itself(server: Server, group: list[Rank]) -> None:
    server.run(lambda: server.begin(0, "on-0"))
    server.run(lambda: server.begin(1, "on-1"))
    late = server.post("/release_memory_occupation", dp_ranks=[0], timeout_s=0.05)
    assert late.status_code == 504
    assert "on-0" in late.json()["message"]
    assert "on-1" not in late.json()["message"]
    server.wait_until_open(0)
    assert server.served_by() == {0, 1}
    assert server.post("/release_memory_occupation", dp_ranks=[0], mode="abort").json()["success"]
    assert list(server.client.cores[1].running) == ["on-1"]
    assert server.served_by() == {1}


def test_engines_are_released_and_resumed_one_after_the_other_and_together(server: Server, group: list[Rank]) -> None:
    for dp_ranks in ([0], []):
        server.post("/release_memory_occupation", dp_ranks=dp_ranks).raise_for_status()
    assert server.states() == {0: "released", 1: "released"}
    assert server.post("/v1/completions").status_code == 503
    server.post("/resume_memory_occupation", dp_ranks=[1]).raise_for_status()
    assert server.served_by() == {1}
    assert server.post("/pause_generation").json()["success"]
    assert server.client.cores[1].paused
    assert server.post("/continue_generation").json()["success"]
    server.wait_until_open(1)
    assert server.client.cores[0].paused
    assert server.served_by() == {1}
    server.post("/resume_memory_occupation").raise_for_status()
    server.wait_until_open(0)
    server.client.engine_core.lb_engines[:] = [[0, 0], [0, 0]]
    assert server.served_by() == {0, 1}
    server.post("/release_memory_occupation", dp_ranks=[0, 1]).raise_for_status()
    assert server.post("/v1/completions").status_code == 503


@pytest.mark.guards("one rank or device failed while the others went on")
def test_an_engine_that_cannot_be_released_serves_on(server: Server, group: list[Rank]) -> None:
    group[1].fail("unmap", "invalid_value", 1)
    failed = server.post("/release_memory_occupation", dp_ranks=[1])
    assert failed.status_code == 500
    assert "rank 1" in failed.json()["message"]
    server.wait_until_open(1)
    assert server.served_by() == {0, 1}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/release_memory_occupation", {"dp_ranks": [2]}, 400, "there are [0, 1]"),
        ("/resume_memory_occupation", {"dp_ranks": [2]}, 400, "there are [0, 1]"),
        ("/release_memory_occupation", {"dp_ranks": [0], "verify": "token"}, 400, "leave out dp_ranks"),
        ("/release_memory_occupation", {"dp_ranks": [0], "hibernate": True}, 400, "leave out hibernate or dp_ranks"),
        ("/sleep", {"dp_ranks": [0], "level": 2}, 409, "content of weights"),
        ("/sleep", {"dp_ranks": [0], "level": 0}, 400, "dp_ranks"),
    ],
)
def test_what_a_part_of_a_server_cannot_do(
    server: Server, group: list[Rank], path: str, body: dict[str, Any], status: int, said: str
) -> None:
    refused = server.post(path, **body)
    assert refused.status_code == status, refused.text
    assert said in refused.json()["message"]
    assert released(group[0]) == released(group[1]) == set()


def test_engines_that_step_together_are_not_released_alone(server: Server) -> None:
    """Those of a model with experts wait for each other in every step."""
    server.client.vllm_config.model_config.is_moe = True
    refused = server.post("/release_memory_occupation", dp_ranks=[0])
    assert refused.status_code == 409
    assert "each step together" in refused.json()["message"]
    planned = server.post("/release_memory_occupation", dp_ranks=[0], dry_run=True).json()
    assert "each step together" in planned["message"]
    server.client.vllm_config.model_config.is_moe = False
    planned = server.post("/release_memory_occupation", dp_ranks=[0], dry_run=True).json()
    whole = server.post("/release_memory_occupation", dry_run=True).json()
    sizes = [sum(tag["bytes"] for tag in plan["tags"]) for plan in (planned, whole)]
    assert 2 * sizes[0] == sizes[1] > 0


def test_a_server_with_one_engine_has_none_to_name(group: list[Rank]) -> None:
    world = World(group)
    try:
        refused = world.post("/release_memory_occupation", dp_ranks=[0])
        assert refused.status_code == 409
        assert "this server has one engine" in refused.json()["message"]
    finally:
        world.close()
