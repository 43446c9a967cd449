"""Weights that are written while they are released, on a CUDA device:
``pytest -m gpu tests/gpu/test_sleeping_update_gpu.py``."""

from __future__ import annotations

import json
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import memsaver_core as ms
from memsaver_server.client import Client
from memsaver_server.reference import weights
from memsaver_server.reference.builtin_model import small_checkpoint
from tests.e2e.serving import serving
from tests.e2e.test_warm_start import damage
from tests.gpu import vllm_server
from tests.gpu.children import ON_CUDA
from tests.gpu.vllm_server import completions, post
from tests.programs import Child

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or ms.driver_name() != "cuda", reason="needs an NVIDIA GPU and the CUDA driver"
    ),
]

MIB = 1 << 20

#: A model of 1 GiB in parameters of many sizes, tied ones and a graph; does what it is told.
PROGRAM = """
import json, sys
import torch, memsaver_core as ms
from memsaver_core.updates import written_asleep

sizes = [*[1000 + 77 * number for number in range(200)], *[3_000_000] * 20, *[40_000_000] * 4, 200_000_000]
with ms.region("weights"):
    parameters = [torch.nn.Parameter(torch.empty(size, dtype=torch.bfloat16, device="cuda")) for size in sizes]
    zeros = torch.zeros(50_000_000, dtype=torch.bfloat16, device="cuda")
for each in parameters:
    each.requires_grad_(False)
tied = torch.nn.Parameter(parameters[220], requires_grad=False)
rows = tied.view(-1, 100)[:1000]
everything = [*parameters, zeros, tied, rows]

def write(seed):
    torch.manual_seed(seed)
    values = torch.randn(1_000_003) * 0.02  # no block is like another one
    for index, each in enumerate(parameters):
        each.copy_(values.roll(index).repeat(each.numel() // len(values) + 1)[: each.numel()])
    zeros[:100] = seed

def sums():
    torch.cuda.synchronize()
    return [float(each.double().sum()) for each in everything]

write(1)
graph, total = torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
rows.sum(dtype=torch.float32)
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    total.copy_(rows.sum(dtype=torch.float32))
addresses = [each.data_ptr() for each in everything]
for line in sys.stdin:
    order, *seed = line.split()
    answer = None
    match order:
        case "write":
            write(int(seed[0]))
        case "write_asleep":
            before = torch.cuda.mem_get_info()[0]
            with written_asleep("weights"):
                assert {each.device.type for each in everything} == {"cpu"}
                write(int(seed[0]))
                answer = before - torch.cuda.mem_get_info()[0]
        case "fail_asleep":
            try:
                with written_asleep("weights"):
                    write(int(seed[0]))
                    raise OSError("a file is cut off")
            except OSError:
                pass
        case "release":
            (tag,) = (tag for tag in ms.release().tags if tag.tag == "weights")
            answer = [tag.backed_up_bytes, tag.released_bytes]
        case "resume":
            ms.resume()
        case "sums":
            graph.replay()
            answer = [sums(), float(total), addresses == [each.data_ptr() for each in everything]]
    print(json.dumps(answer), flush=True)
"""


class Program(Child):
    def __init__(self, pack: str) -> None:
        super().__init__("-c", PROGRAM, **ON_CUDA, MEMSAVER_PACK=pack)

    def does(self, order: str) -> Any:
        return json.loads(self.ask(order))


@pytest.mark.parametrize("pack", ["auto", "off"])
@pytest.mark.guards("content was wrong after a restore")
def test_a_resume_brings_in_what_was_written(pack: str) -> None:
    """Packed or not; the host packs as the device does. Nothing is copied again, and nothing is taken of the device."""
    with Program(pack) as program:
        first = program.does("sums")
        program.does("write 2")
        second = program.does("sums")
        assert first[0] != second[0]
        assert first[2]
        program.does("write 1")
        for seed, expected in ((2, second), (1, first), (2, second)):
            program.does("release")
            program.does("fail_asleep 3")
            assert program.does(f"write_asleep {seed}") < 16 * MIB
            program.does("resume")
            assert program.does("sums") == expected
            copied, released = program.does("release")
            assert copied == 0
            assert released > 850 * MIB
            program.does("resume")
            assert program.does("sums") == expected


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_reference_engine_gives_the_tokens_of_the_new_weights(ranks: int, tmp_path: Path) -> None:
    if ranks > torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    model = weights.load_checkpoint(small_checkpoint())
    weights.fill_random(model, 99)
    model.save_pretrained(tmp_path)
    with serving("--tensor-parallel", str(ranks), changes=ON_CUDA) as engine, Client(engine.url) as client:

        def tokens() -> list[int]:
            output: list[int] = client.generate("The weights", max_new_tokens=24)["output_ids"]
            return output

        old = tokens()
        client.update_weights_from_disk(tmp_path)
        expected = tokens()
        client.update_weights_from_disk(small_checkpoint())
        assert tokens() == old != expected
        client.release()
        client.update_weights_from_disk(tmp_path, version="step-1")
        client.resume(weights_version="step-1")
        assert tokens() == expected


def test_one_update_for_the_engines_of_a_store(tmp_path: Path) -> None:
    """The second one takes the new weights from the store: the files are others by then."""
    model = weights.load_checkpoint(small_checkpoint())
    weights.fill_random(model, 99)
    model.save_pretrained(tmp_path / "trained")
    changes = {**ON_CUDA, "MEMSAVER_SHARED_BACKUPS": f"test-{uuid.uuid4().hex[:12]}"}
    with ExitStack() as programs:
        servers = [programs.enter_context(serving(changes=changes)) for _ in range(2)]
        one, other = (programs.enter_context(Client(each.url)) for each in servers)
        for each in (one, other):
            each.release()
        one.update_weights_from_disk(tmp_path / "trained", version="step-1")
        damage(tmp_path / "trained")
        other.update_weights_from_disk(tmp_path / "trained", version="step-1")
        for each in (one, other):
            each.resume(weights_version="step-1")
        made, others = (each.generate("The weights", max_new_tokens=24)["output_ids"] for each in (one, other))
        assert made == others


@pytest.mark.skipif(bool(vllm_server.missing()), reason=vllm_server.missing() or "-")
def test_vllm_reloads_weights_while_it_sleeps(model: Path, tmp_path: Path) -> None:
    """Graphs replay with the new ones. A checkpoint that cannot be read leaves the old ones."""
    other = tmp_path / "other"
    other.mkdir()
    vllm_server.write_model(other, seed=4)
    more = ("--compilation-config", json.dumps(vllm_server.QUICK))
    with vllm_server.serving(model, tmp_path / "log", *more) as (client, _):

        def reload(folder: Path) -> int:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            # vLLM closes a connection after an error, perhaps when the next request is already on its way.
            return client.post("/collective_rpc", json=body, headers={"Connection": "close"}).status_code

        old = completions(client)
        assert reload(other) == 200
        expected = completions(client)
        assert reload(model) == 200
        assert completions(client) == old != expected
        post(client, "/sleep")
        assert reload(tmp_path / "nothing") >= 400
        post(client, "/wake_up")
        assert completions(client) == old
        post(client, "/sleep")
        assert reload(other) == 200
        post(client, "/wake_up")
        assert completions(client) == expected
