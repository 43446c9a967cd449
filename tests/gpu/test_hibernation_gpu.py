"""Hibernation on a real GPU: the device holds nothing, and everything comes back."""

from __future__ import annotations

import textwrap
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import serving
from tests.gpu.children import process_mib, two_devices
from tests.native import injection
from tests.programs import Child, output_of
from tests.waiting import wait_until

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def run(code: str) -> str:
    return output_of(SETUP + textwrap.dedent(code), **injection.in_child())


SETUP = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    import torch
    import memsaver_core as ms
    from memsaver_core import hibernation
    from tests.native import injection

    def used():  # in another process, because NVML blocks in a hibernated one
        gpu = f"--id=GPU-{torch.cuda.get_device_properties(0).uuid}"
        command = ["nvidia-smi", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    empty = used()
    with ms.region("weights"):
        weights = torch.randn(4096, 4096, device="cuda")
        static = torch.randn(256, 4096, device="cuda")
    with ms.region("kv_cache"):
        cache = torch.ones(1 << 28, device="cuda")
    stream = torch.cuda.Stream()
    with ms.region("workspace"), torch.cuda.stream(stream):
        static @ weights
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with ms.graph(graph, stream=stream):
        out = static @ weights
    graph.replay()
    expected = out.cpu()
    """
)


def test_cycles_leave_nothing_and_bring_everything_back() -> None:
    told = run(
        """
        left, down, up = [], [], []
        total = ms.read_devices()[0].total_bytes
        for cycle in range(10):
            start = time.monotonic()
            report = ms.release(hibernate=True)
            down.append(next(p.seconds for p in report.phases if p.name == "hibernate"))
            left.append(used() - empty)
            assert ms.status().hibernated and ms.status().state == "released"
            assert ms.release().released_bytes == 0  # a repeat is success and touches no driver
            assert abs(ms.read_devices()[0].used_bytes / 2**20 - used()) <= 2
            assert ms.read_devices()[0].process_bytes / 2**20 <= 16
            assert ms.read_devices()[0].total_bytes == total
            report = ms.resume()
            up.append(next(p.seconds for p in report.phases if p.name == "wake"))
            out.zero_()
            graph.replay()
            assert torch.equal(out.cpu(), expected), cycle
            assert not cache.any()
        print("left", max(left), "hibernate", max(down), "wake", max(up))
        print("helper", open(f"/proc/{hibernation.this_process._helper.pid}/statm").read().split()[1])
        """
    )
    print(told)
    words = told.split()
    assert float(words[1]) <= 16
    assert int(words[-1]) < 20_000  # KiB of its own; the driver library it maps is shared with all others


def test_killed_helper_is_replaced() -> None:
    told = run(
        """
        ms.release(hibernate=True)
        os.kill(hibernation.this_process._helper.pid, signal.SIGKILL)
        try:
            ms.resume()
        except ms.MemsaverError as error:
            assert "repeat" in str(error), error
            ms.resume()
        graph.replay()
        assert torch.equal(out.cpu(), expected)
        print("fine")
        """
    )
    assert "fine" in told


def test_killed_engine_leaves_nothing() -> None:
    code = "ms.release(hibernate=True)\nprint(hibernation.this_process._helper.pid, flush=True)\nsys.stdin.read()\n"
    with Child("-c", SETUP + code) as engine:
        helper = int(engine.read_line())
        assert process_mib(engine.process.pid) <= 16
        engine.kill()

    def has_ended() -> bool:  # once it sees the socket close
        try:
            return "Z" in Path(f"/proc/{helper}/stat").read_text()
        except FileNotFoundError:
            return True

    wait_until(has_ended)
    assert process_mib(engine.process.pid) == 0


def test_released_but_resident_tags_survive() -> None:
    """The driver's checkpoint keeps content that was not released."""
    told = run(
        """
        ms.release(["kv_cache"], hibernate=True)
        assert used() - empty <= 16
        ms.resume(["kv_cache"])
        graph.replay()
        assert torch.equal(out.cpu(), expected)
        print("fine")
        """
    )
    assert "fine" in told


def test_each_failed_step_is_undone_and_told() -> None:
    """The process runs on or is still hibernated, and the error says which; nothing is lost, and the repeat works."""
    told = run(
        """
        def refused(call, words):
            try:
                call()
            except ms.DriverError as error:
                assert words in str(error), error
            else:
                raise AssertionError(words)

        def awake():
            ms.resume()
            out.zero_()
            graph.replay()
            assert torch.equal(out.cpu(), expected)

        hibernate = lambda: ms.release(hibernate=True)
        for step in ("lock", "checkpoint"):
            injection.fail_step(step)
            refused(hibernate, f"{step} failed: INJECTED; the process runs on as before")
            assert not ms.status().hibernated and not hibernation.is_away()
            torch.cuda.synchronize()  # CUDA calls do not block
            awake()
        injection.fail_step("checkpoint")
        injection.fail_step("unlock")  # of the undo
        refused(hibernate, "the process runs on as before")
        awake()
        hibernate()
        injection.fail_step("restore")
        refused(ms.resume, "restore failed: INJECTED; the process is still hibernated; repeat the call")
        assert ms.status().hibernated and used() - empty <= 16
        awake()
        hibernate()
        injection.fail_step("unlock", times=2)
        refused(ms.resume, "its calls still wait; resume again")
        awake()
        hibernate()
        injection.fail_step("unlock")
        assert ms.resume().phases[0].details["unlock_repeats"] == 1
        awake()
        print("fine")
        """
    )
    assert "fine" in told


def test_a_process_that_cannot_be_restored_is_failed() -> None:
    """No call waits for the device, which will not come back."""
    told = run(
        """
        ms.release(hibernate=True)
        injection.fail_step("restore", lost=True)
        for call in (ms.resume, ms.release, ms.resume):
            try:
                call()
            except ms.ContextLostError as error:
                print(error)
        print(ms.status().state, ms.status().failure, ms.read_devices()[0].used_bytes >= 0, flush=True)
        os._exit(0)  # a normal exit would wait for the device
        """
    )
    assert told.count("the driver cannot restore this process; restart it") == 4
    assert "\nfailed " in told


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_a_wake_waits_for_the_memory_that_a_co_tenant_took() -> None:
    """Refused with figures before the driver is asked, because its failure would lose the process; then the same
    call works."""
    told = run(
        """
        ms.release(["kv_cache"], hibernate=True)
        code = "import sys, torch\\nfree = torch.cuda.mem_get_info()[0]\\n"
        code += "held = torch.empty(free - (300 << 20), dtype=torch.uint8, device='cuda')\\n"
        code += "print('has it', flush=True); sys.stdin.read()"
        other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdout.readline() == "has it\\n"
        for _ in range(2):
            try:
                ms.resume()
            except ms.OutOfDeviceMemoryError as error:
                assert error.needed_bytes > error.free_bytes > 0 and error.device == 0, error
                assert "still hibernated" in str(error), error
            else:
                raise AssertionError("there was room")
        assert ms.status().hibernated
        other.communicate()
        while used() - empty > 16:  # its memory is freed shortly after it ends
            time.sleep(0.05)
        ms.resume()
        graph.replay()
        assert torch.equal(out.cpu(), expected)
        print("fine")
        """
    )
    assert "fine" in told


@pytest.mark.guards("the process aborted at exit")
def test_a_hibernated_server_ends_without_a_wake_up() -> None:
    """The device may have no memory for one."""
    options = ("--kv-cache-bytes", "1GiB", "--batch-sizes", "1")
    with (
        serving(*options, changes={"MEMSAVER_DRIVER": "cuda"}) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.post("/release_memory_occupation", json={"hibernate": True}).status_code == 200
        assert server.end() == 0, server.log
        assert "ending" in server.log


def test_managed_memory_is_seen_and_refused() -> None:
    """The driver's checkpoint of such a process fails and leaves it unusable."""
    told = run(
        """
        import ctypes
        cuda = ctypes.CDLL("libcuda.so.1")
        assert ms.hibernation_obstacles() == [], ms.hibernation_obstacles()
        address = ctypes.c_uint64()
        assert cuda.cuMemAllocManaged(ctypes.byref(address), ctypes.c_size_t(8 << 20), 1) == 0
        [reason] = ms.hibernation_obstacles()
        assert "managed memory" in reason, reason
        try:
            ms.release(hibernate=True)
        except ms.UnsupportedError as error:
            assert "managed memory" in str(error) and "nothing was released" in str(error)
        assert ms.status().state == "resident"
        graph.replay()
        assert torch.equal(out.cpu(), expected)
        print("fine")
        """
    )
    assert "fine" in told


def test_nccl_of_one_process_sleeps_along() -> None:
    """vLLM has such a group even on one device; it shares memory with no other process."""
    told = run(
        """
        import tempfile
        import torch.distributed as dist
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
            ones = torch.ones(1000, device="cuda")
            dist.all_reduce(ones)
            assert ms.hibernation_obstacles() == [], ms.hibernation_obstacles()
            ms.release(hibernate=True)
            assert used() - empty <= 16, used() - empty
            ms.resume()
            dist.all_reduce(ones)
            assert bool((ones == 1).all())
            dist.destroy_process_group()
        print("fine")
        """
    )
    assert "fine" in told


def test_shared_tensors_are_seen_and_refused() -> None:
    told = run(
        """
        import torch.multiprocessing as mp
        assert ms.hibernation_obstacles() == [], ms.hibernation_obstacles()
        shared = torch.ones(1000, device="cuda")
        queue = mp.get_context("spawn").SimpleQueue()
        queue.put(shared)
        assert "CUDA IPC" in ms.hibernation_obstacles()[0]
        del shared
        assert ms.hibernation_obstacles() == [], ms.hibernation_obstacles()
        print("fine", flush=True)
        os._exit(0)  # the queue has no reader
        """
    )
    assert "fine" in told


@two_devices
def test_nccl_of_two_processes_is_seen_and_refused() -> None:
    told = run(
        """
        import tempfile
        import torch.distributed as dist
        OTHER = '''
        import sys, torch, torch.distributed as dist
        dist.init_process_group("nccl", init_method=sys.argv[1], rank=1, world_size=2)
        dist.all_reduce(torch.ones(1, device="cuda:1"))
        dist.barrier(device_ids=[1])
        dist.destroy_process_group()
        '''
        with tempfile.TemporaryDirectory() as folder:
            meet = f"file://{folder}/store"
            other = subprocess.Popen([sys.executable, "-c", "\\n".join(map(str.strip, OTHER.splitlines())), meet])
            try:
                dist.init_process_group("nccl", init_method=meet, rank=0, world_size=2)
                dist.all_reduce(torch.ones(1, device="cuda"))
                [reason] = ms.hibernation_obstacles()  # NCCL is too old, or has to be suspended first
                assert "communicator" in reason, reason
                try:
                    ms.release(hibernate=True)
                except ms.UnsupportedError as error:
                    assert reason in str(error) and "nothing was released" in str(error)
                assert ms.status().state == "resident"
                dist.barrier(device_ids=[0])
                dist.destroy_process_group()
                assert other.wait() == 0
            finally:
                other.kill()
        assert ms.hibernation_obstacles() == [], ms.hibernation_obstacles()
        print("fine")
        """
    )
    assert "fine" in told


@two_devices
def test_devices_that_reach_each_other_are_seen_and_refused() -> None:
    """CUDA reports two GPUs with NVLink between them as soon as both are in use, before anything is copied."""
    told = run(
        """
        other = torch.ones(1000, device="cuda:1")
        [reason] = ms.hibernation_obstacles()
        assert "reach each other's memory" in reason, reason
        other.to("cuda:0")
        torch.cuda.synchronize()
        assert ms.hibernation_obstacles() == [reason], ms.hibernation_obstacles()
        print("fine")
        """
    )
    assert "fine" in told


def test_each_step_of_a_trim_gives_back_what_it_names() -> None:
    """Without graphs the workspaces are freed too; with a graph they stay, and the report says so."""
    told = run(
        """
        held = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
        del held
        passing = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        del passing
        report = ms.release(trim=True)
        phases = {phase.name: phase for phase in report.phases}
        delta = {name: sum(device.delta_bytes for device in phase.devices) for name, phase in phases.items()}
        assert delta["empty_cache"] <= -(256 << 20), delta
        assert phases["trim_pinned"].details["host_bytes"] in (0, 64 << 20), phases["trim_pinned"]
        assert phases["trim_workspaces"].details["kept_for_graphs"] == 1
        ms.resume()
        graph.replay()
        assert torch.equal(out.cpu(), expected)
        del graph
        report = ms.release(trim=True)
        phases = {phase.name: phase for phase in report.phases}
        assert phases["trim_workspaces"].details["kept_for_graphs"] == 0
        print("fine", delta)
        """
    )
    print(told)
    assert "fine" in told


def test_what_remains_is_explained() -> None:
    """Every byte of the device has a source, among them the memory of captured graphs."""
    told = run(
        """
        from memsaver_server.engine.device_monitor import Sample
        from memsaver_server.engine.memory_breakdown import break_down
        graphs = []
        for size in range(8):
            graphs.append(torch.cuda.CUDAGraph())
            with ms.graph(graphs[-1], stream=stream):
                kept = static @ weights
        torch.cuda.synchronize()

        def explain(when):
            [device] = ms.read_devices()
            sample = Sample(
                0.0, (device,), ms.status(), {0: ms.read_torch_memory(0)}, {0: ms.graph_memory_bytes(0)}
            )
            found = break_down(device, sample)
            assert sum(each.bytes for each in found) == device.used_bytes
            print(when, {each.name: round(each.bytes / 2**20, 1) for each in found}, flush=True)
            return {each.kind: each.bytes for each in found if each.kind != "tag"}

        explain("loaded")
        for each in graphs:
            each.replay()
        torch.cuda.synchronize()
        explain("replayed")
        ms.release(trim=True)
        assert explain("released")["torch"] < 64 << 20
        ms.release(hibernate=True)
        found = explain("hibernated")
        assert found["process"] <= 16 << 20
        ms.resume()
        print("fine")
        """
    )
    print(told)
    assert "fine" in told
