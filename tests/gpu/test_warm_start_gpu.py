"""Weights that outlive their engine, on a CUDA device: ``pytest -m gpu tests/gpu/test_warm_start_gpu.py``."""

from __future__ import annotations

import json
import shutil
import signal
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import memsaver_core as ms
from memsaver_server.client import Client
from tests.e2e.serving import serving
from tests.e2e.test_warm_start import damage
from tests.gpu import test_sglang_gpu, vllm_server
from tests.gpu.children import ON_CUDA
from tests.programs import Child
from tests.reliability.test_keeper import Keeper, is_held
from tests.sglang import checkpoint
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or ms.driver_name() != "cuda", reason="needs an NVIDIA GPU and the CUDA driver"
    ),
]

GIB = 1 << 30
#: Of vLLM and SGLang.
FROM_STORE = ("--load-format", "memsaver")

#: An engine with 2 GiB of weights of many sizes; does what it is told, and answers with a line of JSON.
ENGINE = """
import json, sys
import torch, memsaver_core as ms

device = ms.torch_device()
sizes = [*[1000 + 77 * number for number in range(200)], *[3_000_000] * 20, *[40_000_000] * 8, 700_000_000]
with ms.region("weights"):
    tensors = {str(number): torch.empty(size, dtype=torch.bfloat16, device=device) for number, size in enumerate(sizes)}
    tensors["tied"] = tensors["220"].view(-1, 100)[:1000]
    tensors["zeros"] = torch.ones(50_000_000, dtype=torch.bfloat16, device=device)
loads = []

def load():
    loads.append(1)
    torch.manual_seed(1)
    for number in range(len(sizes)):
        tensors[str(number)].normal_(0, 0.02)
    tensors["zeros"].zero_()

def sums():
    torch.cuda.synchronize()
    return [float(tensor.double().sum()) for tensor in tensors.values()]

for order in sys.stdin:
    match order.strip():
        case "load":
            reason = ms.load_weights(ms.WeightsKey("on a GPU", "1"), lambda: tensors, load)
            answer = [reason, len(loads), sums()]
        case "release":
            before = torch.cuda.mem_get_info()[0]
            (tag,) = (tag for tag in ms.release().tags if tag.tag == "weights")
            answer = [tag.backed_up_bytes, tag.unchanged_bytes, torch.cuda.mem_get_info()[0] - before]
        case "resume":
            addresses = [tensor.data_ptr() for tensor in tensors.values()]
            ms.resume()
            assert addresses == [tensor.data_ptr() for tensor in tensors.values()]
            answer = sums()
        case "memory":
            free, total = torch.cuda.mem_get_info()
            answer = total - free
    print(json.dumps(answer), flush=True)
"""


class Engine(Child):
    def __init__(self, store: str, pack: str) -> None:
        settings = {**ON_CUDA, "MEMSAVER_SHARED_BACKUPS": store, "MEMSAVER_PACK": pack}
        super().__init__("-c", ENGINE, **settings)

    def does(self, order: str) -> Any:
        return json.loads(self.ask(order))


@pytest.fixture
def store() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def keeper(store: str) -> Iterator[Keeper]:
    keeper = Keeper(store, "16GiB", store_limit="16GiB")
    yield keeper
    keeper.end(signal.SIGKILL)


@pytest.mark.usefixtures("keeper")
@pytest.mark.parametrize("pack", ["auto", "off"])
@pytest.mark.guards("the process that had written a shared backup died")
def test_the_next_engine_loads_nothing(store: str, pack: str) -> None:
    """Packed or not: the content is the same, nothing is copied out again, and no memory is held twice."""
    with Engine(store, pack) as first:
        reason, loads, expected = first.does("load")
        assert (reason, loads) == ("the store has none of this model", 1)
        held = first.does("memory")
        assert first.does("release")[0] == 0
        wait_until(lambda: is_held(store))
    with Engine(store, pack) as second:
        assert second.does("load") == ["", 0, expected]
        assert second.does("memory") < held + (256 << 20)
        for _ in range(2):
            copied, unchanged, freed = second.does("release")
            assert copied == 0
            assert unchanged > 2 * GIB
            assert freed > 2 * GIB
            assert second.does("resume") == expected


@pytest.mark.usefixtures("keeper")
def test_the_reference_engine_gives_equal_tokens(store: str) -> None:
    """With graphs, which are captured after the weights came."""
    config = Path(__file__).parents[1] / "data" / "qwen2-1.5b" / "config.json"
    changes = {**ON_CUDA, "MEMSAVER_SHARED_BACKUPS": store}
    answers = []
    for _ in range(2):
        with serving("--random-weights", str(config), changes=changes) as engine, Client(engine.url) as client:
            assert ("were loaded in the ordinary way" in engine.log) == (not answers)
            tokens = client.generate("The weights", max_new_tokens=24)["output_ids"]
            client.release()
            client.resume()
            assert client.generate("The weights", max_new_tokens=24)["output_ids"] == tokens
            answers.append(tokens)
            wait_until(lambda: is_held(store))
            engine.process.kill()
            engine.process.wait(600)
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("keeper")
@pytest.mark.skipif(bool(vllm_server.missing()), reason=vllm_server.missing() or "-")
@pytest.mark.guards("the process that had written a shared backup died")
def test_vllm_gives_equal_tokens(store: str, model: Path, tmp_path: Path) -> None:
    """With its load format ``memsaver``, after all its processes were killed while its memory was resident, released,
    and coming back. After the first start the checkpoint has other weights, which a start from the store does not
    read."""
    psutil = pytest.importorskip("psutil")
    answers, log = [], tmp_path / "log"
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    arguments = (folder, log, "--enforce-eager")
    for state in ("resident", "released", "resuming", "resident"):
        with (
            ThreadPoolExecutor(1) as pool,
            vllm_server.serving(*arguments, *FROM_STORE, MEMSAVER_SHARED_BACKUPS=store) as (client, process),
        ):
            answers.append(vllm_server.completions(client))
            assert ("were loaded in the ordinary way" in log.read_text()) == (len(answers) == 1)
            wait_until(lambda: is_held(store))
            vllm_server.post(client, "/sleep")
            if state == "resident":
                vllm_server.post(client, "/wake_up")
                assert vllm_server.completions(client) == answers[-1]
            processes = [*psutil.Process(process.pid).children(recursive=True), process]
            waking: Future[None] = Future()
            if state == "resuming":
                asleep = torch.cuda.mem_get_info()[0]
                waking = pool.submit(fail_to_wake_up, client)
                wait_until(lambda asleep=asleep: torch.cuda.mem_get_info()[0] < asleep - (8 << 20), interval_s=0.0)
            else:
                waking.set_result(None)
            for each in processes:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            waking.result()
        if len(answers) == 1:
            damage(folder)
    assert answers == answers[:1] * len(answers)
    with vllm_server.serving(*arguments) as (client, _):  # without the store the damage shows
        assert vllm_server.completions(client) != answers[0]


def fail_to_wake_up(client: httpx.Client) -> None:
    with pytest.raises(httpx.HTTPError):
        client.post("/wake_up").raise_for_status()


@pytest.mark.usefixtures("keeper")
@pytest.mark.skipif(bool(test_sglang_gpu.MISSING), reason=test_sglang_gpu.MISSING or "-")
def test_sglang_gives_equal_tokens(store: str, tmp_path: Path) -> None:
    """With its load format ``memsaver``, and after releases and resumes by its own calls and by the service."""
    model = checkpoint.write(tmp_path / "model", config=test_sglang_gpu.DENSE)
    answers = []
    for _ in range(2):
        server = test_sglang_gpu.GpuServer(model, tmp_path / "log", *FROM_STORE, MEMSAVER_SHARED_BACKUPS=store)
        try:
            server.wait_until_up()
            assert ("loaded in the ordinary way" in server.output()) == (not answers)
            assert ("came from the shared store" in server.output()) == bool(answers)
            answers.append(server.answers())
            server.check_cycles(server.answers)
            wait_until(lambda: is_held(store))
        finally:
            server.process.kill()
            server.close()
    assert answers[0] == answers[1]
