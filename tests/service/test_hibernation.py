"""Hibernation over HTTP where there is no GPU: refused with its reason, and nothing is released."""

from __future__ import annotations

import httpx
import pytest


@pytest.mark.parametrize(
    ("path", "body"), [("/release_memory_occupation", {"hibernate": True}), ("/sleep", {"level": 3})]
)
def test_refused_on_the_host_driver(http: httpx.Client, path: str, body: dict[str, object]) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 409
    assert "no device context" in response.json()["message"]
    now = http.get("/memory_occupation").json()
    assert (now["state"], now["hibernated"], now["admission"]["open"]) == ("resident", False, True)


def test_trim_is_a_phase(http: httpx.Client) -> None:
    phases = [phase["name"] for phase in http.post("/release_memory_occupation", json={"trim": True}).json()["phases"]]
    assert phases.index("trim") == phases.index("pause") + 1
    http.post("/resume_memory_occupation").raise_for_status()
