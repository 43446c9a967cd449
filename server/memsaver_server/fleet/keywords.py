"""The keyword arguments of a fleet: fields of ``memsaver_core.contract.requests``, which describes them.

Generated from the contract by .ci/generate.py; do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict


class FleetReleaseKeywords(TypedDict, total=False):
    model: str | None
    fleet_mode: Literal["all", "best_effort"] | None
    verify: Literal["token"] | None
    restore: Mapping[str, str] | None
    trim: bool | None
    hibernate: bool | None
    communicators: Literal["suspend", "keep"] | None
    timeout_s: float | None
    mode: Literal["all", "best_effort", "wait", "abort", "keep"] | None
    drain: Literal["wait", "abort", "keep"] | None


class FleetResumeKeywords(TypedDict, total=False):
    model: str | None
    fleet_mode: Literal["all", "best_effort"] | None
    verify: Literal["token"] | None
    wait_for_memory_s: float | None
    weights_version: str | None
    kv_cache: Literal["whole", "shrink"] | None
    timeout_s: float | None
    mode: Literal["all", "best_effort"] | None
