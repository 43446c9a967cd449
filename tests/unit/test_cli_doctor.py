"""``memsaver doctor``: what it reports about an environment, and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def doctor(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    cleared = ("MEMSAVER_", "PYTORCH_", "NCCL_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(cleared)}
    return subprocess.run(
        [sys.executable, "-m", "memsaver_server.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**inherited, "MEMSAVER_DRIVER": "host", **changes},
        check=False,
    )


def findings(**changes: str) -> dict[str, dict[str, str]]:
    return {finding["subject"]: finding for finding in json.loads(doctor("--json", **changes).stdout)}


def test_on_the_host_driver_nothing_blocks() -> None:
    ran = doctor()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "nothing blocks" in ran.stdout
    found = findings()
    assert {"python", "torch", "saver", "CUDA driver", "expandable segments", "NCCL graph registration"} <= set(found)
    assert found["saver"]["level"] == "ok"
    assert "host driver" in found["saver"]["found"]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.guards("expandable segments made a release free nothing")
def test_expandable_segments_are_seen_under_both_names(name: str) -> None:
    found = findings(**{name: "max_split_size_mb:128, expandable_segments:True"})["expandable segments"]
    assert found["level"] in ("warning", "blocked")
    assert name in found["found"]
    assert "remove" in found["remedy"]
    assert findings(**{name: "expandable_segments:False"})["expandable segments"]["level"] == "ok"


@pytest.mark.guards("replaying a graph with NCCL hung after a remap")
def test_nccl_graph_registration_off_is_fine() -> None:
    assert findings(NCCL_GRAPH_REGISTER="0")["NCCL graph registration"]["level"] == "ok"
    assert findings()["NCCL graph registration"]["level"] in ("note", "warning")


def test_a_capacity_that_is_no_size_blocks() -> None:
    ran = doctor(MEMSAVER_HOST_CAPACITY="a lot")
    assert ran.returncode == 1
    assert "MEMSAVER_HOST_CAPACITY" in ran.stdout
    assert "Traceback" not in ran.stderr


def test_what_stands_in_the_way_of_hibernation_is_told_beforehand() -> None:
    assert findings()["hibernation"]["level"] == "ok"
    found = findings(MEMSAVER_ENABLED="0")["hibernation"]
    assert found["level"] == "note"
    assert "MEMSAVER_ENABLED" in found["found"]


def test_a_disabled_saver_is_pointed_out() -> None:
    found = findings(MEMSAVER_ENABLED="0")["saver"]
    assert found["level"] == "warning"
    assert "MEMSAVER_ENABLED" in found["remedy"]
