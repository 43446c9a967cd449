"""Keyword arguments of the clients and of a fleet, which ``memsaver_core.contract.requests`` describes.

Generated from the contract by .ci/generate.py; do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypedDict


class ReleaseKeywords(TypedDict, total=False):
    wait: bool | None
    verify: Literal["token"] | None
    lease_s: float | None
    dp_ranks: list[int] | None
    restore: Mapping[str, str] | None
    trim: bool | None
    hibernate: bool | None
    communicators: Literal["suspend", "keep"] | None
    timeout_s: float | None
    mode: Literal["wait", "abort", "keep"] | None
    at_least_bytes: int | None
    selector: Mapping[str, object] | None  # at a coordinator
    key: str | None  # the Idempotency-Key; by default a new one


class ResumeKeywords(TypedDict, total=False):
    wait: bool | None
    verify: Literal["token"] | None
    lease_s: float | None
    dp_ranks: list[int] | None
    wait_for_memory_s: float | None
    weights_version: str | None
    kv_cache: Literal["whole", "shrink"] | None
    selector: Mapping[str, object] | None  # at a coordinator
    key: str | None  # the Idempotency-Key; by default a new one


class ResizeKvCacheKeywords(TypedDict, total=False):
    wait: bool | None
    bytes: int | None
    fraction: float | None
    tokens: int | None
    mode: Literal["wait", "preempt"] | None
    timeout_s: float | None
    wait_for_memory_s: float | None


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
