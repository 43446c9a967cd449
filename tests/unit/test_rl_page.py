"""The page for frameworks of reinforcement learning agrees with settings and tests."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/rl.md").read_text()


def test_each_variable_is_in_the_reference() -> None:
    variables = set(re.findall(r"\bMEMSAVER_\w+\b", PAGE))
    reference = set(re.findall(r"^\| `(MEMSAVER_\w+)` \|", (ROOT / "docs/reference.md").read_text(), re.MULTILINE))
    assert {"MEMSAVER_VLLM"} <= variables
    assert variables - {"MEMSAVER_"} <= reference


def test_each_framework_has_a_test_of_its_calls() -> None:
    table = PAGE[PAGE.index("\n| framework | version read |") :].strip().split("\n\n")[0].splitlines()
    named = {line.split("|")[1].strip() for line in table[2:]}
    assert len(named) > 5
    requests, in_python = "tests/service/test_clients.py", "tests/unit/test_vllm_plugin.py"
    for name in named:
        tests = (ROOT / (in_python if name == "OpenRLHF" else requests)).read_text()
        assert f"def test_{name.lower().replace('-', '_')}" in tests, name
