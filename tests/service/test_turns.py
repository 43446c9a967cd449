"""Many callers share the event loop fairly, and reads go ahead of them."""

from __future__ import annotations

import asyncio
from collections import Counter

from starlette.types import Receive, Scope, Send

from memsaver_server.http.fairness import TURNS, TakeTurns, Turns


def test_a_few_go_on_in_each_pass_in_their_order() -> None:
    async def crowd() -> None:
        turns, passes, order = Turns(), 0, []
        went: Counter[int] = Counter()

        def next_pass() -> None:
            nonlocal passes
            passes += 1
            asyncio.get_running_loop().call_soon(next_pass)

        async def one(number: int) -> None:
            await turns.wait()
            went[passes] += 1
            order.append(number)

        next_pass()
        for _ in range(2):  # the second crowd finds it as the first did
            await asyncio.gather(*(one(number) for number in range(5 * TURNS)))
        assert order == [*range(5 * TURNS)] * 2
        assert max(went.values()) <= TURNS
        assert len(went) >= 10

    asyncio.run(crowd())


def test_one_that_is_alone_waits_for_nobody() -> None:
    async def alone() -> None:
        turns = Turns()
        going = turns.wait()
        try:
            going.send(None)
        except StopIteration:
            return
        raise AssertionError("it waited")

    asyncio.run(alone())


def test_one_that_went_away_takes_no_turn() -> None:
    async def crowd() -> None:
        turns = Turns()
        tasks = [asyncio.ensure_future(turns.wait()) for _ in range(4 * TURNS)]
        await asyncio.sleep(0)
        for task in tasks[TURNS : 3 * TURNS]:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(each, asyncio.CancelledError) for each in ended) == 2 * TURNS

    asyncio.run(crowd())


def test_who_only_looks_goes_past() -> None:
    async def requests() -> None:
        served: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            served.append(scope["method"])

        asgi = TakeTurns(app, Turns())

        async def ask(method: str) -> None:
            await asgi({"type": "http", "method": method}, None, None)  # type: ignore[arg-type]

        await asyncio.gather(*(ask("POST") for _ in range(10 * TURNS)), ask("GET"))
        assert served.index("GET") == TURNS
        assert served.count("POST") == 10 * TURNS

    asyncio.run(requests())
