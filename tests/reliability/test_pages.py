"""Pages that name tests name tests that are there, one for each row at least."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.reliability import document

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`([^`]+\.py)` (test_\w+)")


@functools.cache
def names_in(path: Path) -> set[str]:
    """The tests of a file."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def rows(page: str) -> list[list[str]]:
    """The cells of each row of the page's tables that have a column of tests."""
    found = []
    inside = False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[-1] == "tests":
            inside = True
        elif inside and not set(line) <= set("|-"):
            found.append(cells)
    return found


def test_each_known_failure_has_a_test() -> None:
    """Its docstring says the key."""
    assert [key for key, tests in document.tests_by_key().items() if not tests] == []


def test_the_table_of_known_failures_is_current() -> None:
    """`python -m tests.reliability.document --tests` writes it."""
    page = document.PAGE.read_text()
    assert document.with_tests(page) == page


def test_each_threat_has_tests_that_are_there() -> None:
    threats = rows((ROOT / "SECURITY.md").read_text())
    assert len(threats) > 10
    for threat, _, tests in threats:
        named = NAMED.findall(tests)
        assert named, threat
        for path, name in named:
            assert name in names_in(ROOT / path), f"{threat}: {path} has no {name}"


def test_a_docstring_says_its_keys_at_its_start() -> None:
    """Elsewhere the table would not find them; and each that is there names one of the table's rows."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                docstring = ast.get_docstring(node) or ""
                keys = document.keys_of(docstring)
                assert set(keys) <= set(document.KNOWN), f"{path.name}: {node.name}"
                named = set(re.findall(r"\b[RGBTS]\d+\b", docstring)) & set(document.KNOWN)
                assert named == set(keys), f"{path.name}: {node.name}"


def test_keys_count_at_the_start_alone() -> None:
    assert document.keys_of("R1: it is free") == ["R1"]
    assert document.keys_of("R1, S5: it is free") == ["R1", "S5"]
    for docstring in ("", "S1, in part: it is free", "R1 and S5: it is free", "It is free (R1: measured)", "R1"):
        assert document.keys_of(docstring) == []
