"""memsaver's service in the first of two tensor-parallel ranks of tokenspeed."""

from __future__ import annotations

from tests.engine_server import prompts

from .conftest import Start
from .server import NO_PREFIXES


def test_two_ranks(start: Start) -> None:
    server = start(NO_PREFIXES, "--tensor-parallel-size", "2", MEMSAVER_DRAIN_TIMEOUT_S="60")
    expected = [server.generate(60, prompt) for prompt in prompts(4)]
    for call in (server.own, server.service):
        running = server.in_background(4, 60)
        call("/release_memory_occupation")
        assert [each.result(60) for each in running] == expected
        occupation = server.get("/memory_occupation").json()
        assert [rank["rank"] for rank in occupation["ranks"]] == [0, 1]
        assert {rank["state"] for rank in occupation["ranks"]} == {"released"}
        call("/resume_memory_occupation")
        assert server.generate(60, prompts(1)[0]) == expected[0]
    refused = server.service("/release_memory_occupation", {"hibernate": True}, status=409)
    assert "share device memory" in refused["message"]
    assert not server.is_dead()
