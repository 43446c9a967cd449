"""SGLang's own endpoints of a server without memsaver's service, as RL frameworks call them.

The weights have no backup: a release discards them, and an update writes them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine_server import prompts

from . import checkpoint
from .conftest import Start
from .server import ANSWER_S, ENVIRONMENT, Server, source


@pytest.fixture(scope="module")
def unserved(start: Start) -> Server:
    return start(serve=False)


@pytest.fixture
def server(unserved: Server) -> Iterator[Server]:
    yield unserved
    unserved.own("/continue_generation")  # of a test that failed: a paused server answers nothing
    assert not unserved.is_dead(), unserved.output()[-3000:]


@pytest.mark.guards("a release by the engine's own call ended the server")
def test_a_release_under_load(server: Server) -> None:
    """20 requests in flight: all are answered in full, then memory is released; a repeat succeeds."""
    expected = [server.generate(300, prompt) for prompt in prompts(20)]
    running = server.in_background(20, 300)
    server.own("/release_memory_occupation")
    assert [each.result(ANSWER_S) for each in running] == expected
    server.own("/release_memory_occupation")
    refused = server.request()
    assert refused.status_code == 503
    assert "released" in refused.text
    server.own("/resume_memory_occupation")
    server.own("/resume_memory_occupation")
    server.write_weights()
    assert server.generate(300, prompts(1)[0]) == expected[0]


def test_weights_are_written_only_while_resident(server: Server) -> None:
    expected = server.generate()
    server.own("/release_memory_occupation", {"tags": ["weights"]})
    refused = server.write_weights(400)
    assert "resume it first" in refused.json()["message"]
    assert server.own("/weights_checker", {"action": "checksum"}, status=400).json()["success"] is False
    server.own("/resume_memory_occupation", {"tags": ["weights"]})
    assert server.request().status_code == 503  # their content was discarded
    server.write_weights()
    assert server.generate() == expected


def test_an_unknown_tag(server: Server) -> None:
    refused = server.own("/release_memory_occupation", {"tags": ["wieghts"]}, status=400)
    assert "wieghts" in refused.text
    assert len(server.generate()) == 16


def test_requests_paused_in_place(server: Server) -> None:
    """They would not end: they are set aside, and computed again from their tokens."""
    expected = server.generate(1500, prompts(1)[0])
    (running,) = server.in_background(1, 1500)
    server.own("/pause_generation", {"mode": "in_place"})
    server.own("/release_memory_occupation", {"tags": ["kv_cache"]})
    server.own("/flush_cache")
    server.own("/continue_generation", {})  # takes effect once the memory is back
    server.own("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert running.result(ANSWER_S) == expected


@pytest.mark.parametrize("pause", ["abort", "retract"])
def test_slime(server: Server, pause: str, tmp_path: Path) -> None:
    """``continue_generation`` comes before the KV cache; requests that a pause retracted get both policies' tokens."""
    expected = server.generate()
    other = checkpoint.write(tmp_path, seed=8)
    (running,) = server.in_background(1, 1500)
    server.own("/pause_generation", {"mode": pause})
    server.own("/flush_cache")
    server.own("/release_memory_occupation", {})
    server.own("/resume_memory_occupation", {"tags": ["weights"]})
    server.own("/pause_generation", {"mode": pause})
    server.own("/flush_cache")
    server.write_weights(model_path=str(other), flush_cache=True)
    server.own("/continue_generation", {})
    server.own("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
    assert len(running.result(ANSWER_S)) == 1500 if pause == "retract" else len(running.result(ANSWER_S)) < 1500
    assert server.generate() != expected
    server.write_weights()
    assert server.generate() == expected


def test_verl(server: Server) -> None:
    """Sent again after a timeout: the same answers."""
    expected = server.generate()
    for _ in range(3):
        body = {"tags": ["kv_cache", "weights"], "reset_connector": True}
        assert server.http.get(server.url + "/flush_cache?reset_connector=true").status_code == 200
        server.own("/release_memory_occupation", body)
        server.own("/release_memory_occupation", body)
        server.own("/resume_memory_occupation", {"tags": ["weights"]})
        server.own("/resume_memory_occupation", {"tags": ["weights"]})
        server.write_weights(flush_cache=False)
        server.own("/resume_memory_occupation", {"tags": ["kv_cache"]})
        assert server.http.get(server.url + "/flush_cache?reset_connector=true").status_code == 200
        assert server.generate() == expected


def test_areal(server: Server) -> None:
    """Everything at once, and an update in the midst of generation."""
    expected = server.generate(1500, prompts(1)[0])
    running = server.in_background(4, 1500)
    server.own("/pause_generation", {})
    server.write_weights(abort_all_requests=True)
    server.own("/continue_generation", {})
    assert all(len(each.result(ANSWER_S)) < 1500 for each in running)
    server.own("/release_memory_occupation", {})
    server.own("/resume_memory_occupation", {})
    server.write_weights()
    assert server.generate(1500, prompts(1)[0]) == expected


def test_replicas(start: Start) -> None:
    """Each waits for its own requests."""
    bound = "SGLANG_CPU_OMP_THREADS_BIND"  # newer versions expect the processors of each replica
    several = {bound: "0|0"} if "dp_size" in source("utils/numa_utils.py") else {}
    server = start("--dp", "2", "--enable-weights-cpu-backup", serve=False, **several)
    expected = [server.generate(200, prompt) for prompt in prompts(2)]
    running = server.in_background(2, 200)
    server.own("/release_memory_occupation")
    assert [each.result(ANSWER_S) for each in running] == expected
    server.own("/release_memory_occupation")
    assert [server.request().status_code for _ in range(2)] == [503, 503]
    server.own("/resume_memory_occupation")
    assert [server.generate(200, prompt) for prompt in prompts(2)] == expected


ENGINE = """
import sys
import sglang

if __name__ == "__main__":
    engine = sglang.Engine(model_path=sys.argv[1], skip_tokenizer_init=True, sampling_backend="pytorch",
        grammar_backend="none", enable_memory_saver=True, enable_weights_cpu_backup=True, device="cpu",
        attention_backend="torch_native", dtype="float32", max_total_tokens=16384, context_length=4096,
        cuda_graph_backend_decode="disabled", cuda_graph_backend_prefill="disabled")
    def tokens():
        return engine.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 8, "temperature": 0})
    expected = tokens()["output_ids"]
    for _ in range(2):
        engine.release_memory_occupation()
        engine.release_memory_occupation()
        engine.resume_memory_occupation()
        engine.resume_memory_occupation()
        assert tokens()["output_ids"] == expected
    try:
        engine.release_memory_occupation(tags=["wieghts"])
        raise SystemExit("an unknown tag was released")
    except Exception as error:
        assert "wieghts" in str(error), error
    engine.shutdown()
    print("as expected")
"""


def test_the_engine_without_a_server(model: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(ENGINE)
    ended = subprocess.run(
        [sys.executable, str(program), str(model)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "as expected" in ended.stdout, ended.stdout[-2000:] + ended.stderr[-3000:]
