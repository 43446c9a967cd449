"""Two engines that do not fit on their device together take turns, request by request."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from threading import Event

os.environ.setdefault("MEMSAVER_DRIVER", "host")

import httpx
import pytest
import uvicorn

from memsaver_server.fleet import Member, StaticMembership
from memsaver_server.fleet.turns import proxy, upstream
from memsaver_server.fleet.turns.options import ModelOptions, TurnOptions
from memsaver_server.fleet.turns.slot import Slot, victims
from tests.fleet.served_fleet import TRUST, served
from tests.fleet.wire import Loop, Wire
from tests.programs import Child
from tests.waiting import wait_until

MIB = 1 << 20
#: Of the device; each engine takes 40 MiB.
CAPACITY = 64 * MIB
PROMPT = [3, 5, 8]


class Engine(Child):
    """One engine in a process of its own."""

    def __init__(self, model: str, device: dict[str, str]) -> None:
        super().__init__("-m", "tests.fleet.turns_engine", model, "40", **device)
        self.model = model
        self.device = device

    def load(self) -> None:
        self.http = httpx.Client(base_url=self.ask("load"), timeout=600, verify=False)

    @property
    def member(self) -> Member:
        return Member(self.model, str(self.http.base_url))

    def seen(self, what: str) -> int:
        return self.http.get("/v1/seen").json().get(what, 0)

    def state(self) -> str:
        return self.http.get("/memory_occupation").json()["state"]

    def is_free(self) -> bool:
        """Whether no request is in it."""
        return self.seen("begun") == self.seen("ended") + self.seen("cancelled")


@pytest.fixture(scope="module")
def loaded() -> Iterator[tuple[Engine, Engine]]:
    device = {
        "MEMSAVER_DRIVER": "host",
        "MEMSAVER_HOST_DEVICE": f"turns-{uuid.uuid4().hex[:8]}",
        "MEMSAVER_HOST_CAPACITY": str(CAPACITY),
    }
    with Engine("alpha", device) as alpha, Engine("beta", device) as beta:
        for engine in (alpha, beta):
            assert engine.read_line() == "ready"
        alpha.load()
        alpha.http.post("/release_memory_occupation").raise_for_status()
        beta.load()
        yield alpha, beta


@pytest.fixture
def engines(loaded: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """``alpha`` asleep, ``beta`` awake."""
    alpha, beta = loaded
    alpha.http.post("/release_memory_occupation").raise_for_status()
    beta.http.post("/resume_memory_occupation").raise_for_status()
    for engine in loaded:
        engine.ask("hold")
    return alpha, beta


def turns(engines: tuple[Engine, Engine], **options: object) -> object:
    given = {"awake_s": 0.0, **options}
    return served([engine.member for engine in engines], {"*": ModelOptions.model_validate(given)})


def asked(model: str, **more: object) -> dict[str, object]:
    return {"model": model, "prompt": PROMPT, **more}


def tokens(http: httpx.Client, model: str, **more: object) -> list[int]:
    answer = http.post("/v1/completions", json=asked(model, **more))
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["tokens"]


def waiting(http: httpx.Client, model: str) -> float:
    lines = http.get("/metrics").text.splitlines()
    name = f'memsaver_fleet_waiting_requests{{model="{model}"}} '
    return next((float(line.removeprefix(name)) for line in lines if line.startswith(name)), 0.0)


def test_a_request_wakes_its_model_and_the_other_makes_room(engines: tuple[Engine, Engine]) -> None:
    alpha, beta = engines
    expected = tokens(beta.http, "beta")
    with turns(engines) as http:
        for _ in range(3):
            first = tokens(http, "alpha")
            assert (alpha.state(), beta.state()) == ("resident", "released")
            assert tokens(http, "beta") == expected
            assert (alpha.state(), beta.state()) == ("released", "resident")
            assert tokens(http, "alpha") == first != expected
        listed = http.get("/v1/models").json()["data"]
        assert [(model["id"], model["engines"][0]["state"]) for model in listed] == [
            ("alpha", "awake"),
            ("beta", "asleep"),
        ]
        operations = http.get("/operations").json()["operations"]
        assert {each["status"] for each in operations} == {"succeeded"}
        assert {each["client"] for each in operations} == {"turns"}
        assert 'memsaver_fleet_wakes_total{model="alpha"} 4.0' in http.get("/metrics").text


def test_a_stream_comes_byte_for_byte_as_it_is_made(engines: tuple[Engine, Engine]) -> None:
    alpha, beta = engines
    body = asked("beta", stream=True, max_tokens=50)
    direct = beta.http.post("/v1/completions", json=body)
    with turns(engines) as http:
        assert http.post("/v1/completions", json=body).content == direct.content
        assert direct.content.endswith(b"data: [DONE]\n\n")
        with http.stream("POST", "/v1/completions", json=asked("alpha", stream=True, hold=True)) as answer:
            assert answer.headers["x-memsaver-engine"] == "alpha"
            assert answer.headers["content-type"].startswith("text/event-stream")
            parts = answer.iter_raw()
            assert next(parts).startswith(b"data: ")  # while the engine makes no other
            alpha.ask("go")
            assert b"".join(parts).endswith(b"data: [DONE]\n\n")


def test_a_client_that_goes_away_is_noticed_by_the_engine(engines: tuple[Engine, Engine]) -> None:
    _, beta = engines
    before = beta.seen("cancelled")
    with turns(engines) as http:
        with http.stream("POST", "/v1/completions", json=asked("beta", stream=True, hold=True)) as answer:
            next(answer.iter_raw())
        wait_until(lambda: beta.seen("cancelled") == before + 1)
        wait_until(beta.is_free)
        tokens(http, "alpha")  # beta makes room: none of its requests counts as in flight


def test_a_client_that_reads_nothing_gives_its_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no other model would get the engine's memory, and its own no turn either while another waits."""
    monkeypatch.setattr(proxy, "UNREAD_S", 0.05)
    ended: list[bool] = []

    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield b"data: 1"

    async def never(*_: object) -> None:
        await asyncio.sleep(3600)

    async def send(message: dict[str, object]) -> None:
        if "body" in message:
            await never()

    answer = proxy.Relayed(httpx.Response(200, content=chunks()), [], lambda: ended.append(True))
    asyncio.run(asyncio.wait_for(answer({}, never, send), 60))
    assert ended == [True]


@pytest.mark.parametrize("steps", range(6))
def test_a_client_that_leaves_between_two_chunks_is_not_overheard(steps: int) -> None:
    """Whatever the relay does when it is cancelled, ``steps`` of the event loop after the client has left."""
    sent: list[object] = []
    ended: list[bool] = []

    async def leaving() -> None:
        left = asyncio.Event()

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(1000):
                await asyncio.sleep(0)
                yield b"data: 1"

        async def receive() -> dict[str, str]:
            await left.wait()
            for _ in range(steps):
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message: object) -> None:
            sent.append(message)
            left.set()

        upstream = httpx.Response(200, content=chunks())
        await proxy.Relayed(upstream, [], lambda: ended.append(True))({}, receive, send)  # type: ignore[arg-type]

    asyncio.run(leaving())
    assert ended == [True]
    assert len(sent) < 100


def test_an_answer_that_breaks_off_is_no_error_of_the_coordinator() -> None:
    ended: list[bool] = []
    sent: list[dict[str, object]] = []

    async def chunks() -> AsyncIterator[bytes]:
        yield b"data: 1"
        raise httpx.RemoteProtocolError("the engine's process has ended")

    async def receive() -> None:
        await asyncio.sleep(3600)

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    answer = proxy.Relayed(httpx.Response(200, content=chunks()), [], lambda: ended.append(True))
    asyncio.run(answer({}, receive, send))
    assert ended == [True]
    assert [message.get("more_body") for message in sent] == [None, True], "else it would look whole"


def test_connections_wait_less_than_servers_and_go_with_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that closes a connection as a request comes would make it a 502, and its engine count as dead."""
    assert uvicorn.Config("").timeout_keep_alive > upstream.IDLE_S
    monkeypatch.setattr(upstream, "UNUSED_S", -1.0)

    async def used() -> None:
        closed = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await reader.read()
            closed.set()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            upstreams = upstream.Upstreams(TRUST)
            answer = await (await upstreams.to(url, None)).send("GET", b"/", [], b"")
            await upstreams.to(f"{url}/other", None)
            assert await answer.aread() == b"ok", "it was not closed under the request"
            await upstreams.to(f"{url}/third", None)
            await asyncio.wait_for(closed.wait(), 60)
            await upstreams.close()

    asyncio.run(used())


def test_a_client_that_goes_away_while_it_waits_wakes_nobody(engines: tuple[Engine, Engine]) -> None:
    alpha, beta = engines
    with turns(engines) as http, ThreadPoolExecutor(1) as pool:
        busy = pool.submit(tokens, http, "beta", hold=True)
        wait_until(lambda: not beta.is_free())
        with pytest.raises(httpx.ReadTimeout):
            http.post("/v1/completions", json=asked("alpha"), timeout=0.3)
        wait_until(lambda: not waiting(http, "alpha"))
        beta.ask("go")
        busy.result()
        assert tokens(http, "beta", max_tokens=1)
        assert (alpha.state(), beta.state()) == ("released", "resident")


def test_no_model_starves_while_another_is_asked_for_without_end(engines: tuple[Engine, Engine]) -> None:
    """Requests for each model by several callers, who repeat at once: all make progress, all tokens are right."""
    rounds, callers = 3, 2
    stop = Event()

    def ask(http: httpx.Client, model: str) -> list[list[int]]:
        found = [tokens(http, model)]
        while len(found) < rounds or not stop.is_set():
            found.append(tokens(http, model))
        return found

    with turns(engines) as http, ThreadPoolExecutor(2 * callers) as pool:
        crowd: dict[str, list[Future[list[list[int]]]]] = {
            model: [pool.submit(ask, http, model) for _ in range(callers)] for model in ("alpha", "beta")
        }
        for model in ("alpha", "beta"):
            for _ in range(rounds):
                assert tokens(http, model)
        stop.set()
        for answers in crowd.values():
            found = [one for answer in answers for one in answer.result()]
            assert all(one == found[0] for one in found)


def test_a_full_queue_refuses_with_a_time_to_come_back(engines: tuple[Engine, Engine]) -> None:
    _, beta = engines
    with turns(engines, queue_limit=2) as http, ThreadPoolExecutor(3) as pool:
        busy = pool.submit(tokens, http, "beta", hold=True)
        wait_until(lambda: not beta.is_free())
        queued = [pool.submit(tokens, http, "alpha") for _ in range(2)]
        wait_until(lambda: waiting(http, "alpha") == 2)
        refused = http.post("/v1/completions", json=asked("alpha"))
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "queue_full"
        assert int(refused.headers["Retry-After"]) >= 1
        beta.ask("go")
        assert all(each.result() for each in (busy, *queued))


def test_an_engine_stays_awake_for_its_time(engines: tuple[Engine, Engine]) -> None:
    alpha, beta = engines
    with turns(engines, awake_s=3600, wait_s=0.3) as http:
        refused = http.post("/v1/completions", json=asked("alpha"))
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "no_turn"
        assert int(refused.headers["Retry-After"]) > 3000
        assert (alpha.state(), beta.state()) == ("released", "resident")
        assert tokens(http, "beta")


def test_an_idle_engine_is_released_and_comes_back(engines: tuple[Engine, Engine]) -> None:
    _, beta = engines
    with turns(engines, idle_release_s=0.2) as http:
        expected = tokens(http, "beta")
        wait_until(lambda: beta.state() == "released")
        assert tokens(http, "beta") == expected


def test_what_another_released_is_found_out_and_woken(engines: tuple[Engine, Engine]) -> None:
    _, beta = engines
    with turns(engines) as http:
        expected = tokens(http, "beta")
        begun = beta.seen("begun")
        beta.http.post("/release_memory_occupation").raise_for_status()
        assert tokens(http, "beta") == expected
        assert beta.seen("begun") == begun + 1


def test_what_a_caller_released_stays_so_until_it_is_resumed(engines: tuple[Engine, Engine]) -> None:
    """A trainer that uses the memory must not lose it to a request."""
    _, beta = engines
    with turns(engines) as http:
        released = {"model": "beta", "operation_id": "turn-1"}
        http.post("/release_memory_occupation", json=released).raise_for_status()
        refused = http.post("/v1/completions", json=asked("beta"))
        assert refused.status_code == 503
        assert "has to resume it" in refused.json()["message"]
        assert int(refused.headers["Retry-After"]) >= 1
        assert beta.state() == "released"
        http.post("/resume_memory_occupation", json={"model": "beta"}).raise_for_status()
        assert tokens(http, "beta")
        until_asked = {"model": "beta", "wake_on_request": True}
        http.post("/release_memory_occupation", json=until_asked).raise_for_status()
        assert beta.state() == "released"
        assert tokens(http, "beta")


def test_members_that_cannot_be_read_are_logged_in_a_sentence(
    engines: tuple[Engine, Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was a traceback for each request, as of an error in the program. And requests waited for others to make room,
    which they cannot then."""
    path, line = tmp_path / "members.yaml", "- {{name: {0.name}, url: '{0.url}', model: {0.name}}}\n"
    path.write_text("".join(line.format(engine.member) for engine in engines))
    with served(StaticMembership(path), {"*": ModelOptions(awake_s=3600, wait_s=60)}) as http:
        assert tokens(http, "beta")
        path.write_text("no list")
        for _ in range(2):
            refused = http.post("/v1/completions", json=asked("alpha"))
            assert refused.status_code == 503
            assert "no memory can be moved now: " in refused.json()["message"]
            assert tokens(http, "beta")
        said = "the states of the engines cannot be read: "
        logged = lambda: [each for each in caplog.records if each.message.startswith(said)]  # noqa: E731
        wait_until(logged)  # written by a thread
    assert [(each.exc_info, f"{path} is no list of members" in each.message) for each in logged()] == [(None, True)]
    assert not any(each.message.startswith("turns: ") for each in caplog.records)


def exclude(http: httpx.Client, model: str) -> None:
    """Demand a version of the weights that the model's engine does not have."""
    version = {"model": model, "weights_version": "step-2", "fleet_mode": "best_effort"}
    assert http.post("/resume_memory_occupation", json=version).status_code == 409


def test_a_request_wakes_no_weights_that_a_caller_excluded(engines: tuple[Engine, Engine]) -> None:
    alpha, _ = engines
    with turns(engines) as http:
        exclude(http, "alpha")
        assert http.post("/v1/completions", json=asked("alpha")).status_code == 503
        assert alpha.state() == "released"


def test_weights_that_a_caller_excluded_serve_no_request(engines: tuple[Engine, Engine]) -> None:
    """An engine of the excluded version got requests if it was resident, as one that has started anew is."""
    _, beta = engines
    begun = beta.seen("begun")
    with turns(engines) as http:
        exclude(http, "beta")
        why = "its weights have no version, and a resume demanded 'step-2'"
        refused = http.post("/v1/completions", json=asked("beta"))
        assert (refused.status_code, why in refused.json()["message"]) == (503, True)
        rows = http.get("/memory_occupation").json()["engines"]
        assert {row["name"]: why in row["error"] for row in rows} == {"alpha": False, "beta": True}
        assert (beta.state(), beta.seen("begun")) == ("resident", begun)
        http.post("/resume_memory_occupation", json={"model": "beta"}).raise_for_status()
        assert tokens(http, "beta")


def test_a_sleep_until_asked_does_not_forget_what_a_caller_excluded(engines: tuple[Engine, Engine]) -> None:
    """The next request woke the engine whatever its weights were."""
    _, beta = engines
    with turns(engines) as http:
        exclude(http, "beta")
        until_asked = {"model": "beta", "wake_on_request": True}
        for _ in range(2):
            http.post("/release_memory_occupation", json=until_asked).raise_for_status()
            assert http.post("/v1/completions", json=asked("beta")).status_code == 503
            assert beta.state() == "released"
        http.post("/resume_memory_occupation", json={"model": "beta"}).raise_for_status()
        sizes = set()
        for _ in range(3):
            http.post("/release_memory_occupation", json=until_asked).raise_for_status()
            assert tokens(http, "beta")
            sizes.add(len(http.get("/memory_occupation").json()["wanted"]))
        assert len(sizes) == 1, "each sleep adds to the record"


def test_a_paused_engine_gets_no_request_before_it_continues(engines: tuple[Engine, Engine]) -> None:
    _, beta = engines
    with turns(engines) as http, ThreadPoolExecutor(1) as pool:
        http.post("/pause_generation", json={"model": "beta"}).raise_for_status()
        assert http.get("/is_paused", params={"model": "beta"}).json()["is_paused"] is True
        asking = pool.submit(tokens, http, "beta")
        wait_until(lambda: waiting(http, "beta") == 1)
        assert beta.http.get("/readyz").status_code == 503
        assert beta.is_free()
        http.post("/continue_generation", json={"model": "beta"}).raise_for_status()
        assert asking.result()


def state(http: httpx.Client, model: str) -> str:
    """Of its engine, as the turns see it."""
    (listed,) = [each for each in http.get("/v1/models").json()["data"] if each["id"] == model]
    return listed["engines"][0]["state"]


def test_nobody_makes_room_for_weights_that_are_being_written(engines: tuple[Engine, Engine]) -> None:
    """The other was released at once, and neither served until the update had ended."""
    alpha, beta = engines
    with turns(engines) as http, ThreadPoolExecutor(2) as pool:
        updating = pool.submit(alpha.http.post, "/update_weights_from_disk", json={"model_path": "any"})
        try:
            wait_until(lambda: alpha.http.get("/memory_occupation").json()["updating"])
            asking = pool.submit(tokens, http, "alpha")
            wait_until(lambda: waiting(http, "alpha") == 1)
            wait_until(lambda: state(http, "alpha") == "closed")
            assert http.get("/memory_occupation").json()["updating"]
            assert tokens(http, "beta")
            assert not asking.done()
            assert http.get("/operations").json()["operations"] == []
        finally:
            alpha.ask("go")
        assert updating.result().is_success
        assert asking.result()
        assert (alpha.state(), beta.state()) == ("resident", "released")


def test_an_engine_that_comes_back_while_a_caller_keeps_it_released_gets_no_request(
    engines: tuple[Engine, Engine],
) -> None:
    """It served until the reconciler had released it, which its requests could put off for ever."""
    _, beta = engines
    with turns(engines) as http:
        http.post("/release_memory_occupation", json={"model": "beta"}).raise_for_status()
        begun = beta.seen("begun")
        for _ in range(5):
            beta.http.post("/resume_memory_occupation", json={"wait": True}).raise_for_status()  # as a new process is
            http.get("/memory_occupation").raise_for_status()  # looks at it
            refused = http.post("/v1/completions", json=asked("beta"))
            assert (refused.status_code, "a caller has released it" in refused.text) == (503, True)
        assert beta.seen("begun") == begun


def test_weights_that_are_lost_serve_no_request(engines: tuple[Engine, Engine]) -> None:
    """A request waited for as long as it may, and nothing named the engine."""
    _, beta = engines
    with turns(engines, wait_s=60) as http, ThreadPoolExecutor(2) as pool:
        discarded = {"model": "beta", "restore": {"weights": "discard"}}
        http.post("/release_memory_occupation", json=discarded).raise_for_status()
        http.post("/resume_memory_occupation", json={"model": "beta"}).raise_for_status()
        why = beta.http.get("/memory_occupation").json()["admission"]["reason"]
        assert "POST /content_written" in why
        refused = http.post("/v1/completions", json=asked("beta"))
        assert (refused.status_code, f"no engine of 'beta' can serve now: beta: it serves no request: {why}") == (
            503,
            refused.json()["message"],
        )
        rows = {row["name"]: row["error"] for row in http.get("/memory_occupation").json()["engines"]}
        assert rows == {"alpha": "", "beta": f"it serves no request: {why}"}
        updating = pool.submit(beta.http.post, "/update_weights_from_disk", json={"model_path": "any"})
        try:
            wait_until(lambda: http.get("/memory_occupation").json()["updating"])
            asking = pool.submit(tokens, http, "beta")
            wait_until(lambda: waiting(http, "beta") == 1)
        finally:
            beta.ask("go")
        assert updating.result().is_success
        assert asking.result()
        assert not any(row["error"] for row in http.get("/memory_occupation").json()["engines"])


def test_an_engine_that_serves_nothing_takes_no_memory(engines: tuple[Engine, Engine]) -> None:
    """Neither is it woken, so that another goes, nor does it keep memory that another needs."""
    alpha, beta = engines
    with turns(engines, wait_s=60) as http:
        discarded = {"model": "beta", "restore": {"weights": "discard"}, "wake_on_request": True}
        http.post("/release_memory_occupation", json=discarded).raise_for_status()
        assert tokens(http, "alpha")
        refused = http.post("/v1/completions", json=asked("beta"))
        assert (refused.status_code, "POST /content_written" in refused.text) == (503, True), refused.text
        assert (alpha.state(), beta.state()) == ("resident", "released")
        http.post("/release_memory_occupation", json={"model": "alpha", "wake_on_request": True}).raise_for_status()
        http.post("/resume_memory_occupation", json={"model": "beta"}).raise_for_status()
        assert tokens(http, "alpha")
        assert (alpha.state(), beta.state()) == ("resident", "released")
    for engine, call in (
        (alpha, "release_memory_occupation"),
        (beta, "resume_memory_occupation"),
        (beta, "content_written"),
    ):
        engine.http.post(f"/{call}").raise_for_status()


def test_no_request_waits_for_what_was_prepared_while_a_caller_keeps_an_engine_released(
    engines: tuple[Engine, Engine],
) -> None:
    _, beta = engines
    with turns(engines, wait_s=60) as http:
        http.post("/release_memory_occupation", json={"model": "beta"}).raise_for_status()
        prepare = {"prepare": True, "lease_s": 600}
        prepared = beta.http.post("/resume_memory_occupation", json=prepare, headers={"Idempotency-Key": "k"})
        prepared.raise_for_status()
        wait_until(lambda: "prepared" in str(http.get("/memory_occupation").json()["engines"]))
        refused = http.post("/v1/completions", json=asked("beta"))
        assert (refused.status_code, "a caller has released it" in refused.text) == (503, True), refused.text
        abort = f"/operations/{prepared.json()['operation_id']}/abort"
        beta.http.post(abort, headers={"Idempotency-Key": "k"}).raise_for_status()


def test_no_request_meets_weights_that_an_update_brings_against_a_demand(engines: tuple[Engine, Engine]) -> None:
    """Until all engines had written theirs, those that were done served what nobody had demanded."""
    alpha, beta = engines
    beta.ask("go")
    with turns(engines) as http, ThreadPoolExecutor(2) as pool:
        update = {"model_path": "any", "weight_version": "step-1"}
        http.post("/update_weights_from_disk", json={**update, "model": "beta"}).raise_for_status()
        demand = {"model": "beta", "weights_version": "step-1"}
        http.post("/resume_memory_occupation", json=demand).raise_for_status()
        assert tokens(http, "beta")
        begun = beta.seen("begun")
        updating = pool.submit(http.post, "/update_weights_from_disk", json={**update, "weight_version": "step-2"})
        try:
            version = lambda: beta.http.get("/memory_occupation").json()["weights_version"]  # noqa: E731
            wait_until(lambda: version() == "step-2")
            asking = pool.submit(http.post, "/v1/completions", json=asked("beta"))
            wait_until(lambda: waiting(http, "beta") == 1 or asking.done())
            assert not updating.done()
        finally:
            alpha.ask("go")
        assert updating.result().is_success, updating.result().text
        assert (asking.result().status_code, beta.seen("begun")) == (503, begun)


def test_memory_that_others_hold_is_told_and_tried_anew(engines: tuple[Engine, Engine]) -> None:
    """A trainer outside the fleet takes so much that the model would not fit if all other engines were released."""
    alpha, beta = engines
    beta.http.post("/release_memory_occupation").raise_for_status()
    with turns(engines) as http:
        with Child(
            str(Path(__file__).parents[1] / "service/served.py"), "trainer", str(32 * MIB), **alpha.device
        ) as trainer:
            assert trainer.read_line()
            refused = http.post("/v1/completions", json=asked("beta"))
            assert (refused.status_code, refused.json()["error"]["type"]) == (503, "no_turn")
            assert f"needs {40 * MIB} bytes" in refused.json()["message"]
            assert int(refused.headers["Retry-After"]) >= 1
        assert tokens(http, "beta")


def test_an_engine_that_does_not_answer_delays_nobody(engines: tuple[Engine, Engine]) -> None:
    """Its connections are accepted and never answered, as by a host that hangs."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hung = Member("hung", f"http://127.0.0.1:{silent.getsockname()[1]}", model="alpha")
        with served(
            [*(engine.member for engine in engines), hung], {"*": ModelOptions(awake_s=0)}, silence_s=60
        ) as http:
            for _ in range(2):
                assert tokens(http, "alpha", max_tokens=2) != tokens(http, "beta", max_tokens=2)
            rows = http.get("/memory_occupation").json()["engines"]
            assert [row["name"] for row in rows if row["alive"]] == ["alpha", "beta"]


def test_a_model_is_woken_beside_an_engine_that_hangs(engines: tuple[Engine, Engine]) -> None:
    """Which was seen on the same GPU before, released: all memory is there."""
    alpha, beta = engines
    beta.http.post("/release_memory_occupation").raise_for_status()
    loop = Loop()
    wire = Wire(str(beta.http.base_url), loop.loop)
    members = [alpha.member, Member("beta", wire.url)]
    with served(members, {"*": ModelOptions(awake_s=0)}, silence_s=36000) as http:
        http.get("/memory_occupation").raise_for_status()
        wire.silence()
        for _ in range(2):
            answer = http.post("/v1/completions", json=asked("alpha"), timeout=60)
            assert answer.status_code == 200, answer.text
            http.post("/release_memory_occupation", json={"model": "alpha", "wake_on_request": True}, timeout=60)
        wire.heal()
    wire.close()
    loop.close()


def test_a_swap_that_fails_leaves_the_other_awake(engines: tuple[Engine, Engine]) -> None:
    """The engine that had made room stayed released."""
    alpha, beta = engines
    loop = Loop()
    wire = Wire(str(alpha.http.base_url), loop.loop)
    try:
        wire.on("POST /resume_memory_occupation", "reset")
        with served([Member("alpha", wire.url), beta.member]) as http:
            released = beta.seen("begun")
            expected = tokens(http, "beta")
            refused = http.post("/v1/completions", json=asked("alpha"))
            assert (refused.status_code, "alpha was not woken" in refused.text) == (503, True), refused.text
            wait_until(lambda: (alpha.state(), beta.state()) == ("released", "resident"))
            assert tokens(http, "beta") == expected
            assert beta.seen("begun") == released + 2
    finally:
        wire.close()
        loop.close()


def test_those_idle_longest_make_room_first_and_no_more_than_needed() -> None:
    def slot(name: str, gpus: str, resident: int, released: int, used: float, busy: int = 0) -> Slot:
        made = Slot(name)
        made.gpus, made.resident_bytes, made.released_bytes = tuple(gpus), resident, released
        made.state, made.last_used, made.in_flight = "awake" if resident else "asleep", used, busy
        made.free = dict.fromkeys(gpus, 10)
        return made

    wanted = slot("wanted", "xy", 0, 100, 0)  # 50 on each, of which 10 are free
    old = slot("old", "x", 30, 0, used=1)
    new = slot("new", "x", 30, 0, used=2)
    busy = slot("busy", "x", 90, 0, used=0, busy=1)
    both = slot("both", "xy", 80, 0, used=9)
    elsewhere = slot("elsewhere", "z", 500, 0, used=0)

    def chosen(*others: Slot) -> list[str] | None:
        found = victims(wanted, [wanted, *others])
        return None if found is None else [each.name for each in found]

    assert chosen(new, old, busy, both, elsewhere) == ["old", "new", "both"]
    assert chosen(busy, both) == ["both"]
    assert chosen(busy, elsewhere) is None
    wanted.released_bytes = 20
    assert chosen(old, both) == []
    wanted.extra = 1  # it did not fit: others hold more than they say
    assert chosen(new, old, both) == ["old"]


def test_requests_that_name_no_model_of_the_fleet(engines: tuple[Engine, Engine]) -> None:
    gone = Member("gone", "http://127.0.0.1:9", model="gone")
    with served([*(engine.member for engine in engines), gone]) as http:
        unknown = http.post("/v1/completions", json=asked("gamma"))
        assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "model_not_found")
        assert "'alpha', 'beta'" in unknown.json()["message"]
        nameless = http.post("/v1/completions", json={"prompt": PROMPT})
        assert nameless.status_code == 400
        assert "'alpha', 'beta'" in nameless.json()["message"]
        dead = http.post("/v1/completions", json=asked("gone"))
        assert (dead.status_code, dead.json()["error"]["type"]) == (503, "no_turn")
        assert int(dead.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("target", ["/v1/completions#f", "/v1/completions?x=#", "/v1/#"])
def test_a_target_with_a_fragment_is_refused(engines: tuple[Engine, Engine], target: str) -> None:
    with turns(engines) as http:
        connection = HTTPConnection(http.base_url.host, http.base_url.port, timeout=600)
        with closing(connection):
            connection.request("POST", target, json.dumps(asked("alpha")), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert (answer.status, json.loads(answer.read())["error"]["type"]) == (400, "bad_request")
        assert engines[0].state() == "released"


def test_options_of_models_come_from_the_list_of_members(tmp_path: Path) -> None:
    file = tmp_path / "members.yaml"
    file.write_text(
        "members: [http://a:1]\nmodels:\n  qwen: {idle_release_s: 60, awake_s: 2}\n  '*': {queue_limit: 3}\n"
    )
    options = TurnOptions.read(file)
    assert options.of("qwen") == ModelOptions(idle_release_s=60, awake_s=2)
    assert options.of("llama") == ModelOptions(queue_limit=3)
    file.write_text("models: {qwen: {idle: 60}}")
    with pytest.raises(ValueError, match=r"model 'qwen' in .*: idle does not exist; the options are idle_release_s, "):
        TurnOptions.read(file)
    file.write_text("- http://a:1\n")
    assert TurnOptions.read(file).of("qwen") == ModelOptions()
