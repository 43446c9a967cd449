"""Packing on a real GPU, in processes of their own: the driver contract covers the kernels one by one."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from tests.programs import output_of

pytestmark = pytest.mark.gpu

PROGRAM = """
import json, threading, torch, memsaver_core as ms

def checksums(tensors):
    return [int(tensor.view(torch.int64).sum()) for tensor in tensors]

torch.manual_seed(1)
kinds = {
    "bfloat16": lambda: torch.randn(16 << 20, device="cuda").bfloat16() * 0.02,
    "float32": lambda: torch.randn(8 << 20, device="cuda"),
    "noise": lambda: torch.randint(0, 256, (32 << 20,), dtype=torch.uint8, device="cuda"),
    "mixed": lambda: torch.cat([torch.randn(8 << 20, device="cuda").bfloat16().view(torch.uint8),
                                torch.randint(0, 256, (16 << 20,), dtype=torch.uint8, device="cuda")]),
}
tensors = []
for kind, make in kinds.items():
    with ms.region(kind, restore="host"):
        tensors += [make() for _ in range(24)]
    torch.cuda.empty_cache()
torch.cuda.synchronize()
before = checksums(tensors)
ms.prepare_backup(wait=True)
start = ms.read_devices()[0].used_bytes
report = ms.release()
asleep = ms.read_devices()[0].used_bytes
kept = {tag.tag: tag.kept_bytes / tag.backed_up_bytes for tag in report.tags if tag.backed_up_bytes}
peak, done = [], threading.Event()
def watch():
    while not done.is_set():
        peak.append(ms.read_devices()[0].used_bytes)
watcher = threading.Thread(target=watch)
watcher.start()
ms.resume()
done.set()
watcher.join()
right = checksums(tensors) == before
again = ms.release()  # packs nothing
staged = asleep - ms.read_devices()[0].used_bytes
ms.resume()
print(json.dumps({"kept": kept, "right": right and checksums(tensors) == before, "over": max(peak) - start,
                  "staged": staged, "copied_again": sum(tag.backed_up_bytes for tag in again.tags)}))
"""


@pytest.mark.guards("content was wrong after a restore")
def test_content_is_packed_and_comes_back() -> None:
    """By kind; without more device memory than before, and unchanged content is not copied again."""
    told = json.loads(output_of(PROGRAM).splitlines()[-1])
    assert told["right"]
    assert told["copied_again"] == 0
    assert told["over"] <= 16 << 20  # page tables, as after any first resume
    assert told["staged"] <= 16 << 20  # memory for packing is given back before the answer
    kept = told["kept"]
    assert kept["bfloat16"] < 0.75  # the first 64 of 768 MiB stay as they are
    assert kept["float32"] < 0.88
    assert kept["noise"] == pytest.approx(1, abs=0.01)


def test_a_program_that_prepares_nothing_packs_later() -> None:
    """The first release has the kernels compiled; it may be packed only if they were in time."""
    program = """
    import time, torch, memsaver_core as ms
    with ms.region("t", restore="host"):
        tensor = torch.empty(256 << 20, dtype=torch.bfloat16, device="cuda")
    for _ in range(100):
        tensor.normal_(0, 0.02)
        total = int(tensor.view(torch.int64).sum())
        (report,) = ms.release().tags
        ms.resume()
        assert int(tensor.view(torch.int64).sum()) == total
        if report.kept_bytes < 0.8 * report.backed_up_bytes:
            print("packed")
            break
        time.sleep(0.1)
    """
    assert "packed" in output_of(textwrap.dedent(program))


@pytest.mark.guards("the process aborted at exit")
@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.8])
def test_a_process_may_end_while_kernels_are_compiled(tmp_path: Path, delay_s: float) -> None:
    """A release without kernels has them compiled in the background, for a second or two."""
    program = f"""
    import time, torch, memsaver_core as ms
    with ms.region("t", restore="host"):
        tensor = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
    ms.release()
    time.sleep({delay_s})
    """
    output_of(textwrap.dedent(program), XDG_CACHE_HOME=str(tmp_path))


def test_without_packing_nothing_is_packed() -> None:
    told = json.loads(output_of(PROGRAM, MEMSAVER_PACK="off").splitlines()[-1])
    assert told["right"]
    assert min(told["kept"].values()) == pytest.approx(1, abs=0.01)
