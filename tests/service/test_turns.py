"""Many callers share the event loop fairly, and reads go ahead of them."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

from pydantic import SecretStr
from starlette.types import Receive, Scope, Send

from memsaver_server import Settings
from memsaver_server.http.auth import caller_kind
from memsaver_server.http.fairness import REQUESTS_PER_ITERATION, FairnessMiddleware, FairQueue, Kind


def test_a_few_go_on_in_each_pass_in_their_order() -> None:
    async def crowd() -> None:
        queue, passes, order = FairQueue(), 0, []
        went: Counter[int] = Counter()

        def next_pass() -> None:
            nonlocal passes
            passes += 1
            asyncio.get_running_loop().call_soon(next_pass)

        async def one(number: int) -> None:
            await queue.wait()
            went[passes] += 1
            order.append(number)

        next_pass()
        for _ in range(2):  # the second crowd finds it as the first did
            await asyncio.gather(*(one(number) for number in range(5 * REQUESTS_PER_ITERATION)))
        assert order == [*range(5 * REQUESTS_PER_ITERATION)] * 2
        assert max(went.values()) <= REQUESTS_PER_ITERATION
        assert len(went) >= 10

    asyncio.run(crowd())


def test_one_that_is_alone_waits_for_nobody() -> None:
    async def alone() -> None:
        queue = FairQueue()
        going = queue.wait()
        try:
            going.send(None)
        except StopIteration:
            return
        raise AssertionError("it waited")

    asyncio.run(alone())


def test_one_that_went_away_takes_no_turn() -> None:
    async def crowd() -> None:
        queue = FairQueue()
        tasks = [asyncio.ensure_future(queue.wait()) for _ in range(4 * REQUESTS_PER_ITERATION)]
        await asyncio.sleep(0)
        for task in tasks[REQUESTS_PER_ITERATION : 3 * REQUESTS_PER_ITERATION]:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(each, asyncio.CancelledError) for each in ended) == 2 * REQUESTS_PER_ITERATION

    asyncio.run(crowd())


def test_who_only_looks_goes_past() -> None:
    async def requests() -> None:
        served: list[str] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            served.append(scope["method"])

        asgi = FairnessMiddleware(app, FairQueue(), partial(caller_kind, Settings()))

        async def ask(method: str) -> None:
            await asgi({"type": "http", "method": method}, None, None)  # type: ignore[arg-type]

        await asyncio.gather(*(ask("POST") for _ in range(10 * REQUESTS_PER_ITERATION)), ask("GET"))
        assert served.index("GET") == REQUESTS_PER_ITERATION
        assert served.count("POST") == 10 * REQUESTS_PER_ITERATION

    asyncio.run(requests())


def test_callers_without_a_key_take_every_other_turn_at_most() -> None:
    async def crowd() -> None:
        queue, order = FairQueue(), list[Kind]()

        async def one(kind: Kind) -> None:
            await queue.wait(kind)
            order.append(kind)

        await asyncio.gather(*(one("unknown") for _ in range(50)), *(one("changes") for _ in range(10)))
        assert order[: 4 * REQUESTS_PER_ITERATION].count("changes") >= REQUESTS_PER_ITERATION
        assert order.index("changes") <= 2 * REQUESTS_PER_ITERATION
        assert max(number for number, kind in enumerate(order) if kind == "changes") < 25

    asyncio.run(crowd())


def test_who_signs_is_not_behind_strangers() -> None:
    """Signatures are checked with the body, after a request had its turn."""

    async def requests() -> None:
        served: list[bytes] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            served.append(scope["headers"][0][0] if scope["headers"] else b"")

        asgi = FairnessMiddleware(app, FairQueue(), partial(caller_kind, Settings(api_key=SecretStr("key"))))

        async def ask(*headers: tuple[bytes, bytes]) -> None:
            await asgi({"type": "http", "method": "POST", "headers": headers}, None, None)  # type: ignore[arg-type]

        signature = b"x-trtllm-runtime-control-auth"
        await asyncio.gather(*(ask() for _ in range(10 * REQUESTS_PER_ITERATION)), ask((signature, b"sha256=0")))
        assert served.index(signature) <= 2 * REQUESTS_PER_ITERATION

    asyncio.run(requests())
