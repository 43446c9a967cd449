"""``memsaver doctor``: what it reports about an environment, and its exit code."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from memsaver_core import compat
from tests import forks


def doctor(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    cleared = ("MEMSAVER_", "PYTORCH_", "NCCL_")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(cleared)}
    ran: subprocess.CompletedProcess[str] = forks.run(
        [sys.executable, "-m", "memsaver_server.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        env={**inherited, "MEMSAVER_DRIVER": "host", **changes},
    )
    return ran


def findings_now(**changes: str) -> dict[str, dict[str, str]]:
    return {finding["subject"]: finding for finding in json.loads(doctor("--json", **changes).stdout)}


#: Of the environment alone, so one run for each serves all tests.
findings = functools.cache(findings_now)


def settled() -> dict[str, dict[str, str]]:
    """What is found with settings that are as they should be."""
    return findings(NCCL_GRAPH_REGISTER="0", MEMSAVER_API_KEY="hid" * 16, MEMSAVER_FILE_DIR="/dev/shm")


def test_on_the_host_driver_nothing_blocks() -> None:
    ran = doctor()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "nothing blocks" in ran.stdout
    found = findings()
    assert {"python", "torch", "saver", "CUDA driver", "NCCL graph registration"} <= set(found)
    assert found["saver"]["level"] == "ok"
    assert "host driver" in found["saver"]["found"]


def test_the_cuda_driver_without_a_gpu_blocks() -> None:
    ran = doctor("--json", MEMSAVER_DRIVER="cuda", CUDA_VISIBLE_DEVICES="")
    assert ran.returncode == 1
    found = {each["subject"]: each for each in json.loads(ran.stdout)}["saver"]
    assert (found["level"], "no NVIDIA GPU is found" in found["found"]) == ("blocked", True)
    assert "MEMSAVER_DRIVER=host" in found["remedy"]


@pytest.mark.guards("replaying a graph with NCCL hung after a remap")
def test_nccl_graph_registration_off_is_fine() -> None:
    assert settled()["NCCL graph registration"]["level"] == "ok"
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


#: Runs a command as if only the client and the command line were installed.
CLIENT_ALONE = """
import importlib.util, sys
away = {"torch", "numpy", "pynvml", "fastapi", "uvicorn", "prometheus_client", "pydantic_settings", "transformers"}
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in away else found(name, *rest)
sys.modules.update(dict.fromkeys(away))
sys.argv = ["memsaver", "doctor", "--json"]
from memsaver_server.cli import main
main()
"""


def test_nothing_is_wrong_with_the_client_alone() -> None:
    ran = subprocess.run([sys.executable, "-c", CLIENT_ALONE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = {each["subject"]: each for each in json.loads(ran.stdout)}
    assert {each["level"] for each in found.values()} == {"ok", "note"}
    assert "memsaver[server]" in found["packages"]["remedy"]


def test_a_wrong_setting_is_told_in_words() -> None:
    found = findings(MEMSAVER_HISTORY="0")["settings of the service"]
    assert found["found"] == "MEMSAVER_HISTORY is '0', but must be at least 1"
    assert found["level"] == "blocked"


def test_a_misspelt_variable_is_named_with_the_right_one() -> None:
    found = findings(MEMSAVER_DRAIN_TIMOUT_S="3")["environment"]
    assert "MEMSAVER_DRAIN_TIMOUT_S" in found["found"]
    assert "MEMSAVER_DRAIN_TIMEOUT_S" in found["remedy"]


def test_the_backup_folder_is_tried(tmp_path: Path) -> None:
    found = findings(MEMSAVER_FILE_DIR=str(tmp_path))["backup folder"]
    assert found["level"] in ("ok", "note")
    assert str(tmp_path) in found["found"]
    missing = findings(MEMSAVER_FILE_DIR=str(tmp_path / "missing"))["settings of the core"]
    assert missing["level"] == "blocked"
    assert "MEMSAVER_FILE_DIR" in missing["found"]
    assert settled()["backup folder"]["level"] == "note"


def test_the_key_is_judged_and_not_shown() -> None:
    assert "MEMSAVER_API_KEY" in findings()["key"]["remedy"]
    assert settled()["key"]["level"] == "ok"
    ran = doctor("--json", MEMSAVER_API_KEY="hidden")
    assert {each["subject"]: each["level"] for each in json.loads(ran.stdout)}["key"] == "warning"
    assert "hidden" not in ran.stdout + ran.stderr
    ran = doctor(MEMSAVER_API_KEY="hid\x01den")
    assert ran.returncode == 1
    assert "control character" in ran.stdout
    assert "hid" not in ran.stdout + ran.stderr


def test_who_has_the_port_is_told() -> None:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # then another process has it, which is as good
            server.bind(("127.0.0.1", 30000))
            server.listen()
        found = findings_now()["port 30000"]
    assert found["level"] == "warning"
    assert re.search(r"process \d+ \(", found["found"])
    assert "--port" in found["remedy"]


@pytest.mark.guards("an upgrade of the engine put the other torch_memory_saver back")
def test_it_says_which_torch_memory_saver_an_engine_imports(tmp_path: Path) -> None:
    """Of two that are installed, in the order of the path; and memsaver's in an engine that asks for it."""
    other = tmp_path / "torch_memory_saver"
    other.mkdir()
    (other / "__init__.py").write_text("torch_memory_saver = None\n")
    for path, asked, level, found in (
        ([tmp_path, compat.PATH], {}, "note", str(other)),
        ([compat.PATH, tmp_path], {}, "ok", str(compat.PATH)),
        ([tmp_path], {"MEMSAVER_SGLANG": "1"}, "ok", "MEMSAVER_SGLANG"),
    ):
        finding = findings_now(PYTHONPATH=os.pathsep.join(map(str, path)), **asked)["torch_memory_saver"]
        assert (finding["level"], found in finding["found"]) == (level, True), finding


@pytest.mark.parametrize(
    ("variable", "package", "loader", "left_out"),
    [
        ("MEMSAVER_SGLANG", "sglang", "srt/plugins", {"SGLANG_PLUGINS": "other, another"}),
        ("MEMSAVER_TOKENSPEED", "tokenspeed", "runtime/plugins", {"TOKENSPEED_DISABLE_PLUGINS": "other,memsaver"}),
    ],
)
def test_it_says_why_an_engine_does_not_load_the_plugin(
    tmp_path: Path, variable: str, package: str, loader: str, left_out: dict[str, str]
) -> None:
    """The package is not imported."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise SystemError\n")

    def finding(**environment: str) -> dict[str, str]:
        asked = {"PYTHONPATH": str(tmp_path), variable: "1", **environment}
        return findings_now(**asked)["torch_memory_saver"]

    assert "loads no plugins" in finding()["found"]
    (tmp_path / package / loader).mkdir(parents=True)
    assert finding()["level"] == "ok"
    found = finding(**left_out)
    assert (found["level"], *left_out) == ("warning", *(each for each in left_out if each in found["found"]))
    assert all(each in found["remedy"] for each in ("memsaver", *left_out))
    assert finding(SGLANG_PLUGINS="memsaver,other", TOKENSPEED_DISABLE_PLUGINS="other")["level"] == "ok"
