"""The core on a real GPU. All tests share the process's saver, so each has tags of its own."""

from __future__ import annotations

import gc
import json
import subprocess
import uuid
from collections.abc import Iterator

import pynvml
import pytest
import torch

import memsaver_core as ms
from memsaver_core import _native, process
from tests.gpu.children import CoTenant
from tests.programs import output_of

pytestmark = pytest.mark.gpu

MIB = 1 << 20

#: Device memory that a process's first operations take (streams, a module, page tables).
SLACK = 16 * MIB


@pytest.fixture
def tag() -> Iterator[str]:
    """A tag that no other test uses; memory left under it is resumed at the end."""
    name = f"t-{uuid.uuid4().hex[:8]}"
    yield name
    gc.collect()
    torch.cuda.synchronize()
    if name in process.saver().known_tags():
        ms.resume([name])
    torch.cuda.empty_cache()


def used_bytes() -> int:
    return ms.read_devices()[0].used_bytes


@pytest.mark.parametrize("nbytes", [16, 4096 - 16, 32 * 1024, 32 * 1024 + 16, 5 * MIB + 512, 64 * MIB])
def test_kernel_digest_equals_host_digest(tag: str, nbytes: int) -> None:
    key = (0x0123456789ABCDEF, 0xFEDCBA9876543210, 0x1122334455667788, 0x8877665544332211)
    with ms.region(tag):
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    on_device = process.saver().digest(0, data.data_ptr(), data.numel(), key)
    assert on_device == _native.digest_of(data.cpu().numpy(), key)


@pytest.mark.guards("unused cached blocks were backed up too")
def test_only_live_blocks_are_backed_up(tag: str) -> None:
    """Blocks that torch's allocator holds free inside a region are not copied."""
    with ms.region(tag, restore="host"):
        pieces = [torch.randn(16 * MIB // 4, device="cuda") for _ in range(8)]
    del pieces[1::2]
    gc.collect()
    report = ms.release([tag]).tags[0]
    assert report.backed_up_bytes == 4 * 16 * MIB
    ms.resume([tag])


@pytest.mark.guards("memory was unmapped while kernels still used it")
def test_release_waits_for_kernels_in_flight(tag: str) -> None:
    with ms.region(tag, restore="host"):
        data = torch.zeros(64 * MIB // 4, device="cuda")
    torch.cuda._sleep(500_000_000)
    data.add_(1)
    ms.release([tag])
    ms.resume([tag])
    assert bool((data == 1).all())


@pytest.mark.guards("replaying a graph failed after its memory was discarded", "releasing a graph freed nothing")
def test_graph_replays_after_release(tag: str) -> None:
    """The bytes of its pool are freed, as measured, and replay is correct without a new capture."""
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(4)]).cuda().half()
    with ms.region(tag + "-w", restore="host"):
        ms.adopt(model, tag + "-w", restore="host")
    with ms.region(tag + "-g", restore="host"):
        static_in = torch.zeros(256, 2048, device="cuda", dtype=torch.half)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        model(static_in)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.no_grad(), ms.graph(captured, tag=tag + "-g", stream=stream):
        static_out = model(static_in)
    static_in.copy_(torch.randn_like(static_in))
    captured.replay()
    expected = static_out.cpu()
    assert process.saver().owns(static_out.data_ptr())

    before = used_bytes()
    report = ms.release([tag + "-w", tag + "-g"])
    graph_tag = next(each for each in report.tags if each.tag == tag + "-g")
    assert graph_tag.released_bytes > 0
    assert before - used_bytes() >= report.released_bytes - SLACK
    ms.resume([tag + "-w", tag + "-g"])
    static_out.zero_()
    captured.replay()
    assert torch.equal(static_out.cpu(), expected)


def test_region_inside_a_capture(tag: str) -> None:
    """A workspace allocated during capture is under its own tag, not in the graph's pool."""
    stream = torch.cuda.Stream()
    data = torch.ones(1024, device="cuda")
    captured = torch.cuda.CUDAGraph()
    with ms.graph(captured, tag=tag + "-g", stream=stream):
        with ms.region(tag + "-ws", restore="zero"):
            workspace = torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")
        workspace.fill_(1)
        out = data * 2
    captured.replay()
    torch.cuda.synchronize()
    sizes = {each.tag: each.bytes for each in ms.status().tags}
    assert sizes[tag + "-ws"] == 32 * MIB
    names = [tag + "-g", tag + "-ws"]
    ms.release(names)
    ms.resume(names)
    captured.replay()
    assert bool((out == 2).all())
    assert bool((workspace == 1).all())


@pytest.mark.guards("running out of memory inside the allocator killed the process")
def test_out_of_memory_reaches_torch(tag: str) -> None:
    """torch frees its caches, tries again and raises its own error; the process goes on."""
    free, _ = torch.cuda.mem_get_info()
    cached = torch.empty(free // 2, dtype=torch.uint8, device="cuda")
    del cached  # torch keeps it cached: the next allocation succeeds only if torch frees that and tries again
    with ms.region(tag):
        large = torch.empty(int(free * 0.7), dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(free, dtype=torch.uint8, device="cuda")
        small = torch.ones(1000, device="cuda")
    assert float(small.sum()) == 1000
    del large


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_resume_while_another_process_holds_the_memory(tag: str) -> None:
    """It is an error, nothing is lost, and the retry works."""
    with ms.region(tag, restore="host"):
        data = torch.randn(512 * MIB, device="cuda")  # 2 GiB
    expected = float(data.double().sum())
    ms.release([tag])
    with CoTenant() as tenant:
        tenant.leave(1 << 30)
        with pytest.raises(ms.OutOfDeviceMemoryError) as caught:
            ms.resume([tag])
        assert caught.value.needed_bytes == 2048 * MIB
        assert caught.value.free_bytes < 2048 * MIB
        assert ms.status().state == "released"
    ms.resume([tag])
    assert float(data.double().sum()) == expected


def test_meter_equals_nvidia_smi(tag: str) -> None:
    with ms.region(tag):
        data = torch.ones(256 * MIB, device="cuda")
    torch.cuda.synchronize()
    reading = ms.read_devices()[0]
    shown = subprocess.run(
        ["nvidia-smi", f"--id={reading.uuid}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert abs(int(shown.stdout) * MIB - reading.used_bytes) <= 2 * MIB
    del data


def test_a_reading_where_nvml_fails_is_the_drivers(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example after an update of the driver's files under a running process."""
    shown = ms.read_devices()[0]

    def fail(*_: object, **__: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", fail)
    with ms.region(tag, restore="zero"):
        data = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
    told = ms.read_devices()[0]
    assert told.uuid == shown.uuid
    assert told.used_bytes >= shown.used_bytes + 256 * MIB - SLACK
    assert told.process_bytes is None
    assert ms.release([tag]).devices[0].delta_bytes <= -256 * MIB
    del data


def test_the_tail_of_a_cache_goes_and_comes_back(tag: str) -> None:
    """The driver's count and NVML's fall and rise by it while kernels use the rest."""
    with ms.region(tag, restore="zero", chunk_bytes=32 * MIB):
        caches = [torch.ones(500 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    pointers = [cache.data_ptr() for cache in caches]
    kept = 256 * MIB
    for _ in range(3):
        before, free = used_bytes(), process.saver().memory_info(0)[0]
        gone = ms.resize(tag, unused=[cache[kept:] for cache in caches]).released_bytes
        assert gone == 4 * (500 * MIB - kept)
        assert before - used_bytes() >= gone - SLACK
        assert process.saver().memory_info(0)[0] - free >= gone - SLACK
        for cache in caches:
            cache[:kept].add_(1)
        assert ms.resize(tag, fraction=1).resumed_bytes == gone
        assert abs(used_bytes() - before) <= SLACK
        assert all(not cache[kept:].any() for cache in caches)
        for cache in caches:
            cache[kept:].fill_(1)
    assert all(bool((cache[:kept] == 4).all()) for cache in caches)
    assert pointers == [cache.data_ptr() for cache in caches]


def test_memory_made_while_a_tag_is_shrunk_is_whole(tag: str) -> None:
    """torch keeps the blocks of freed tensors, some of them without memory, and hands none of those out."""
    with ms.region(tag, restore="zero", chunk_bytes=2 * MIB):
        tensors = [torch.ones(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
    ms.resize(tag, fraction=0.5)
    del tensors[1:]
    gc.collect()
    with ms.region(tag, restore="zero", chunk_bytes=2 * MIB):
        tensors += [torch.ones(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
    assert all(bool((tensor == 1).all()) for tensor in tensors[1:])
    ms.resize(tag, fraction=1)
    assert bool((tensors[0][: 32 * MIB] == 1).all())


def test_memory_does_not_creep_with_churn(tag: str) -> None:
    """Ranges freed inside shared chunks are reused; what is retained is accounted for, and a release frees it."""
    with ms.region(tag):
        tensors = [torch.empty(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(32)]
    ms.release([tag])
    ms.resume([tag])
    start = used_bytes()
    for round_ in range(10):
        del tensors[round_ % 2 :: 2]
        gc.collect()
        with ms.region(tag):
            tensors += [torch.empty(20 * MIB, dtype=torch.uint8, device="cuda") for _ in range(16)]
    assert used_bytes() <= start + 64 * MIB
    ms.release([tag])
    status = next(each for each in ms.status().tags if each.tag == tag)
    assert (status.resident_bytes, status.retained_bytes, status.chunks) == (0, 0, 0)
    ms.resume([tag])


@pytest.mark.guards("expandable segments made a release free nothing")
def test_expandable_segments_in_regions() -> None:
    """The region's memory is freed, as measured, or the region refuses."""
    told = output_of(
        """
        import torch, memsaver_core as ms
        try:
            with ms.region("weights"):
                w = torch.randn(64 << 20, device="cuda")
        except ms.ConfigurationError as error:
            print("refused", error)
        else:
            before = ms.read_devices()[0].used_bytes
            ms.release()
            print("fell", before - ms.read_devices()[0].used_bytes >= 240 << 20)
        """,
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        PYTORCH_ALLOC_CONF="expandable_segments:True",
    )
    assert told.startswith(("refused", "fell True")), told


STACKS = """
import ctypes, json, torch, memsaver_core as ms

limit = ctypes.c_size_t()
def stack_limit():
    assert ctypes.CDLL("libcuda.so.1").cuCtxGetLimit(ctypes.byref(limit), 0) == 0
    return limit.value
def used():
    return ms.read_devices()[0].used_bytes

kernel = torch.cuda._compile_kernel(r'''
extern "C" __global__ void spill(float* out, int n) {
  float data[1024];
  for (int i = 0; i < 1024; ++i) data[i] = i * n + threadIdx.x;
  float sum = 0;
  for (int i = 0; i < 1024; ++i) sum += data[(i * 17 + n) & 1023];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}''', "spill")
with ms.region("weights", restore="host"):
    out = torch.zeros(1024 * 256, device="cuda")
stream = torch.cuda.Stream()
graph = torch.cuda.CUDAGraph()
with torch.cuda.stream(stream):
    kernel(grid=(1024, 1, 1), block=(256, 1, 1), args=[out, 3])
    torch.cuda.synchronize()
    expected = out.clone()
    with torch.cuda.graph(graph, stream=stream):
        kernel(grid=(1024, 1, 1), block=(256, 1, 1), args=[out, 3])
torch.cuda.synchronize()
told = {"limit": stack_limit(), "cycles": []}
for _ in range(5):
    resident = used()
    report = ms.release()
    asleep, low = used(), stack_limit()
    seconds = ms.resume().seconds
    out.zero_()
    back = stack_limit()
    graph.replay()
    torch.cuda.synchronize()
    told["cycles"].append({"low": low, "freed": resident - asleep, "back": back, "after": used() - resident,
                           "right": torch.equal(out, expected), "seconds": [report.seconds, seconds]})
print(json.dumps(told))
"""


@pytest.mark.guards(
    "the stacks of kernels stayed on the device", "replaying a graph failed after its memory was discarded"
)
def test_stacks_of_kernels_are_given_back() -> None:
    """Also those of a kernel that needed more than the default, in a captured graph; the limit is then as before."""
    told = json.loads(output_of(STACKS).splitlines()[-1])
    assert told["limit"] >= 4096
    for cycle in told["cycles"]:
        assert cycle["right"], told
        assert cycle["low"] < 1024, told
        assert cycle["back"] == told["limit"], told
        assert cycle["freed"] > 512 * MIB, told  # 4 KiB for each of some 270,000 threads
        assert cycle["after"] <= SLACK, told
