"""Regions in a process with expandable segments, which torch allocates without calling pluggable allocators."""

from __future__ import annotations

import os

import pytest

from tests.programs import output_of

pytestmark = pytest.mark.gpu

SETTING = "expandable_segments:True"
NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
PROGRAM = """
import sys, warnings, torch, memsaver_core as ms
warnings.simplefilter("ignore")
if sys.argv[1:]:
    torch.cuda.memory._set_allocator_settings(sys.argv[1])
torch.cuda.init()
assert torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"]
outside = torch.ones(64 << 20, device="cuda")  # in an expandable segment
with ms.region("weights", restore="host"):
    inside = torch.ones(64 << 20, device="cuda")
before = ms.read_devices()[0].used_bytes
ms.release()
fell = before - ms.read_devices()[0].used_bytes
ms.resume()
whole = bool((inside == 1).all() and (outside == 1).all())
print("fell" if fell >= 240 << 20 else f"fell by {fell} alone", whole)
"""


@pytest.mark.parametrize("where", [*NAMES, "at run time"])
@pytest.mark.guards("expandable segments made a release free nothing")
def test_memory_of_a_region_goes_all_the_same(where: str) -> None:
    """It is freed, as measured, and its content comes back."""
    inherited = {name: value for name, value in os.environ.items() if name not in NAMES}
    if where == "at run time":
        told = output_of(PROGRAM, SETTING, inherited=inherited)
    else:
        told = output_of(PROGRAM, inherited=inherited, **{where: SETTING})
    assert told.strip() == "fell True", told
