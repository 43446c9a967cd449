"""The security page names existing tests, at least one for each threat; each known failure has tests."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

from tests.reliability import document, known_failures
from tests.reliability.known_failures import HAPPENED

ROOT = Path(__file__).parents[2]
THREAT = re.compile(r"^### (.*)\n((?:(?!#).*\n)*)", re.MULTILINE)
NAMED = re.compile(r"`([^`]+\.py)`((?:,?\s+test_\w+)+)")


@functools.cache
def names_in(path: Path) -> set[str]:
    """The tests of a file."""
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_each_known_failure_has_a_test() -> None:
    assert [failure for failure, tests in known_failures.tests_by_failure().items() if not tests] == []


def test_the_reliability_page_is_current() -> None:
    """`python -m tests.reliability.document` writes it."""
    assert document.page() == document.PAGE.read_text()


def test_no_cell_about_reliability_is_a_wall() -> None:
    pages = document.page() + (ROOT / "tests/reliability/README.md").read_text()
    cells = [cell for line in pages.splitlines() if line.startswith("|") for cell in line.split("|")]
    assert len(cells) > 400
    assert [cell for cell in cells if "<br>" in cell or len(cell) > 200] == []


def test_each_threat_has_tests_that_are_there() -> None:
    threats = THREAT.findall((ROOT / "SECURITY.md").read_text())
    assert len(threats) > 10
    for threat, answer in threats:
        named = NAMED.findall(answer)
        assert named, threat
        for path, names in named:
            assert names_in(ROOT / path) >= set(re.findall(r"test_\w+", names)), f"{threat}: {path}"


def test_guards_markers_name_known_failures() -> None:
    """Other words would be of no failure in the list. Only decorators of tests count."""
    known = [(str(path), test, failure) for path, test, failure in known_failures.guards() if failure in HAPPENED]
    assert known == [(str(path), test, failure) for path, test, failure in known_failures.guards()]
    assert all(test.startswith("test_") for _, test, _ in known)
    assert len(known) == len(set(known))
    lines = [line.strip() for path in (ROOT / "tests").rglob("*.py") for line in path.read_text().splitlines()]
    written = sum(line.startswith("@pytest.mark.guards(") for line in lines)
    assert written == len({(path, test) for path, test, _ in known})


def test_what_counts_as_a_guards_marker() -> None:
    def guarded_by(decorator: str) -> list[str]:
        return known_failures.guarded_by(ast.parse(decorator, mode="eval").body)

    assert guarded_by("pytest.mark.guards('it was not free')") == ["it was not free"]
    assert guarded_by("pytest.mark.guards('it was not free', 'it hung')") == ["it was not free", "it hung"]
    for decorator in ("pytest.mark.gpu", "pytest.mark.parametrize('guards', ['it hung'])", "guards('it hung')"):
        assert guarded_by(decorator) == []
