"""The commands of the pages run as they stand, on the host driver; addresses are free ones of this machine."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memsaver_server.cli.commands import app
from memsaver_server.reference.builtin_model import small_checkpoint
from tests.engine_server import free_port

from .serving import CONSOLE_SCRIPT, ROOT, environment, serving

PAGES = [ROOT / "README.md", ROOT / "deploy/README.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCK = re.compile(r"^```(console|sh|yaml)\n(.*?)^```", re.DOTALL | re.MULTILINE)
API = (ROOT / "docs/api.md").read_text()


def blocks(page: Path, language: str) -> list[str]:
    return [text for of, text in BLOCK.findall(page.read_text()) if of == language]


def commands(block: str) -> list[str]:
    """The lines that a reader types: in a console those after a prompt, if it has prompts."""
    lines = [line for line in block.splitlines() if line and not line.startswith("#")]
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")] or lines


def words_of(page: Path) -> Iterator[list[str]]:
    """The words of each command of a page; those of one line are apart."""
    for block in [*blocks(page, "console"), *blocks(page, "sh")]:
        for line in commands(block):
            for command in re.split(r" && | & ?", line):
                if words := shlex.split(command, comments=True):
                    yield words


def test_memsaver_has_each_command_and_option() -> None:
    """With ``--help`` behind it a command only parses its line: an unknown command or option is an error."""
    asked = 0
    for page in PAGES:
        for words in words_of(page):
            if words[:2] == ["kubectl", "exec"]:
                words = words[words.index("--") + 1 :]
            command, *options = words[1:] if words[:1] == ["sudo"] else words
            if Path(command).name != "memsaver":
                continue
            ran = CliRunner().invoke(app, [*options, "--help"])
            assert ran.exit_code == 0, (page.name, words, ran.output)
            asked += 1
    assert asked >= 30


def test_the_service_has_each_path_that_curl_calls() -> None:
    paths = set(re.findall(r"^### [A-Z]+ (/\S*)$", API, re.MULTILINE))
    called = {
        re.sub(r"^(\$engine|(http://)?(localhost|127\.0\.0\.1):\w+)", "", word)
        for page in PAGES
        for words in words_of(page)
        if "curl" in words
        for word in words
        if word.startswith(("$engine", "http", "localhost"))
    }
    assert {"/release_memory_occupation", "/resume_memory_occupation", "/generate", "/flush_cache"} <= called <= paths


class Terminal:
    """Types what a page says. A command that ends with ``&`` is left running, once it has said where it serves."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.ports = {port: str(free_port()) for port in ("30000", "30101", "30102")}
        self.settings: dict[str, str] = {}

    def here(self, text: str) -> str:
        """The text with this machine's ports."""
        return re.sub(r"\b(30000|30101|30102)\b", lambda found: self.ports[found[0]], text)

    def type(self, line: str) -> str:
        """Type one line; return what it prints. It must succeed."""
        line, runs_on, _ = self.here(line).partition(" &")
        words = shlex.split(line, comments=True)
        if words[0] == "export":
            self.settings |= dict(word.split("=", 1) for word in words[1:])
            return ""
        if words[:2] == ["memsaver", "serve"]:
            return self.stack.enter_context(serving(*words[2:], changes=self.settings)).url
        if words[0] == "memsaver":
            words[:1] = CONSOLE_SCRIPT
        started = self.stack.enter_context(
            subprocess.Popen(words, cwd=self.folder, env=environment(self.settings), stdout=subprocess.PIPE, text=True)
        )
        if runs_on:
            self.stack.callback(started.kill)
            assert started.stdout is not None
            said = started.stdout.readline()
            assert "http" in said, line
            return said
        said, _ = started.communicate(timeout=600)
        assert started.returncode == 0, (line, said)
        return said


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    with ExitStack() as stack:
        yield Terminal(tmp_path, stack)


def test_a_fleet_of_a_list(terminal: Terminal) -> None:
    page = ROOT / "docs/fleet.md"
    (terminal.folder / "engines.yaml").write_text(terminal.here(blocks(page, "yaml")[0]))
    session = next(block for block in blocks(page, "console") if "fleet resume" in block)
    printed = [terminal.type(line) for line in commands(session)]
    assert "released on 2 engines" in printed[-2]
    assert "resumed on 2 engines" in printed[-1]


def test_models_that_take_turns(terminal: Terminal) -> None:
    page = ROOT / "docs/fleet.md"
    (terminal.folder / "engines.yaml").write_text(terminal.here(blocks(page, "yaml")[1]))
    session = next(block for block in blocks(page, "console") if "export MEMSAVER_DRIVER=host" in block)
    printed = [terminal.type(line) for line in commands(session)]
    assert all('"text"' in answer for answer in printed[-3:-1])
    assert "state mixed" in printed[-1]


def test_the_calls_of_the_reference(terminal: Terminal) -> None:
    session = next(
        block for block in blocks(ROOT / "docs/reference.md", "console") if "memsaver serve --model" in block
    )
    served, *calls = commands(session)
    terminal.type(f"{served.partition('#')[0].replace('DIR', str(small_checkpoint()))} --port 30000")
    terminal.settings["MEMSAVER_URL"] = terminal.here("localhost:30000")
    printed = [terminal.type(line) for line in calls]
    assert '"text"' in printed[0]
    assert "released" in printed[3]
    assert "resumed" in printed[4]


def test_a_kv_cache_that_grows_and_shrinks(terminal: Terminal) -> None:
    served, *calls = commands(blocks(ROOT / "docs/elastic.md", "console")[0])
    terminal.type(served.partition(" &")[0])
    terminal.settings["MEMSAVER_URL"] = terminal.here("localhost:30000")
    shown, half, preempted, whole = (terminal.type(line) for line in calls)
    assert "largest now" in shown
    assert "the KV cache has 31.0 MiB of 63.0 MiB: released 32.0 MiB" in half
    assert '"success":true' in preempted
    assert "the KV cache has 63.0 MiB of 63.0 MiB: resumed 55.0 MiB" in whole


def test_a_training_step_in_curl(tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl")
    script = "".join(blocks(ROOT / "docs/rl.md", "sh"))
    with serving() as server:
        script = script.replace("http://127.0.0.1:30000", server.url).replace("/ckpt/step-1", str(small_checkpoint()))
        ran = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert '"text"' in ran.stdout
