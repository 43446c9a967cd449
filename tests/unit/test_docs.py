"""The documents agree with the code."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import engine_runs, forks
from tests.reliability import document, runs

ROOT = Path(__file__).parents[2]
OUTSIDE = [
    ROOT / name
    for name in (
        "deploy/README.md",
        "deploy/torch-memory-saver/README.md",
        "benchmarks/README.md",
        "tests/README.md",
        "tests/reliability/README.md",
    )
]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *OUTSIDE])
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)(#[^)]*)?\)")
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def anchors_of(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_what_is_generated_is_current() -> None:
    ran = forks.run([sys.executable, str(ROOT / "docs/generate.py"), "--check"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_table_of_what_ran_where_is_current() -> None:
    assert document.page() == document.PAGE.read_text()


def test_a_run_is_recorded_beside_earlier_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TESTS_RUNS", str(tmp_path))
    core, engine = "tests/gpu/test_core_gpu.py::test_half[2]", "tests/fleet_on_ray/test_fleet.py::test_a_fleet"
    recorded = [(core, "passed"), (engine, "failed"), ("tests/unit/test_x.py::test_y", "skipped"), (engine, "passed")]
    for test, outcome in recorded:
        engine_runs.record(test, outcome)
    written = [json.loads(file.read_text()) for file in sorted(tmp_path.iterdir())]
    assert [(run["engine"], run["tests"]) for run in written] == [
        ("memsaver", {core: "passed"}),
        ("ray", {engine: "passed"}),
    ]
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    assert [(row[1], row[-1]) for row in runs.tests_run()] == [
        ("`tests/gpu/test_core_gpu.py`", "1 of 1 tests passed"),
        ("`tests/fleet_on_ray/test_fleet.py`", "1 of 1 tests passed"),
    ]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in LINK.findall(CODE.sub("", path.read_text())):
        if "://" in target:
            continue
        linked = path.parent / target if target else path
        assert linked.exists(), f"{path.name} links to {target}"
        if anchor and linked.suffix == ".md":
            assert anchor.removeprefix("#") in anchors_of(linked), f"{path.name} links to {target}{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_documents_is_python(path: Path) -> None:
    for block in PYTHON.findall(path.read_text()):
        ast.parse(block)


def test_exit_codes_are_documented() -> None:
    from memsaver_server.cli.options import ExitCode

    operator = (ROOT / "docs/operator.md").read_text()
    for code in ExitCode:
        assert re.search(rf"^\| {int(code)} \|", operator, re.MULTILINE), code


def test_each_endpoint_is_in_the_reference() -> None:
    """The reference page names every path of the generated API reference."""
    paths = set(re.findall(r"^### [A-Z]+ (/\S*)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE))
    assert len(paths) > 20
    endpoints = (ROOT / "docs/reference.md").read_text().split("## Endpoints")[1].split("\n## ")[0]
    named = set(re.findall(r"/[\w/{}.]*", endpoints))
    # The description spells parameters out; the page says {id}.
    missing = {path for path in paths if re.sub(r"\{\w+\}", "{id}", path) not in named}
    assert not missing


def test_default_policies_are_in_the_reference() -> None:
    from memsaver_core.contract.policies import DEFAULT_POLICIES, RestorePolicy

    page = (ROOT / "docs/reference.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*)\|$", page.split("## Restore policies")[1], re.MULTILINE))
    for policy in RestorePolicy:
        assert policy.value in rows, policy
        defaults = {tag for tag, of_tag in DEFAULT_POLICIES.items() if of_tag is policy}
        assert set(re.findall(r"`(\w+)`", rows[policy.value])) == defaults, policy


def _pages(navigation: Any) -> Iterator[str]:
    if isinstance(navigation, str):
        yield navigation
    else:
        for each in navigation.values() if isinstance(navigation, dict) else navigation:
            yield from _pages(each)


def test_each_page_is_in_the_site_s_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """Passes over the names of Python objects, which MkDocs loads."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    site = yaml.load((ROOT / "docs/site/mkdocs.yml").read_text(), Loader)
    listed = set(_pages(site["nav"]))
    assert listed >= {path.name for path in ROOT.glob("docs/*.md")}
    outside = {"index.md", "contributing.md", "security.md", "deploy.md", "torch-memory-saver.md", "measurements.md"}
    outside.add("failures-found.md")
    assert listed - outside == {path.name for path in ROOT.glob("docs/*.md")}
