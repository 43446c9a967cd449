"""Hibernation on a real GPU: the last byte goes, and everything is there again afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pynvml
import pytest

pytestmark = pytest.mark.gpu

MIB = 1 << 20


def process_mib(pid: int) -> float:
    """What the device counts for a process, MiB; 0 where it is not listed."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum((process.usedGpuMemory or 0) / MIB for process in processes if process.pid == pid)


def run(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SETUP + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ},
    )


SETUP = textwrap.dedent(
    """
    import os, signal, subprocess, sys, time
    import torch
    import memsaver_core as ms
    from memsaver_core import hibernation

    def used():  # in another process: NVML waits in one that is hibernated
        command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
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
    result = run(
        """
        left, down, up = [], [], []
        for cycle in range(10):
            start = time.monotonic()
            report = ms.release(hibernate=True)
            down.append(next(p.seconds for p in report.phases if p.name == "hibernate"))
            left.append(used() - empty)
            assert ms.status().hibernated and ms.status().state == "released"
            assert ms.release().released_bytes == 0  # a repeat is success and touches no driver
            assert abs(ms.read_devices()[0].used_bytes / 2**20 - used()) <= 2
            assert ms.read_devices()[0].process_bytes / 2**20 <= 16
            report = ms.resume()
            up.append(next(p.seconds for p in report.phases if p.name == "wake"))
            out.zero_()
            graph.replay()
            assert torch.equal(out.cpu(), expected), cycle
            assert not cache.any()
        print("left", max(left), "hibernate", max(down), "wake", max(up))
        print("helper", open(f"/proc/{hibernation.helper_pid()}/statm").read().split()[1])
        """
    )
    assert result.returncode == 0, result.stderr
    print(result.stdout)
    words = result.stdout.split()
    assert float(words[1]) <= 16
    assert int(words[-1]) < 20_000  # KiB of its own; the driver library it maps is shared with all others


def test_killed_helper_is_replaced() -> None:
    result = run(
        """
        ms.release(hibernate=True)
        os.kill(hibernation.helper_pid(), signal.SIGKILL)
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
    assert result.returncode == 0, result.stderr
    assert "fine" in result.stdout


def test_killed_engine_leaves_nothing() -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SETUP + "ms.release(hibernate=True)\nprint(hibernation.helper_pid(), flush=True)\ntime.sleep(600)\n",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    helper = int(process.stdout.readline())
    assert process_mib(process.pid) <= 16
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    while Path(f"/proc/{helper}").exists() and "Z" not in Path(f"/proc/{helper}/stat").read_text():
        time.sleep(0.05)  # it sees the socket close; the test's time limit bounds this
    assert process_mib(process.pid) == 0


def test_released_but_resident_tags_survive() -> None:
    """Content that was not released is kept by the driver's own checkpoint."""
    result = run(
        """
        ms.release(["kv_cache"], hibernate=True)
        assert used() - empty <= 16
        ms.resume(["kv_cache"])
        graph.replay()
        assert torch.equal(out.cpu(), expected)
        print("fine")
        """
    )
    assert result.returncode == 0, result.stderr
    assert "fine" in result.stdout


def test_clean_exit_while_hibernated() -> None:
    """T2: the interpreter exits cleanly in this state, too."""
    result = run("ms.release(hibernate=True)\nprint('end', flush=True)\n")
    assert (result.returncode, result.stdout.strip()) == (0, "end"), result.stderr
