"""The page for frameworks of reinforcement learning agrees with settings and tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/rl.md").read_text()


def rows(heading: str) -> list[list[str]]:
    """The rows of the table under the line that begins with ``heading``."""
    table = PAGE[PAGE.index(f"\n{heading}") :].strip().split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def test_each_variable_is_in_the_reference() -> None:
    variables = set(re.findall(r"\bMEMSAVER_\w+\b", PAGE))
    reference = set(re.findall(r"^\| `(MEMSAVER_\w+)` \|", (ROOT / "docs/reference.md").read_text(), re.MULTILINE))
    assert {"MEMSAVER_VLLM"} <= variables
    assert variables - {"MEMSAVER_"} <= reference


def test_each_framework_that_sends_requests_has_a_test_of_them() -> None:
    turned_on = {name for names, *_ in rows("| framework | with vLLM |") for name in names.split(", ")}
    called = {name.partition(",")[0] for name, _ in rows("| framework | calls |")}
    read = {name for name, *_ in rows("| framework | source |")}
    assert turned_on == called == read
    clients = (ROOT / "tests/service/test_clients.py").read_text()
    in_python = {"OpenRLHF"}  # of vLLM's engine: tests/unit/test_vllm_plugin.py
    for name in called - in_python:
        assert f"def test_{name.lower().replace('-', '_')}" in clients, name
