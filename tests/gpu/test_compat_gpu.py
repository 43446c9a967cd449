"""torch_memory_saver's API on a real GPU, in both hook modes.

Each test runs in a process of its own, started as an engine starts its workers. If it fails, it prints what the device,
the saver and torch's allocator held.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from contextlib import nullcontext
from pathlib import Path

import pytest

from memsaver_core.compat.torch_memory_saver import configure_subprocess

pytestmark = pytest.mark.gpu

both_modes = pytest.mark.parametrize("mode", ["preload", "torch"])

SETUP = """
import memsaver_core.compat
memsaver_core.compat.install()
import ctypes, gc, os, sys, time
import torch
import memsaver_core as ms
from memsaver_core import process
from torch_memory_saver import torch_memory_saver as saver
from torch_memory_saver.testing_utils import get_and_print_gpu_memory

MIB = 1 << 20
GIB = 1 << 30
SLACK = 32 * MIB  # streams, a kernel's module, page tables of pinned memory
saver.hook_mode = os.environ["HOOK_MODE"]
torch.zeros(1, device="cuda")

def used(message=""):
    torch.cuda.synchronize()
    value = get_and_print_gpu_memory(message)
    print(f"  {value / MIB:.1f} MiB")
    return value

def full(size, value):
    return torch.full((size,), value, dtype=torch.uint8, device="cuda")

def all_equal(tensor, value):
    return bool((tensor == value).all())

def owned(tensor):
    return process.saver().owns(tensor.untyped_storage().data_ptr())

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def explain(kind, error, trace):
    sys.__excepthook__(kind, error, trace)
    for name, value in list(globals().items()):
        if not name.startswith("_") and isinstance(value, (bool, int, float, str, list, set, tuple)):
            print(f"{name} = {str(value)[:200]}", file=sys.stderr)
    for tag in ms.status().tags:
        print(tag, file=sys.stderr)
    for device in ms.read_devices():
        print(device, file=sys.stderr)
    for segment in torch.cuda.memory_snapshot():
        blocks = [(block["state"], block["size"]) for block in segment["blocks"]]
        owner = "saver" if process.saver().owns(segment["address"]) else "torch"
        place = hex(segment["address"]), segment["segment_pool_id"], segment["total_size"]
        print(owner, *place, blocks, file=sys.stderr)

sys.excepthook = explain
"""


def run(code: str, mode: str, **environment: str) -> None:
    with tempfile.TemporaryDirectory() as folder, configure_subprocess() if mode == "preload" else nullcontext():
        script = Path(folder) / "script.py"  # a file, so that a traceback shows its lines
        script.write_text(SETUP + textwrap.dedent(code))
        ran = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
            env={**os.environ, "HOOK_MODE": mode, **environment},
        )
    print(ran.stdout)
    assert ran.returncode == 0, f"exit {ran.returncode}\n{ran.stderr}"


@both_modes
def test_simple(mode: str) -> None:
    run(
        """
        with saver.region():
            tensor = full(GIB, 100)
        address = tensor.data_ptr()
        before = used("before")
        saver.pause()
        assert used("paused") <= before - GIB + SLACK
        saver.resume()
        assert abs(used("resumed") - before) <= SLACK
        assert tensor.data_ptr() == address
        tensor.fill_(3)
        assert all_equal(tensor, 3)
        saver.pause("unknown")
        saver.resume()
        """,
        mode,
    )


@both_modes
@pytest.mark.guards("replaying a graph failed after its memory was discarded", "releasing a graph freed nothing")
def test_cuda_graph(mode: str) -> None:
    """The memory of the cache and of the graphs is freed, and replay is correct afterwards."""
    run(
        """
        size = 16 * MIB
        with saver.region("kv_cache"):
            cache = torch.ones(256 * MIB, device="cuda")
        inputs = torch.ones(size, device="cuda")

        def step():
            return (inputs.repeat(8) * 2).view(8, size).sum(0) + cache[0]

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        pool = torch.cuda.graph_pool_handle()
        graphs, results = [], []
        for _ in range(2):
            graph = torch.cuda.CUDAGraph()
            with saver.cuda_graph(cuda_graph=graph, pool=pool, stream=stream, tag="cuda_graph"):
                result = step()
            graphs.append(graph)
            results.append(result)
        pool_bytes = next(tag.bytes for tag in ms.status().tags if tag.tag == "cuda_graph")
        assert GIB <= pool_bytes < 2 * GIB, pool_bytes  # the graphs share it
        for graph, result in zip(graphs, results):
            graph.replay()
            assert all_equal(result, 17)
        before = used("before")
        saver.pause(tag="kv_cache")
        assert used("cache paused") <= before - GIB + SLACK
        saver.pause(tag="cuda_graph")
        assert used("graphs paused") <= before - GIB - pool_bytes + SLACK
        saver.resume(tag="cuda_graph")
        saver.resume(tag="kv_cache")
        assert not cache.any()
        cache.fill_(3)
        inputs.fill_(5)
        for graph, result in zip(graphs, results):
            graph.replay()
            assert all_equal(result, 83)
        own = torch.cuda.CUDAGraph()
        with saver.cuda_graph(own, tag="other", enable_cpu_backup=True):
            other = inputs * 2
        saver.pause()
        saver.resume()
        cache.fill_(3)
        own.replay()
        assert all_equal(other, 10)
        """,
        mode,
    )


@both_modes
@pytest.mark.parametrize("backend", ["pinned", "mmap"])
def test_cpu_backup(mode: str, backend: str) -> None:
    run(
        f"""
        with saver.region(enable_cpu_backup=True, cpu_backup_backend={backend!r}):
            kept = full(20_000_000, 10)
            typed = torch.randn(10, 20, 30, device="cuda")
            large = torch.randint(0, 255, (100 * MIB,), dtype=torch.uint8, device="cuda")
        with saver.region(enable_cpu_backup=False):
            scratch = full(20_000_000, 20)
        expected, expected_large = typed.cpu(), large.cpu()
        assert saver.get_cpu_backup(typed) is None
        before = used("before")
        saver.pause()
        assert used("paused") < before - 100 * MIB
        assert torch.equal(saver.get_cpu_backup(typed), expected)
        assert torch.equal(saver.get_cpu_backup(typed, zero_copy=True), expected)
        assert torch.equal(saver.get_cpu_backup(large), expected_large)
        assert torch.equal(saver.get_cpu_backup(large, zero_copy=True), expected_large)
        try:
            saver.get_cpu_backup(scratch)
        except AssertionError as error:
            assert "without a backup" in str(error)
        else:
            raise SystemExit("no error")
        unrelated = full(160 * MIB, 30)
        saver.resume()
        assert all_equal(kept, 10)
        assert torch.equal(typed.cpu(), expected)
        assert torch.equal(large.cpu(), expected_large)
        assert scratch[:3].tolist() != [20, 20, 20]
        assert saver.get_cpu_backup(kept) is None
        """,
        mode,
    )


@both_modes
def test_retained_backup(mode: str) -> None:
    """It keeps its address after a resume, and the next pause refreshes it."""
    run(
        """
        assert saver.retain_cpu_backup is False
        with saver.region(tag="retained", enable_cpu_backup=True):
            tensor = torch.randn(1000, device="cuda")
        expected = tensor.cpu()
        saver.pause("retained")
        address = saver.get_cpu_backup(tensor, zero_copy=True).data_ptr()
        saver.retain_cpu_backup = True
        for _ in range(2):
            saver.resume("retained")
            backup = saver.get_cpu_backup(tensor, zero_copy=True)
            assert backup.data_ptr() == address and torch.equal(backup, expected)
            assert torch.equal(tensor.cpu(), expected)
            tensor.normal_()
            expected = tensor.cpu()
            saver.pause("retained")
            assert torch.equal(saver.get_cpu_backup(tensor), expected)
        saver.retain_cpu_backup = False
        saver.resume("retained")
        assert torch.equal(tensor.cpu(), expected)
        assert saver.get_cpu_backup(tensor) is None
        """,
        mode,
    )


@both_modes
@pytest.mark.parametrize("retain", ["0", "1"])
@pytest.mark.parametrize("backend", ["pinned", "mmap"])
@pytest.mark.guards("host memory stayed resident after a resume, or freeing it slowed the resume")
def test_resident_memory_after_a_resume(mode: str, retain: str, backend: str) -> None:
    """Without retention the host memory is returned to the kernel if the host lacks memory; with it, it stays. Nothing
    is pinned before the first pause, so that each pause adds the whole memory."""
    run(
        """
        from memsaver_core.compat.torch_memory_saver import state

        state.is_plentiful = lambda spare: False
        retain = os.environ["TMS_RETAIN_CPU_BACKUP"] == "1"
        assert saver.retain_cpu_backup is retain
        assert saver._impl._binary_wrapper.cdll.tms_get_cpu_backup_backend().decode() in ("pinned", "mmap")
        with saver.region(enable_cpu_backup=True):
            tensor = torch.randint(0, 255, (GIB,), dtype=torch.uint8, device="cuda")
        with saver.region("first", enable_cpu_backup=True):
            first = full(MIB, 1)
        saver.pause("first")  # memory that the first operation loads does not count
        saver.resume("first")
        before = rss()
        for _ in range(2):
            saver.pause()
            assert rss() >= before + GIB * 0.9
            saver.resume()
            deadline = time.monotonic() + 60
            while not retain and rss() > before + GIB // 4:
                assert time.monotonic() < deadline, (before, rss())
                time.sleep(0.01)
            assert (rss() >= before + GIB * 0.9) == retain
        """,
        mode,
        TMS_RETAIN_CPU_BACKUP=retain,
        TMS_INIT_CPU_BACKUP_BACKEND=backend,
        MEMSAVER_PREPARE_BACKUP="0",
    )


@both_modes
@pytest.mark.guards("backup files were left behind")
def test_disk_backup_over_three_cycles(mode: str, tmp_path: Path) -> None:
    """The same bytes and disk space each time, and no file left behind."""
    run(
        """
        folder = os.environ["FOLDER"]
        saver.set_disk_backup_dir(folder)
        with saver.region(enable_disk_backup=True):
            kept = torch.randint(256, (100 * MIB,), dtype=torch.uint8, device="cuda")  # cannot be packed
            typed = torch.randn(10, 20, 30, device="cuda")
        with saver.region():
            scratch = full(20_000_000, 20)
        expected = [kept.clone(), typed.clone()]
        sizes = set()
        before = used("before")
        for _ in range(3):
            saver.pause()
            assert used("paused") < before - 80 * MIB
            sizes.add(ms.status().host_backup.file_bytes)
            assert saver.get_cpu_backup(kept) is None
            unrelated = full(140 * MIB, 30)
            del unrelated
            torch.cuda.empty_cache()
            saver.resume()
            assert torch.equal(kept, expected[0]) and torch.equal(typed, expected[1])
            assert scratch[:3].tolist() != [20, 20, 20]
            scratch.fill_(20)
        assert len(sizes) == 1 and sizes.pop() >= 100 * MIB
        """,
        mode,
        FOLDER=str(tmp_path / "backups"),
    )
    assert list((tmp_path / "backups").iterdir()) == []


@both_modes
def test_tags_of_an_rl_step(mode: str) -> None:
    run(
        """
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(8192, 8192, bias=False, device="cuda")

            def forward(self, inputs):
                return self.linear(inputs)

        with torch.no_grad():
            with saver.region(tag="weights", enable_cpu_backup=True):
                model = Model()
            with saver.region(tag="kv_cache"):
                cache = torch.ones(256 * MIB, device="cuda")
            inputs = torch.randn(4, 8192, device="cuda")
            expected = model(inputs)
            weight_bytes = model.linear.weight.nbytes
            pointers = model.linear.weight.data_ptr(), cache.data_ptr()
            before = used("rollout")
            for _ in range(3):
                saver.pause("kv_cache")
                assert used("cache paused") <= before - GIB + SLACK
                assert torch.equal(model(inputs), expected)
                saver.pause("weights")
                assert used("training") <= before - GIB - weight_bytes + SLACK
                training = full(GIB, 1)
                del training
                torch.cuda.empty_cache()
                saver.resume("weights")
                assert torch.equal(model(inputs), expected)
                saver.resume("kv_cache")
                assert not cache.any()
                cache.fill_(1)
                assert pointers == (model.linear.weight.data_ptr(), cache.data_ptr())
            assert abs(used("rollout") - before) <= 2 * SLACK
        """,
        mode,
    )


@both_modes
def test_leaving_a_region(mode: str) -> None:
    """disable(), the private setter and nested regions; memory allocated outside is freed when disable() ends."""
    run(
        """
        with saver.region("outer", enable_cpu_backup=True):
            before = full(MIB, 1)
            level = used("in region")
            with saver.disable():
                ordinary = full(GIB, 2)
                with saver.region("inner"):
                    inner = full(MIB, 3)
                states = [owned(each) for each in (before, ordinary, inner)]
                del ordinary
            assert states == [True, False, True], states
            assert used("after disable") <= level + SLACK
            cdll = saver._impl._binary_wrapper.cdll
            cdll.tms_set_interesting_region(False)
            buffer = full(30 * MIB, 4)
            cdll.tms_set_interesting_region(True)
            after = full(30 * MIB, 5)
            assert not owned(buffer) and owned(after)
        assert not owned(full(30 * MIB, 6))
        saver.pause()
        assert all_equal(buffer, 4)
        saver.resume()
        assert all_equal(before, 1) and all_equal(after, 5)
        """,
        mode,
    )


@both_modes
@pytest.mark.guards("running out of memory inside the allocator killed the process")
def test_memory_margin(mode: str) -> None:
    """torch frees its caches, tries again and raises its own error; the process goes on."""
    run(
        """
        free, _ = torch.cuda.mem_get_info()
        saver.memory_margin_bytes = free - 512 * MIB
        with saver.region():
            small = full(256 * MIB, 1)
            try:
                full(GIB, 1)
            except torch.OutOfMemoryError:
                pass
            else:
                raise SystemExit("no error")
        saver.memory_margin_bytes = 0
        with saver.region():
            large = full(GIB, 1)
        assert all_equal(small, 1) and all_equal(large, 1)
        """,
        mode,
    )


def test_training_engine() -> None:
    """All of a trainer's memory is under the default tag; it keeps working in disable(), and torch can evict its
    cache."""
    run(
        """
        def forward(weights):
            ones = torch.ones(GIB, dtype=torch.float32, device="cuda")
            mean = sum(weight.float().mean() for weight in weights) / len(weights)
            assert (ones * mean).mean().item() == 42

        initial = full(1_000_000, 41)
        assert owned(initial)
        at_start = used("start")
        weights = [full(size, 42) for size in (GIB, MIB, 1024, 42)]
        forward(weights)
        assert used("after a forward pass") > at_start + 5 * GIB
        saver.pause()
        paused = used("paused")
        assert paused < at_start + 200 * MIB
        with saver.disable():
            assert abs(used("disabled") - paused) <= SLACK
            tensor = full(GIB, 53)
            assert not owned(tensor)
            assert tensor.float().mean().item() == 53
            assert used("used in disable") > paused + 4 * GIB
            del tensor
        assert used("after disable") <= paused + SLACK
        saver.resume()
        assert used("resumed") >= paused + GIB
        forward(weights)
        _, total = torch.cuda.mem_get_info()
        torch.cuda.empty_cache()
        first = full(int(total * 0.3), 1)
        second = full(int(total * 0.3), 1)
        del first, second
        third = full(int(total * 0.6), 1)  # fits once torch has freed the cached blocks of the other two
        initial += 1
        assert all_equal(initial, 42) and all(all_equal(weight, 42) for weight in weights)
        """,
        "preload",
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )


def test_raw_allocation_of_an_odd_size() -> None:
    """6,912 bytes from cudaMalloc, paused and resumed through C, freed by cudaFree."""
    run(
        """
        api = ctypes.CDLL(None)
        pointer = ctypes.c_void_p()
        size = ctypes.c_size_t(6912)
        torch.cuda.empty_cache()  # a pause frees torch's caches, which are under the default tag too
        level = sum(tag.bytes for tag in ms.status().tags)
        assert api.cudaMalloc(ctypes.byref(pointer), size) == 0
        assert process.saver().owns(pointer.value)
        assert api.cudaMemset(pointer, 7, size) == 0
        assert api.tms_pause(None) == 0
        assert api.tms_resume(None) == 0
        back = (ctypes.c_uint8 * 6912)()
        assert api.cudaMemcpy(back, pointer, size, 2) == 0
        assert bytes(back) == bytes([7]) * 6912
        assert api.cudaFree(pointer) == 0
        assert sum(tag.bytes for tag in ms.status().tags) == level
        """,
        "preload",
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )


def test_nested_regions_under_init_enable() -> None:
    run(
        """
        size = 10_000_000
        cdll = saver._ensure_initialized()._binary_wrapper.cdll
        def state():
            return cdll.tms_get_interesting_region(), cdll.tms_get_enable_cpu_backup(), cdll.tms_get_current_tag()
        assert state() == (True, True, b"default")
        assert cdll.tms_get_cpu_backup_backend() == b"pinned"
        weights = torch.full((size,), 42.0, device="cuda")
        with saver.region(tag="grad_buffer", enable_cpu_backup=False):
            assert state() == (True, False, b"grad_buffer")
            gradients = torch.full((size,), 99.0, device="cuda")
        assert state() == (True, True, b"default")
        with saver.region(enable_cpu_backup=True, cpu_backup_backend="mmap"):
            assert cdll.tms_get_cpu_backup_backend() == b"mmap"
            full(1024, 1)
        assert cdll.tms_get_cpu_backup_backend() == b"pinned"
        before = used("before")
        saver.pause()
        assert used("paused") < before - size * 4
        saver.resume()
        assert all_equal(weights, 42)
        gradients.fill_(0)
        assert not gradients.any()
        extra = torch.full((size,), 7.0, device="cuda")
        saver.pause()
        saver.resume()
        assert all_equal(extra, 7) and all_equal(weights, 42)
        """,
        "preload",
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )


def test_graphs_of_torch_under_init_enable() -> None:
    """A graph captured by torch.cuda.graph is under the default tag, and its whole pool keeps its content."""
    run(
        """
        inputs = torch.ones(16 * MIB, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            state = torch.arange(16 * MIB, device="cuda", dtype=torch.float32)
            result = (inputs * 2 + 1).sum() + inputs.mean()
        graph.replay()
        expected = result.item()
        before = used("before")
        saver.pause()
        assert used("paused") < before - 64 * MIB
        saver.resume()
        graph.replay()
        assert result.item() == expected
        """,
        "preload",
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )


def test_asynchronous_allocator_of_torch() -> None:
    """cudaMallocAsync and cudaFreeAsync are intercepted too."""
    run(
        """
        tensor = full(GIB, 42)
        assert owned(tensor)
        other = full(64 * MIB, 1)
        del other
        before = used("before")
        saver.pause()
        assert used("paused") <= before - GIB + SLACK
        saver.resume()
        assert all_equal(tensor, 42)
        del tensor
        torch.cuda.synchronize()
        assert sum(tag.bytes for tag in ms.status().tags) < GIB
        """,
        "preload",
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
        PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
    )


@both_modes
def test_backup_memory_changes_during_a_capture(mode: str) -> None:
    """Other threads pin and free host memory during a capture, which stays valid."""
    run(
        """
        import threading
        core = process.saver()
        with saver.region("kept", enable_cpu_backup=True):
            tensor = torch.randint(256, (GIB,), dtype=torch.uint8, device="cuda")  # cannot be packed
        content = tensor.clone()
        inputs = torch.ones(MIB, device="cuda")
        done = []

        def change():
            core.prepare_backup()
            core.wait_until_prepared()
            assert ms.status().host_backup.capacity_bytes >= GIB
            core.drop_backups([])  # frees unused memory in the background
            while ms.status().host_backup.capacity_bytes:
                time.sleep(0.01)
            done.append(True)

        graph = torch.cuda.CUDAGraph()
        with saver.cuda_graph(graph, tag="graph"):
            first = inputs * 2
            other = threading.Thread(target=change, daemon=True)
            other.start()
            other.join(60)
            second = first + 1
        assert done
        graph.replay()
        assert all_equal(second, 3)
        saver.pause()
        saver.resume()
        graph.replay()
        assert torch.equal(tensor, content) and all_equal(second, 3)
        """,
        mode,
    )


@both_modes
@pytest.mark.guards("the process aborted at exit")
def test_pools_that_end_inside_a_region(mode: str) -> None:
    """torch ends the process if a pool is destroyed while another one is in use."""
    run(
        """
        graph = torch.cuda.CUDAGraph()
        inputs = torch.ones(MIB, device="cuda")
        with saver.cuda_graph(graph, tag="graph"):
            result = inputs * 2
        with saver.region("around"):
            del graph, result
            gc.collect()
            around = full(MIB, 1)
        torch.cuda.empty_cache()
        assert not [tag for tag in ms.status().tags if tag.tag == "graph" and tag.bytes]
        for value in (2, 3):
            saver.pause("inner")
            with saver.region("around"), saver.region("inner"):
                inner = full(30 * MIB, value)
            assert owned(inner) and all_equal(inner, value)
            saver.resume("inner")
            with saver.region("around"), saver.region("inner"):
                again = full(30 * MIB, value)
            assert all_equal(again, value) and all_equal(around, 1)
        """,
        mode,
    )


@both_modes
def test_pools_that_are_let_go_of(mode: str) -> None:
    """Blocks that torch holds free in a region's pool are freed once the pool is dropped; the rest stays usable."""
    run(
        """
        def level():
            return sum(tag.bytes for tag in ms.status().tags if tag.tag == "cleared")

        for drop in (lambda: saver._impl._mem_pools.clear(),
                     lambda: saver._impl._mem_pools.pop(("cleared", True, False, "pinned", 0))):
            with saver.region("cleared", enable_cpu_backup=True):
                kept = full(30 * MIB, 7)
                dead = full(GIB, 1)
            del dead
            torch.cuda.empty_cache()
            assert level() >= GIB
            drop()
            torch.cuda.empty_cache()
            assert level() < GIB
            saver.pause("cleared")
            saver.resume("cleared")
            assert all_equal(kept, 7)
        """,
        mode,
    )
