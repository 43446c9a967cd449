"""SGLang's own endpoints of a server without memsaver's service, as RL frameworks call them.

The weights have no backup: a release discards them, and an update writes them.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine_server import free_port, prompts
from tests.waiting import wait_until

from . import checkpoint
from .conftest import Start
from .server import ANSWER_S, ENVIRONMENT, Server, binds_all_ranks


@pytest.fixture(scope="module")
def unserved(start: Start) -> Server:
    return start(serve=False)


@pytest.fixture
def server(unserved: Server) -> Iterator[Server]:
    yield unserved
    unserved.own("/continue_generation")  # of a test that failed: a paused server answers nothing
    assert not unserved.is_dead(), unserved.output()[-3000:]


@pytest.fixture(scope="module")
def expected(unserved: Server) -> list[list[int]]:
    return [unserved.generate(300, prompt) for prompt in prompts(20)]


def flush(server: Server) -> None:
    wait_until(lambda: server.http.get(server.url + "/flush_cache").status_code == 200, ANSWER_S)


def slime(server: Server, tags: dict[str, Any] | None = None, pause: str = "abort") -> None:
    flush(server)
    server.own("/release_memory_occupation", tags)
    server.own("/resume_memory_occupation", {"tags": ["weights"]})
    server.own("/pause_generation", {"mode": pause})
    flush(server)
    server.write_tensors(flush_cache=True)
    server.own("/continue_generation", {})
    server.own("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})


def miles(server: Server) -> None:
    slime(server, {"tags": None}, "retract")


def verl(server: Server) -> None:
    """Each call is sent again, as after a timeout."""
    for _ in range(2):
        server.own("/release_memory_occupation", {"tags": ["kv_cache", "weights"], "reset_connector": True})
    for _ in range(2):
        server.own("/resume_memory_occupation", {"tags": ["weights"]})
    server.write_tensors(flush_cache=False)
    server.own("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert server.http.get(server.url + "/flush_cache?reset_connector=true").status_code == 200


def areal(server: Server) -> None:
    server.own("/release_memory_occupation", {})
    server.own("/resume_memory_occupation", {})
    server.own("/pause_generation", {})
    server.write_weights(abort_all_requests=True)
    server.own("/continue_generation", {})


def nemo_rl(server: Server) -> None:
    for tags in (["weights"], ["kv_cache", "cuda_graph"]):
        flush(server)
        server.own("/release_memory_occupation", {"tags": tags})
    server.own("/resume_memory_occupation", {"tags": ["weights"]})
    server.write_tensors()
    server.own("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})


@pytest.mark.parametrize("between_rollouts", [slime, miles, verl, areal, nemo_rl])
def test_frameworks(server: Server, expected: list[list[int]], between_rollouts: Callable[[Server], None]) -> None:
    """Each with its own calls; requests in flight are answered in full."""
    running = server.in_background(20, 300)
    between_rollouts(server)
    assert [each.result(ANSWER_S) for each in running] == expected
    assert server.generate(300, prompts(1)[0]) == expected[0]


@pytest.mark.guards("a release by the engine's own call ended the server")
def test_a_release_under_load(server: Server, expected: list[list[int]]) -> None:
    """20 requests in flight: all are answered in full, then memory is released; a repeat succeeds."""
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
    by_ipc = {"zmq_handles": {}}
    for refused in (server.write_weights(400), server.own("/update_weights_from_ipc", by_ipc, status=400)):
        assert "resume it first" in refused.json()["message"]
    assert server.own("/weights_checker", {"action": "checksum"}, status=400).json()["success"] is False
    server.own("/get_weights_by_name", {"name": "model.norm.weight"}, status=400)
    server.own("/resume_memory_occupation", {"tags": ["weights"]})
    assert server.request().status_code == 503  # their content was discarded
    server.own("/update_weights_from_ipc", by_ipc, status=400)  # no trainer offers weights
    assert server.request().status_code == 503
    server.write_weights()
    assert server.generate() == expected


def test_an_update_waits_for_requests_in_flight(server: Server, expected: list[list[int]], tmp_path: Path) -> None:
    """As by SGLang alone, while nothing is released."""
    other = checkpoint.write(tmp_path, seed=8)
    running = server.in_background(4, 300)
    server.write_weights(model_path=str(other))
    assert server.generate(300, prompts(1)[0]) != expected[0]
    assert [each.result(ANSWER_S) for each in running] == expected[:4]
    server.write_weights()
    assert server.generate(300, prompts(1)[0]) == expected[0]


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


def test_weights_from_a_trainer(server: Server) -> None:
    """It broadcasts them while SGLang receives them. Their content was discarded."""
    distributed = importlib.import_module("sglang.srt.utils.common")
    weights = load_file(server.model / "model.safetensors")
    expected = server.generate()
    port = free_port()
    group = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2, "backend": "gloo"}
    joined = server.later(server.own, "/init_weights_update_group", {**group, "rank_offset": 1})
    trainer = distributed.init_custom_process_group(
        "gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="weight_update_group"
    )
    joined.result(ANSWER_S)
    server.own("/release_memory_occupation", {})
    server.own("/resume_memory_occupation", {"tags": ["weights"]})
    described = {
        "names": list(weights),
        "dtypes": [str(each.dtype).removeprefix("torch.") for each in weights.values()],
        "shapes": [list(each.shape) for each in weights.values()],
    }
    with server.writing():
        written = server.later(server.own, "/update_weights_from_distributed", described)
        for each in weights.values():
            torch.distributed.broadcast(each, src=0, group=trainer)
        written.result(ANSWER_S)
    server.own("/resume_memory_occupation", {"tags": ["kv_cache"]})
    server.own("/destroy_weights_update_group", {"group_name": "weight_update_group"})
    assert server.generate() == expected


def test_replicas(start: Start) -> None:
    """Each waits for its own requests."""
    several = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"} if binds_all_ranks() else {}
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
import asyncio
import sys
import sglang
from safetensors.torch import load_file
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

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

    async def as_skyrl():
        "By the tokenizer manager, with 20 requests in flight."
        parameters = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
        prompts = [[5, 6, 7, 100 + number] for number in range(20)]
        async def whole(prompt):
            return [part async for part in await engine.async_generate(
                input_ids=prompt, sampling_params=parameters, stream=True)][-1]["output_ids"]
        async def begin(prompt):
            parts = await engine.async_generate(input_ids=prompt, sampling_params=parameters, stream=True)
            return parts, await anext(parts)
        async def end(parts, part):
            async for part in parts:
                pass
            return part["output_ids"]
        expected = await asyncio.gather(*map(whole, prompts))
        running = await asyncio.gather(*map(begin, prompts))
        manager = engine.tokenizer_manager
        released = asyncio.ensure_future(
            manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=None), None))
        assert await asyncio.gather(*(end(*each) for each in running)) == expected
        await released
        await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["weights"]), None)
        await manager.resume_memory_occupation(obj=ResumeMemoryOccupationReqInput(tags=["kv_cache"]), request=None)
        assert await whole(prompts[0]) == expected[0]
    engine.loop.run_until_complete(as_skyrl())

    weights = list(load_file(sys.argv[1] + "/model.safetensors").items())
    def write(weights):
        sessions = hasattr(engine, "begin_weight_update")
        success, why = engine.begin_weight_update() if sessions else (True, "")
        if success:
            success, why = engine.update_weights_from_tensor(weights)
        if success and sessions:
            success, why = engine.end_weight_update()
        return success, why
    def save():
        engine.save_sharded_model(path=sys.argv[2], pattern=None, max_size=None)
    def refusal(call):
        try:
            call()
        except Exception as error:
            return str(error)
    engine.release_memory_occupation(tags=["weights"])
    assert "resume it first" in refusal(save)
    assert write([(name, weight * 2) for name, weight in weights])[0]
    engine.resume_memory_occupation(tags=["weights"])
    save()
    assert tokens()["output_ids"] != expected
    assert write(weights)[0]
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
        [sys.executable, str(program), str(model), str(tmp_path)],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "as expected" in ended.stdout, ended.stdout[-2000:] + ended.stderr[-3000:]
