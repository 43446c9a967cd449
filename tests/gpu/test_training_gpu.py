"""A trainer on a GPU whose memory is released between steps: FSDP2 with NCCL, one rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.programs import output_of

pytestmark = pytest.mark.gpu

#: Ten steps without a release, then ten with one between each two, which must give the same losses.
TRAINER = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
import memsaver_core as ms
from memsaver_core.training import released

folder, shard = sys.argv[1], sys.argv[2] == "fsdp2"
torch.use_deterministic_algorithms(True)
dist.init_process_group("nccl", init_method=f"file://{folder}/rank", rank=0, world_size=1)
MIB = 1 << 20


def made():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2048, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 2048)]
    model = torch.nn.Sequential(*layers).cuda()
    if shard:
        mesh = dist.init_device_mesh("cuda", (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for each in (layers[0], model):
            fully_shard(each, mesh=mesh, mp_policy=policy)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def run(between):
    model, optimizer = made()
    data = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(64, 2048, generator=data, device="cuda")
            loss = (model(x).float() - x).square().mean()
            loss.backward()
            losses.append(loss.item())
            between(model, optimizer, "keep")
        optimizer.step()
        with torch.no_grad():
            losses.append(model(x).float().square().mean().item())  # FSDP2 leaves its root whole
        between(model, optimizer, "discard")
    return losses


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def held(model, optimizer):
    state = [each for states in optimizer.state.values() for each in states.values()]
    return [local(each) for each in (*model.parameters(), *state)]


addresses = []


def release(model, optimizer, gradients):
    nbytes = sum(each.nbytes for each in held(model, optimizer))
    before = ms.read_devices()[0].process_bytes
    with released(model, optimizer, gradients=gradients) as memory:
        now = ms.read_devices()[0].process_bytes
        # 192 MiB and more of parameters and state; a first release takes a little for itself.
        assert memory.report.released_bytes >= nbytes
        assert before - now >= nbytes - 32 * MIB, (before, now, nbytes)
    if gradients == "discard":
        addresses.append([each.data_ptr() for each in held(model, optimizer)])


plain = run(lambda *_: None)
torch.cuda.empty_cache()
assert run(release) == plain
assert addresses == [addresses[0]] * 10
dist.destroy_process_group()
print("equal")
"""


@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
@pytest.mark.guards("content was wrong after a restore", "memory was reported free before it was free")
def test_ten_steps_with_releases_between_them(kind: str, tmp_path: Path) -> None:
    output = output_of(TRAINER, str(tmp_path), kind, by_itself=True, CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert output.splitlines()[-1] == "equal"
