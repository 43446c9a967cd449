"""One worker for each library that `occupation.py` compares, each in a separate process; it prints one JSON line.

The buffers are the same for all: `count` tensors of `bytes / count`, random content, one tag.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

MIB = 1 << 20
GIB = 1 << 30

Samples = dict[str, list[float]]


class Clock:
    """Seconds of a call, the device idle before it."""

    def __init__(self, rest: float) -> None:
        self._rest = rest

    def __call__(self, call: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        # The driver scrubs freed memory in the background; a resume right behind a release waits for that.
        time.sleep(self._rest)
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - start


def tensors(count: int, nbytes: int) -> list[torch.Tensor]:
    size = nbytes // count // (2 * MIB) * 2 * MIB
    return [torch.empty(size, dtype=torch.uint8, device="cuda").random_(0, 256) for _ in range(count)]


def change(buffers: list[torch.Tensor]) -> None:
    for buffer in buffers:
        buffer.add_(1)
    torch.cuda.synchronize()


def checksum(buffers: list[torch.Tensor]) -> list[int]:
    return [int(buffer.view(torch.int64).sum()) for buffer in buffers]


# memsaver


class IdleEngine:
    """An engine without requests, so that what is measured is the service and the core."""

    name = "idle"

    def is_alive(self) -> bool:
        return True

    def close_admission(self, reason: str, *, hold: int = 0) -> None:
        pass

    def open_admission(self) -> None:
        pass

    def drain(self, timeout_s: float, mode: str = "wait", given_up: Any = None) -> None:
        pass

    def flush_cache(self) -> None:
        pass

    def repair(self, tags: Any, lost: Any) -> None:
        pass


def memsaver(case: str, count: int, nbytes: int, repeats: int, rest: float) -> dict[str, Any]:
    import httpx

    import memsaver_core as ms
    from memsaver_server import attach

    tag = "weights" if case != "discard" else "scratch"
    with ms.region(tag, restore="discard" if case == "discard" else "host"):
        buffers = tensors(count, nbytes)
    total = sum(buffer.numel() for buffer in buffers)
    samples: Samples = {}
    traffic: dict[str, list[int]] = {}
    answers: dict[str, dict[str, Any]] = {}

    with attach(IdleEngine()) as server, httpx.Client(base_url=server.url, timeout=600) as client:

        def post(operation: str, **body: Any) -> dict[str, Any]:
            answer: dict[str, Any] = client.post(f"/{operation}_memory_occupation", json=body).raise_for_status().json()
            return answer

        def measure(name: str, operation: str, **body: Any) -> None:
            torch.cuda.synchronize()
            time.sleep(rest)
            start = time.perf_counter()
            answer = post(operation, **body)
            wall = time.perf_counter() - start
            drain = sum(phase["seconds"] for phase in answer["phases"] if phase["name"] == "drain")
            samples.setdefault(name, []).append(wall - drain)
            details = next(p for p in answer["phases"] if p["name"] in ("pause", "restore"))["details"]
            if "first_64_mib_seconds" in details:
                samples.setdefault(name + " first 64 MiB", []).append(details["first_64_mib_seconds"])
            traffic.setdefault(name, []).append(int(details["copied_bytes"]))
            answers[name] = answer

        post("release", tags=["workspace"])  # one round trip: connections, lazy imports
        if case == "discard":
            clock = Clock(rest)
            clock(ms.release), clock(ms.resume)  # the first pays for what is made once
            for _ in range(repeats):
                samples.setdefault("release", []).append(clock(ms.release))
                samples.setdefault("resume", []).append(clock(ms.resume))
            for _ in range(repeats):
                measure("release, over HTTP", "release")
                measure("resume, over HTTP", "resume")
        elif case == "host-first":
            measure("first release", "release")
            measure("resume", "resume")
        else:
            ms.prepare_backup(wait=True)
            measure("first release, prepared", "release")
            measure("resume", "resume")
            for _ in range(repeats):
                change(buffers)
                measure("release, all changed", "release")
                measure("resume, after all changed", "resume")
            expected = checksum(buffers)
            for _ in range(repeats):
                measure("release, unchanged", "release")
                measure("resume, after unchanged", "resume")
            assert checksum(buffers) == expected, "content differs"
            # One byte in one of a hundred 32 MiB blocks.
            blocks = [(b, at) for b in buffers for at in range(0, b.numel(), 32 * MIB)]
            for _ in range(repeats):
                for buffer, at in blocks[:: max(1, 100)]:
                    buffer[at] += 1
                torch.cuda.synchronize()
                measure("release, 1 % changed", "release")
                measure("resume, after 1 % changed", "resume")
            for _ in range(repeats):
                measure("release, discarded", "release", restore={tag: "discard"})
                measure("resume, after discarded", "resume")
    if case == "host":
        samples.pop("resume")  # the one behind the first release only warmed the path up
    return {"bytes": total, "samples": samples, "traffic": traffic, "last_answers": answers}


# Peers


def torch_memory_saver(case: str, count: int, nbytes: int, repeats: int, rest: float) -> dict[str, Any]:
    from torch_memory_saver import torch_memory_saver as saver

    saver.hook_mode = "torch"
    clock = Clock(rest)
    tag = "kv_cache" if case == "zero" else "t"  # the drop-in brings a KV cache back as zeros
    with saver.region(tag=tag, enable_cpu_backup=case.startswith("host")):
        buffers = tensors(count, nbytes)
    return peer(clock, case, buffers, repeats, lambda: saver.pause(tag), lambda: saver.resume(tag))


def drop_in(case: str, count: int, nbytes: int, repeats: int, rest: float) -> dict[str, Any]:
    """The same program on memsaver in its place."""
    import memsaver_core.compat

    memsaver_core.compat.install()
    return torch_memory_saver(case, count, nbytes, repeats, rest)


def vllm(case: str, count: int, nbytes: int, repeats: int, rest: float) -> dict[str, Any]:
    from vllm.device_allocator.cumem import CuMemAllocator

    saver = CuMemAllocator.get_instance()
    clock = Clock(rest)
    with saver.use_memory_pool("t"):
        buffers = tensors(count, nbytes)
    offload = () if case == "discard" else ("t",)
    return peer(clock, case, buffers, repeats, lambda: saver.sleep(offload), saver.wake_up)


def peer(
    clock: Clock,
    case: str,
    buffers: list[torch.Tensor],
    repeats: int,
    release: Callable[[], Any],
    resume: Callable[[], Any],
) -> dict[str, Any]:
    total = sum(buffer.numel() for buffer in buffers)
    samples: Samples = {}
    if case in ("discard", "zero"):
        clock(release), clock(resume)
        for _ in range(repeats):
            samples.setdefault("release", []).append(clock(release))
            samples.setdefault("resume", []).append(clock(resume))
        return {"bytes": total, "samples": samples}
    expected = checksum(buffers)
    samples["first release"] = [clock(release)]
    samples["resume"] = [clock(resume)]
    if case == "host":
        for _ in range(repeats):
            samples.setdefault("release", []).append(clock(release))
            samples["resume"].append(clock(resume))
    assert checksum(buffers) == expected, "content differs"
    return {"bytes": total, "samples": samples}


# The raw limits


class Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Access(ctypes.Structure):
    _fields_ = (("location", Location), ("flags", ctypes.c_int))


def raw(case: str, count: int, nbytes: int, repeats: int, rest: float) -> dict[str, Any]:
    """Driver calls alone, in handles of the sizes that memsaver uses and of 8 GiB; copies and digests."""
    import memsaver_core as ms
    from memsaver_core import _native, process

    torch.zeros(1, device="cuda")
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: Any) -> None:
        result = getattr(cuda, name)(*arguments)
        assert result == 0, f"{name} failed: {result}"

    u64, size_t = ctypes.c_uint64, ctypes.c_size_t
    samples: Samples = {}
    ramp, left, step = [], nbytes, 64 * MIB
    while left:
        ramp.append(min(step, left))
        left -= ramp[-1]
        step = min(2 * step, GIB)
    huge = [min(8 * GIB, nbytes - at) for at in range(0, nbytes, 8 * GIB)]
    base = u64()
    call("cuMemAddressReserve", ctypes.byref(base), size_t(nbytes), size_t(0), u64(0), u64(0))
    properties = Properties(1, 0, Location(1, 0))
    properties.flags[1] = 1  # GPUDirect RDMA, as memsaver asks for
    access = Access(Location(1, 0), 3)
    handles: list[Any] = []

    def acquire(sizes: list[int]) -> None:
        at = base.value
        for size in sizes:
            handle = u64()
            call("cuMemCreate", ctypes.byref(handle), size_t(size), ctypes.byref(properties), u64(0))
            call("cuMemMap", u64(at), size_t(size), size_t(0), handle, u64(0))
            call("cuMemSetAccess", u64(at), size_t(size), ctypes.byref(access), size_t(1))
            handles.append(handle)
            at += size

    def give(sizes: list[int]) -> None:
        at = base.value
        for size in sizes:
            call("cuMemUnmap", u64(at), size_t(size))
            call("cuMemRelease", handles.pop(0))
            at += size

    clock = Clock(rest)
    for name, sizes in (("", ramp), (" in handles of 8 GiB", huge)):
        acquire(sizes), give(sizes)
        for _ in range(repeats):
            resume = clock(lambda sizes=sizes: acquire(sizes))
            release = clock(lambda sizes=sizes: give(sizes))
            samples.setdefault(f"driver calls, resume{name}", []).append(resume)
            samples.setdefault(f"driver calls, release{name}", []).append(release)

    host = torch.empty(2 * GIB, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda").random_(0, 256)
    rounds = 8

    def copy(to: torch.Tensor, source: torch.Tensor) -> None:
        for _ in range(rounds):
            for at in range(0, to.numel(), 32 * MIB):
                to[at : at + 32 * MIB].copy_(source[at : at + 32 * MIB], non_blocking=True)

    for _ in range(repeats):
        for name, to, source in (("copy to host", host, device), ("copy to device", device, host)):
            seconds = clock(lambda to=to, source=source: copy(to, source))
            samples.setdefault(f"{name}, GB/s", []).append(rounds * to.numel() / 1e9 / seconds)
    del host, device
    with ms.region("raw"):
        data = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda").random_(0, 256)
    saver = process.saver()
    key = (1, 2, 3, 4)
    assert _native.digest_of(data[:4096].cpu().numpy(), key) == saver.digest(0, data.data_ptr(), 4096, key)
    for _ in range(repeats):
        whole = clock(lambda: saver.digest(0, data.data_ptr(), data.numel(), key))
        empty = clock(lambda: saver.digest(0, data.data_ptr(), 4096, key))
        samples.setdefault("digest, GB/s", []).append(data.numel() / 1e9 / (whole - empty))
    return {"bytes": nbytes, "handles": len(ramp), "samples": samples}


# Long runs


def cycles(case: str, count: int, nbytes: int, repeats: int, rest: float) -> dict[str, Any]:
    """Many cycles over the same buffers, an eighth of them changed in each, every tenth verified."""
    import memsaver_core as ms

    with ms.region("weights"):
        buffers = tensors(count, nbytes)
    torch.cuda.synchronize()

    def census() -> dict[str, float]:
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        status = ms.status()
        return {
            "resident_mib": resident / MIB,
            "device_mib": ms.read_devices()[0].used_bytes / MIB,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "chunks": sum(tag.chunks for tag in status.tags),
            "threads": len(os.listdir("/proc/self/task")),
        }

    rows = []
    verified = 0
    start = time.monotonic()
    for cycle in range(repeats):
        change(buffers[cycle % 8 :: 8])
        expected = checksum(buffers) if cycle % 10 == 9 else None
        ms.release()
        ms.resume()
        if expected is not None:
            assert checksum(buffers) == expected, f"content differs in cycle {cycle}"
            verified += 1
        if cycle % 10 == 9:
            rows.append({"cycle": cycle + 1, **census()})
    steady = rows[len(rows) // 10 :]
    slopes = {
        name: statistics.linear_regression([row["cycle"] for row in steady], [row[name] for row in steady]).slope
        for name in steady[0]
        if name != "cycle"
    }
    return {
        "bytes": nbytes,
        "cycles": repeats,
        "verified": verified,
        "seconds": time.monotonic() - start,
        "first": steady[0],
        "last": steady[-1],
        "slope_per_cycle": slopes,
        "samples": {},
    }


WORKERS = {
    "memsaver": memsaver, "drop-in": drop_in, "torch_memory_saver": torch_memory_saver, "vllm": vllm, "raw": raw,
    "cycles": cycles,
}  # fmt: skip


if __name__ == "__main__":
    library, case, count, nbytes, repeats, rest = sys.argv[1:7]
    result = WORKERS[library](case, int(count), int(nbytes), int(repeats), float(rest))
    print("RESULT " + json.dumps(result), flush=True)
    if library in ("torch_memory_saver", "vllm"):
        os._exit(0)  # a peer may not survive freeing its memory at interpreter exit
