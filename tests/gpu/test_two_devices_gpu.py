"""One process with memory on two GPUs; skipped with fewer."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Iterator

import pytest
import torch

import memsaver_core as ms
from tests.gpu.children import CoTenant, two_devices
from tests.native import injection
from tests.programs import output_of

pytestmark = [pytest.mark.gpu, two_devices]

MIB = 1 << 20
GIB = 1 << 30
SLACK = 32 * MIB
DEVICES = (0, 1)


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag that no other test uses; memory left under it is resumed at the end."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    for device in DEVICES:  # one-time memory of a device does not count
        with ms.region(f"first-{device}", device=device):
            torch.zeros(1, device=f"cuda:{device}")
    ms.release([f"first-{device}" for device in DEVICES])
    ms.resume()
    yield name
    gc.collect()
    for device in DEVICES:
        torch.cuda.synchronize(device)
    ms.resume()
    torch.cuda.empty_cache()


def used_bytes() -> list[int]:
    return [reading.used_bytes for reading in sorted(ms.read_devices(), key=lambda reading: reading.index)]


def on_both(tag: str, nbytes: int) -> list[torch.Tensor]:
    tensors = []
    for device in DEVICES:
        with ms.region(tag, restore="host", device=device):
            tensors.append(torch.randn(nbytes // 4, device=f"cuda:{device}"))
    return tensors


@pytest.mark.guards(
    "memory was reported free before it was free",
    "only the current device was synchronized or restored",
)
def test_both_go_and_come_back_in_one_operation(tag: str) -> None:
    """One release frees the memory of both devices, by each one's own count; one resume brings it back."""
    tensors = on_both(tag, 512 * MIB)
    pointers = [tensor.data_ptr() for tensor in tensors]
    expected = [tensor.cpu() for tensor in tensors]
    for current in (*DEVICES, 0):
        with torch.cuda.device(current):
            before = used_bytes()
            report = ms.release([tag])
            assert all(was - now >= 512 * MIB - SLACK for was, now in zip(before, used_bytes(), strict=True))
            assert sorted(device.index for device in report.devices) == list(DEVICES)
            assert report.released_bytes == 2 * 512 * MIB
            ms.resume([tag])
            assert all(abs(was - now) <= SLACK for was, now in zip(before, used_bytes(), strict=True))
        assert [tensor.data_ptr() for tensor in tensors] == pointers
        assert all(torch.equal(tensor.cpu(), host) for tensor, host in zip(tensors, expected, strict=True))


def test_adopted_tensors_stay_on_their_devices(tag: str) -> None:
    tensors = [torch.randn(64 * MIB // 4, device=f"cuda:{device}") for device in DEVICES]
    expected = [tensor.clone() for tensor in tensors]
    ms.adopt(tensors, tag, restore="host")
    (status,) = (each for each in ms.status().tags if each.tag == tag)
    assert set(status.mapped_by_device) == set(DEVICES)
    ms.release([tag])
    ms.resume()
    assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("current", DEVICES)
@pytest.mark.guards(
    "only the current device was synchronized or restored",
    "memory was unmapped while kernels still used it",
)
def test_kernels_in_flight_on_the_other_device(tag: str, current: int) -> None:
    """The device that is not current is synchronized too; nothing is unmapped under its kernels."""
    tensors = on_both(tag, 64 * MIB)
    for tensor in tensors:
        tensor.zero_()
    for tensor in tensors:
        with torch.cuda.device(tensor.device):
            torch.cuda._sleep(500_000_000)
            tensor.add_(1)
    with torch.cuda.device(current):
        ms.release([tag])
        ms.resume([tag])
    assert all(bool((tensor == 1).all()) for tensor in tensors)


@pytest.mark.parametrize("short", DEVICES)
@pytest.mark.guards(
    "running out of memory or other resources killed the process",
    "only the current device was synchronized or restored",
)
def test_a_device_that_is_short_of_memory_undoes_the_other(tag: str, short: int) -> None:
    """If a co-tenant holds one device, nothing comes back on the other either, and the retry works."""
    tensors = on_both(tag, 2 * GIB)
    expected = [tensor.cpu() for tensor in tensors]
    with CoTenant(short) as tenant:
        ms.release([tag])
        tenant.leave(GIB)
        before = used_bytes()
        with pytest.raises(ms.OutOfDeviceMemoryError) as caught:
            ms.resume([tag])
        assert caught.value.device == short
        assert caught.value.needed_bytes == 2 * GIB
        assert caught.value.free_bytes < 2 * GIB
        assert all(abs(was - now) <= SLACK for was, now in zip(before, used_bytes(), strict=True))
        assert next(each for each in ms.status().tags if each.tag == tag).resident_bytes == 0
        tenant.let_go()
        ms.resume([tag])
    assert all(torch.equal(tensor.cpu(), host) for tensor, host in zip(tensors, expected, strict=True))


@pytest.mark.parametrize("call", ["create", "map", "allow_access", "copy_to_device"])
@pytest.mark.guards("only the current device was synchronized or restored")
def test_a_call_that_fails_on_one_device_undoes_the_other(call: str) -> None:
    """Whichever device fails in the middle of a resume, the memory of both is released again."""
    told = output_of(
        f"""
        import pytest, torch, memsaver_core as ms
        from memsaver_core import process
        from tests.gpu.test_two_devices_gpu import DEVICES, MIB, SLACK, on_both, used_bytes
        for device in DEVICES:  # what a device takes once for itself does not count
            with ms.region("first", device=device):
                torch.zeros(1, device=torch.device("cuda", device))
        ms.release(["first"])
        ms.resume()
        tensors = on_both("both", 512 * MIB)
        expected = [tensor.cpu() for tensor in tensors]
        ms.release(["both"])
        before = used_bytes()
        process.saver().fail("{call}", nth=5)
        with pytest.raises(ms.DriverError, match="both"):
            ms.resume(["both"])
        process.saver().heal()
        assert all(abs(was - now) <= SLACK for was, now in zip(before, used_bytes(), strict=True))
        assert next(each for each in ms.status().tags if each.tag == "both").resident_bytes == 0
        ms.resume(["both"])
        assert all(torch.equal(tensor.cpu(), host) for tensor, host in zip(tensors, expected, strict=True))
        print("undone")
        """,
        **injection.in_child(),
    )
    assert told == "undone\n"


def test_peers_reach_the_memory_after_a_resume() -> None:
    """With MEMSAVER_PEER_ACCESS a kernel of one GPU reads and writes the other's memory, before and after a release."""
    told = output_of(
        """
        import torch, memsaver_core as ms
        from memsaver_core import _native, process
        if not (torch.cuda.can_device_access_peer(0, 1) and torch.cuda.can_device_access_peer(1, 0)):
            print("no peers")
            raise SystemExit
        with ms.region("weights", device=0):
            here = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, device="cuda:0")
        with ms.region("weights", device=1):
            there = torch.randint(0, 256, (64 << 20,), dtype=torch.uint8, device="cuda:1")
        saver, key = process.saver(), (1, 2, 3, 4)
        for cycle in range(3):
            for tensor, reader in ((here, 1), (there, 0)):
                torch.cuda.synchronize(tensor.device)
                # The digest kernel runs on one GPU and reads the other's memory by its address.
                read = saver.digest(reader, tensor.data_ptr(), tensor.numel(), key)
                assert read == _native.digest_of(tensor.cpu().numpy(), key), (cycle, reader)
                plain = torch.randint(0, 256, (1 << 20, 2), dtype=torch.uint8, device=f"cuda:{reader}")
                copied = tensor[: 1 << 20].to(plain.device)
                assert torch.equal(copied.cpu(), tensor[: 1 << 20].cpu())
                # Strided, so that torch copies by a kernel on the source's GPU that writes into the other's memory.
                tensor[: 2 << 20].view(-1, 2)[:, 0].copy_(plain[:, 1])
                torch.cuda.synchronize(reader)
                assert torch.equal(tensor[: 2 << 20].view(-1, 2)[:, 0].cpu(), plain[:, 1].cpu())
            ms.release()
            ms.resume()
        print("reached")
        """,
        MEMSAVER_PEER_ACCESS="1",
    )
    if told == "no peers\n":
        pytest.skip("these GPUs do not reach each other's memory")
    assert told == "reached\n"
