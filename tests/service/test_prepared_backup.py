"""Host memory for the first release is pinned in the background after the engine is attached."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from tests.waiting import wait_until


def test_memory_is_prepared_after_load(serve: Callable[..., httpx.Client]) -> None:
    http = serve()
    wait_until(lambda: http.get("/memory_occupation").json()["host_backup"]["prepared"])
    backup = http.get("/memory_occupation").json()["host_backup"]
    kept = sum(tag["bytes"] for tag in http.get("/memory_occupation").json()["tags"] if tag["restore"] == "host")
    assert backup["capacity_bytes"] >= kept > 0
    http.post("/release_memory_occupation").raise_for_status()
    assert http.get("/memory_occupation").json()["host_backup"]["capacity_bytes"] == backup["capacity_bytes"]
    http.post("/resume_memory_occupation").raise_for_status()
