"""Hibernation where there is no GPU: refused with its reasons, before anything is done."""

from __future__ import annotations

import uuid

import pytest
import torch

import memsaver_core as ms

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the host driver's answer")


def test_host_driver_refuses_before_anything_is_released() -> None:
    tag = f"t-{uuid.uuid4().hex[:8]}"
    with ms.region(tag, restore="host"):
        tensor = torch.ones(1000)
    assert ms.hibernation_blockers() == ["the host driver has no device context to hibernate"]
    with pytest.raises(ms.UnsupportedError, match=r"no device context.*nothing was released"):
        ms.release([tag], hibernate=True)
    assert next(each.state for each in ms.status().tags if each.tag == tag) == "resident"
    assert float(tensor.sum()) == 1000


def test_trim_is_a_phase_with_its_own_delta() -> None:
    report = ms.release(["workspace"], trim=True)
    assert "trim" in [phase.name for phase in report.phases]
    assert "trim" not in [phase.name for phase in ms.release(["workspace"]).phases]
