"""`make lint` fails if a dependency is reversed, a lock is forgotten, a function grows or a word is out.

Tried on a copy with one change.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The packages of the copy, not those of an editable install.
LINT_IMPORTS = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
sys.path[:0] = [".", "server"]
from importlinter.cli import lint_imports_command
sys.argv[1:] = ["--no-logo", "--no-cache"]
lint_imports_command()
"""
ROOM = "server/memsaver_server"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "memsaver-hibernate")
    for name in (".ci", "csrc", "memsaver_core", "server"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path


def ran(copy: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, *arguments], cwd=copy, capture_output=True, text=True, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


def add(copy: Path, name: str, line: str) -> None:
    path = copy / name
    path.write_text(f"{path.read_text()}\n{line}\n")


#: Imports that point up, each in a file, and what is said of them.
POINTING_UP = [
    (
        f"{ROOM}/operation/operation.py",
        "import memsaver_server.engine.lifecycle",
        "operation is not allowed to import memsaver_server.engine",
    ),
    (f"{ROOM}/http/auth.py", "import memsaver_server.app", "http is not allowed to import memsaver_server.app"),
    (
        f"{ROOM}/cli/serve.py",
        "import memsaver_server.integrations.vllm.plugin",
        "import memsaver_server.integrations",
    ),
    (f"{ROOM}/integrations/module/engine.py", "import memsaver_server.http.errors", "import memsaver_server.http"),
    (f"{ROOM}/client/requests.py", "import torch", "client is not allowed to import torch"),
    (
        "memsaver_core/process.py",
        "import memsaver_core.regions",
        "not allowed to import memsaver_core.regions",
    ),
    (
        "memsaver_core/contract/errors.py",
        "import memsaver_server",
        "memsaver_core is not allowed to import memsaver_server",
    ),
]


def test_imports_that_point_up_fail(copy: Path) -> None:
    pytest.importorskip("importlinter")
    assert ran(copy, "-c", LINT_IMPORTS)[0] == 0
    for name, line, _ in POINTING_UP:
        add(copy, name, line)
    code, output = ran(copy, "-c", LINT_IMPORTS)
    assert code == 1
    assert [said for _, _, said in POINTING_UP if said not in output] == []


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        (f"{ROOM}/app.py", "from memsaver_core import _native", "memsaver_core._native is private to its package"),
        ("memsaver_core/process.py", "from memsaver_core import release", "takes release from its own package's root"),
    ],
)
def test_an_import_of_a_private_or_a_gathered_name_fails(copy: Path, name: str, line: str, said: str) -> None:
    assert ran(copy, ".ci/check_imports.py") == (0, "")
    add(copy, name, line)
    code, output = ran(copy, ".ci/check_imports.py")
    assert code == 1
    assert said in output


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("csrc/driver/driver.hpp", '#include "backup/block.hpp"', "driver must not include backup"),
        ("csrc/hibernate/process.hpp", '#include "hooks/preload.hpp"', "hibernate must not include hooks"),
        ("csrc/support/error.hpp", '#include "support/host_memory.hpp"', "circle: support/"),
        ("csrc/vmm/saver.cpp", "#include <vector>", "<vector> is brought by another include"),
    ],
)
def test_an_include_that_points_up_fails(copy: Path, name: str, line: str, said: str) -> None:
    assert ran(copy, ".ci/check_includes.py") == (0, "")
    add(copy, name, line)
    code, output = ran(copy, ".ci/check_includes.py")
    assert code == 1
    assert said in output


def test_a_long_function_fails(copy: Path) -> None:
    body = "  int done = 1;  // }\n" * 61
    grown = f"void grown(int a) {{\n{body}}}"
    assert ran(copy, ".ci/check_sizes.py") == (0, "")
    add(copy, "csrc/support/log.hpp", f"namespace memsaver {{\n{grown}\n}}  // namespace memsaver")
    code, output = ran(copy, ".ci/check_sizes.py")
    assert code == 1
    assert "63 lines, at most 60: void grown(int a)" in output


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("csrc/support/log.hpp", "// The guest is told.", '"told"; say instead: say, report, return, notify'),
        ("csrc/support/log.hpp", "struct Door {\n  int owed_bytes;\n};", '"owed"; say instead: must, needs'),
        (f"{ROOM}/app.py", "# Each has a thread of its\n# own.", '"of its own"; say instead: its own, a separate'),
        (f"{ROOM}/app.py", "def seat_calls() -> None: ...", '"seat"; say instead: schedule, slot'),
        ("docs/page.md", "A rank tells the service.", 'docs/page.md:2: "tells"; say instead: say'),
    ],
)
def test_a_word_that_is_out_fails(copy: Path, name: str, line: str, said: str) -> None:
    clean_of_words(copy)
    assert ran(copy, ".ci/check_words.py") == (0, "")
    add(copy, name, line)
    code, output = ran(copy, ".ci/check_words.py")
    assert code == 1
    assert said in output


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (f"{ROOM}/app.py", "Gate, seating = None, None  # the gate is closed"),
        ("docs/page.md", "<!-- table -->\nIt is told.\n<!-- end of table -->"),
        ("docs/page.md", "The lowest power of a gateway; its own thread, as offered."),
    ],
)
def test_other_uses_of_a_word_pass(copy: Path, name: str, line: str) -> None:
    clean_of_words(copy)
    add(copy, name, line)
    assert ran(copy, ".ci/check_words.py") == (0, "")


def clean_of_words(copy: Path) -> None:
    """Leave only files without words in the copy."""
    for folder in ("csrc", "memsaver_core", "server"):
        for path in (copy / folder).rglob("*.[chp]*"):
            path.write_text("")
    (copy / "docs").mkdir()
    (copy / "docs/page.md").write_text("")


@pytest.mark.skipif(find_spec("ziglang") is None, reason="ziglang is not installed")
def test_a_forgotten_lock_fails(copy: Path) -> None:
    for path in copy.glob("csrc/*/*.cpp"):
        path.unlink()
    forgetful = "struct Counter {\n  Mutex mutex;\n  int count GUARDED_BY(mutex) = 0;\n  void next() { ++count; }\n};"
    source = copy / "csrc/support/counter.cpp"
    source.write_text(f'#include "support/mutex.hpp"\nnamespace memsaver {{\n{forgetful}\n}}\n')
    code, output = ran(copy, ".ci/check_locks.py")
    assert code == 1
    assert "requires holding mutex 'mutex'" in output
    source.write_text(source.read_text().replace("{ ++count; }", "{\n    Lock lock(mutex);\n    ++count;\n  }"))
    assert ran(copy, ".ci/check_locks.py") == (0, "")
