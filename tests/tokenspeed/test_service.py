"""memsaver's service in a real tokenspeed scheduler."""

from __future__ import annotations

import grpc
import pytest

from tests.engine_server import prompts

from .server import Server


def test_release_and_resume(server: Server) -> None:
    expected = server.generate()
    for _ in range(3):
        server.service("/release_memory_occupation")
        assert server.tags() == {"kv_cache": "released", "weights": "released", "workspace": "released"}
        with pytest.raises(grpc.RpcError, match="is released"):
            server.generate()
        assert server.get("/readyz").status_code == 503
        assert server.is_healthy()
        server.service("/resume_memory_occupation")
        assert server.generate() == expected


def test_one_tag(server: Server) -> None:
    expected = server.generate()
    for tag in ("weights", "kv_cache"):
        server.service("/release_memory_occupation", {"tags": [tag]})
        assert server.tags()[tag] == "released"
        server.own("/resume_memory_occupation")
        assert server.generate() == expected


def test_a_workspace_that_no_client_names(server: Server) -> None:
    """It is released with everything, and comes back with the last of the tags that clients name."""
    expected = server.generate()
    server.service("/release_memory_occupation")
    server.service("/resume_memory_occupation", {"tags": ["weights"]})
    assert server.tags()["workspace"] == "released"
    server.service("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert server.tags()["workspace"] == "resident"
    assert server.generate() == expected


def test_a_release_waits_for_requests_in_flight(server: Server) -> None:
    expected = [server.generate(60, prompt) for prompt in prompts(4)]
    running = server.in_background(4, 60)
    server.service("/release_memory_occupation", {"timeout_s": 60})
    assert [each.result(60) for each in running] == expected


def test_a_drain_that_runs_out(server: Server) -> None:
    """The answer names the requests, and they continue; so does a release by tokenspeed's own call."""
    expected = server.generate(600, prompts(1)[0])
    (running,) = server.in_background(1, 600)
    held_up = server.service("/release_memory_occupation", {"timeout_s": 0}, status=504)
    assert len(held_up["error"]["pending"]) == 1
    assert running.result(60) == expected


def test_a_release_that_aborts(server: Server) -> None:
    (running,) = server.in_background(1, 3000)
    server.service("/release_memory_occupation", {"mode": "abort"})
    with pytest.raises(grpc.RpcError, match="Aborted by pause"):
        running.result(60)


def test_a_release_that_keeps_requests(server: Server) -> None:
    refused = server.service("/release_memory_occupation", {"mode": "keep"}, status=409)
    assert "wait or abort" in refused["message"]


def test_discarded_weights(server: Server) -> None:
    """Nothing is generated before tokenspeed's update has written them; buffers come back without it."""
    expected = server.generate()
    server.service("/release_memory_occupation", {"restore": {"weights": "discard"}})
    refused = server.write_weights(400)
    assert "resume it first" in refused["message"]
    server.service("/resume_memory_occupation")
    server.write_weights(400, "other")
    with pytest.raises(grpc.RpcError, match="content of weights"):
        server.generate()
    server.write_weights(weight_version="step-1")
    assert server.generate() == expected
    assert server.service("/release_memory_occupation")["weights_version"] == "step-1"
    server.service("/resume_memory_occupation", {"weights_version": "step-2"}, status=409)
    server.service("/resume_memory_occupation", {"weights_version": "step-1"})


def test_hibernation(server: Server) -> None:
    expected = server.generate()
    server.service("/release_memory_occupation", {"hibernate": True})
    assert server.get("/livez").status_code == 200
    with pytest.raises(grpc.RpcError, match="is hibernated"):
        server.generate()
    server.own("/resume_memory_occupation")
    assert server.generate() == expected
