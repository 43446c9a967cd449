"""Attached modules on a CUDA device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import memsaver_core as ms
from memsaver_core import process
from memsaver_server import attach
from memsaver_server.client import Client
from memsaver_server.integrations.module import ModuleEngine
from tests.gpu.children import two_devices
from tests.programs import run_python
from tests.service import module_examples
from tests.service.module_examples import Example, check_occupation, tensors_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or ms.driver_name() != "cuda", reason="needs an NVIDIA GPU and the CUDA driver"
    ),
]

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
#: Device memory that a process's first operations take (streams, a module, page tables).
SLACK = 16 * MIB


@pytest.fixture(autouse=True)
def _same_kernels() -> Iterator[None]:
    """cuDNN chooses the same kernel each time: outputs are compared bit by bit."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        yield


def owned(tensor: torch.Tensor) -> bool:
    return process.saver().owns(tensor.untyped_storage().data_ptr())


def test_attaching_needs_room_for_a_batch_and_not_for_a_second_model() -> None:
    torch.cuda.empty_cache()
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(32))).cuda()  # 2 GiB
    before = ms.read_devices()[torch.cuda.current_device()].used_bytes
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine = ModuleEngine(model)
    try:
        torch.cuda.empty_cache()
        after = ms.read_devices()[torch.cuda.current_device()].used_bytes
        assert after - before <= 4 * SLACK  # the old memory is freed
        assert torch.cuda.max_memory_allocated() - allocated <= 512 * MIB
        assert all(owned(each) for each in model.parameters())
    finally:
        engine.close()


def test_compiled_by_inductor() -> None:
    torch.compiler.reset()
    with torch.no_grad():
        model = module_examples.TextEncoder(256).cuda().eval()
        ids = torch.randint(500, (3, 17), device="cuda")
        compiled = torch.compile(model)
        engine = ModuleEngine(compiled)
        with attach(engine) as server, Client(server.url) as client:
            expected = compiled(ids).clone()
            assert client.release().released_bytes >= sum(each.nbytes for each in model.parameters())
            client.resume()
            assert torch.equal(compiled(ids), expected)
        engine.close()


def test_a_module_in_host_memory_is_refused() -> None:
    with pytest.raises(ms.ConfigurationError, match=r"weight, bias are in host memory: .*model\.to\('cuda:0'\)"):
        ModuleEngine(nn.Linear(4, 4))


def test_tables_in_host_memory_stay_there() -> None:
    model = nn.Linear(4, 4).cuda()
    model.register_buffer("table", torch.ones(4), persistent=False)
    where = model.table.data_ptr()
    engine = ModuleEngine(model)
    assert owned(model.weight)
    assert model.table.data_ptr() == where
    engine.close()


def test_device_memory_is_refused_where_the_host_is_managed() -> None:
    imports = "import torch\nfrom memsaver_server.integrations.module import ModuleEngine\n"
    program = imports + "ModuleEngine(torch.nn.Linear(4, 4).cuda())"
    ran = run_python(program, by_itself=True, MEMSAVER_DRIVER="host")
    assert "weight, bias are on cuda:0, but memsaver's host driver manages cpu memory" in ran.stderr


def test_the_documented_graph() -> None:
    """The example of docs/engine-author.md, unchanged."""
    page = (ROOT / "docs/engine-author.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (block,) = [block for block in blocks if "graph.replay()" in block]
    with torch.no_grad():
        model = module_examples.VisionEncoder(64).cuda().eval()
        images = torch.randn(2, 3, 64, 64, device="cuda")
        names = {"model": model, "images": images, "torch": torch, "ms": ms}
        exec(block, names)
        encode, engine = names["encode"], names["engine"]
        expected = encode(images)
        assert torch.equal(expected, model(images)) or torch.allclose(expected, model(images), atol=1e-5)
        with attach(engine) as server, Client(server.url) as client:
            client.release()
            client.resume()
            assert torch.equal(encode(images), expected)
        engine.close()


@two_devices
@pytest.mark.guards("only the current device was synchronized or restored")
def test_parts_on_two_devices() -> None:
    """Each part is released and resumed under its tag on its own device."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4096, 4096, device="cuda:0")
            self.second = nn.Linear(4096, 4096, device="cuda:1")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).to("cuda:1"))

    with torch.no_grad():
        model = Split()
        x = torch.randn(2, 4096, device="cuda:0")
        engine = ModuleEngine(model)
        with pytest.raises(ms.ConfigurationError, match=r"on the devices \[0, 1\]"), engine.workspace():
            pass
        server = attach(engine)
        made = Example(engine, server, lambda: model(x), tensors_of(model))
        assert all(owned(each) for each in made.held)
        with Client(server.url) as client:
            before = {device.index: device.used_bytes for device in client.occupation().devices}
            client.release()
            after = {device.index: device.used_bytes for device in client.occupation().devices}
            assert all(before[index] - after[index] >= 64 * MIB - SLACK for index in (0, 1))
            client.resume()
        check_occupation(made, slack_bytes=2 * SLACK)
        server.close()
        engine.close()
