"""The clients against a running engine, over a lossy network."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import safetensors.torch
import torch

from memsaver_server.client import (
    AsyncClient,
    Client,
    ConflictError,
    InvalidRequestError,
    UnauthorizedError,
    UnavailableError,
    UnreachableError,
)

from .flaky_proxy import FlakyProxy, flaky_proxy
from .serving import Server, serving


@pytest.fixture
def proxy(server: Server) -> Iterator[FlakyProxy]:
    with flaky_proxy(server.url) as proxy:
        yield proxy


@pytest.mark.guards("the caller disconnected in the middle of an operation")
def test_a_lost_answer_is_asked_for_again_and_is_the_first_ones(client: Client, proxy: FlakyProxy) -> None:
    """The connection is lost in the middle; the operation completes, and the repeat gets its result."""
    before = len(client.operations())
    proxy.losses = ["answer"]
    with Client(proxy.url) as lossy:
        released = lossy.release()
    assert proxy.requests == 2
    assert released.released_bytes > 0
    assert not any(tag.already for tag in released.tags), "the repeat joined the operation instead of starting another"
    assert len(client.operations()) == before + 1


def test_connections_that_break_are_made_again(proxy: FlakyProxy) -> None:
    proxy.losses = ["connection", "connection"]
    with Client(proxy.url) as lossy:
        assert lossy.occupation().enabled
    assert proxy.requests == 1


def test_it_gives_up_and_says_where_it_looked(proxy: FlakyProxy) -> None:
    proxy.losses = ["connection"] * 3
    with Client(proxy.url, attempts=3) as lossy, pytest.raises(UnreachableError, match="3 attempts") as raised:
        lossy.occupation()
    assert raised.value.address == proxy.url


def test_a_generation_is_never_sent_twice(proxy: FlakyProxy) -> None:
    proxy.losses = ["answer"]
    with Client(proxy.url) as lossy, pytest.raises(UnreachableError):
        lossy.generate("once", max_new_tokens=2)
    assert proxy.requests == 1


def test_errors_are_classes(client: Client) -> None:
    with pytest.raises(InvalidRequestError, match="weights") as invalid:
        client.release(["wieghts"])
    assert invalid.value.kind == "unknown_tag"
    client.release()
    with pytest.raises(UnavailableError) as refused:
        client.generate("now", max_new_tokens=1)
    assert refused.value.retry_after_s is not None
    assert client.alive()
    assert not client.ready()


def test_scheduling_and_weights_have_their_calls(client: Client) -> None:
    client.flush_cache()
    client.pause_generation("wait")
    assert not client.ready()
    client.continue_generation()
    assert client.ready()
    with pytest.raises(InvalidRequestError, match="no such weight"):
        client.update_weights_from_tensor(safetensors.torch.save({"no such weight": torch.zeros(1)}))
    with pytest.raises(InvalidRequestError, match="nowhere"):
        client.update_weights_from_disk("/nowhere")
    client.release(["weights"], restore={"weights": "file"})
    with pytest.raises(ConflictError, match="resume"):
        client.update_weights_from_tensor(safetensors.torch.save({"lm_head.weight": torch.zeros(1)}))


def test_a_key_is_sent() -> None:
    with serving(changes={"MEMSAVER_API_KEY": "ключ"}) as server:
        with Client(server.url) as keyless, pytest.raises(UnauthorizedError):
            keyless.occupation()
        with Client(server.url, api_key="wrong") as wrong, pytest.raises(UnauthorizedError):
            wrong.release()
        with Client(server.url, api_key="ключ") as right:
            assert right.release().success


def test_started_operations_are_followed_by_their_events(client: Client) -> None:
    accepted = client.start_release(["kv_cache"])
    events = list(client.events(accepted.operation_id))
    assert events[-1].name == "done"
    assert "drain" in [event.data["name"] for event in events if event.name == "phase_done"]
    operation = client.operation(accepted.operation_id)
    assert operation.status == "succeeded"
    assert client.start_resume().operation == "resume"


def test_the_async_client_does_the_same(server: Server, proxy: FlakyProxy) -> None:
    async def rounds() -> None:
        proxy.losses = ["answer"]
        async with AsyncClient(proxy.url) as lossy, AsyncClient(server.url) as client:
            before = await client.generate("async", max_new_tokens=8, temperature=0)
            released = await lossy.release()
            assert released.released_bytes > 0
            assert proxy.requests == 2
            assert await client.alive()
            assert not await client.ready()
            with pytest.raises(UnavailableError):
                await client.generate("async", max_new_tokens=1)
            accepted = await client.start_resume()
            names = [event.name async for event in client.events(accepted.operation_id)]
            assert names[-1] == "done"
            assert (await client.occupation()).state == "resident"
            after = await client.generate("async", max_new_tokens=8, temperature=0)
            assert after["output_ids"] == before["output_ids"]
            with pytest.raises(InvalidRequestError):
                await client.release(["wieghts"])

    asyncio.run(rounds())


def test_both_clients_offer_the_same_methods() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)
