"""What commands send: the options of a release and a resume, which are made from the contract."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from memsaver_server.cli.commands import app

ROOT = Path(__file__).parents[2]
#: Runs with the packages of the current folder, not with those of an editable install.
HERE = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]
sys.path[:0] = [".", "server"]
"""
GENERATE = f"{HERE}\nimport runpy; runpy.run_path('.ci/generate.py', run_name='__main__')"
COMMAND = f"{HERE}\nfrom memsaver_server.cli import main; main()"
NEW_FIELDS = """
    zero: Annotated[bool, Acts("core", lasting=True)] = Field(default=False, description="Fills with zeros.")
    keep_pinned: Annotated[bool, Acts("core")] = Field(default=True, description="Keeps pinned memory.")
    order: Annotated[Literal["size", "name"] | None, Acts("service")] = Field(default=None, description="Which first.")
    rate_bytes: Annotated[int | None, Acts("service")] = Field(default=None, description="At most so much a second.")
    pause_s: Annotated[float, Acts("service")] = Field(default=0.0, description="Between two tags.")
    tries: Annotated[int, Acts("service")] = Field(default=1, description="How often.")
    note: Annotated[str | None, Acts("service")] = Field(default=None, description="A text for the log.")
"""


class Service:
    """Refuses every release and resume, and keeps what it was sent."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                answer = json.dumps({"success": False, "message": "no", "error": {"type": "bad_request"}}).encode()
                self.send_response(400)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_arguments: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever).start()

    def sent_by(self, *arguments: str, folder: Path = ROOT) -> dict[str, Any]:
        """What a command sends, beside ``async``."""
        command = [sys.executable, "-c", COMMAND, *arguments, "--url", self.url]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert ran.returncode == 2, ran.stderr
        body = self.bodies.pop()
        assert body.pop("async") is True
        return body

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        (["release"], {}),
        (["release", "weights", "--no-trim"], {"tags": ["weights"], "trim": False}),
        (["release", "--trim", "--hibernate", "--wait"], {"trim": True, "hibernate": True, "wait": True}),
        (["release", "--timeout", "0", "--mode", "abort"], {"timeout_s": 0.0, "mode": "abort"}),
        (["release", "--at-least", "1.5GiB", "--verify"], {"at_least_bytes": 3 << 29, "verify": "token"}),
        (["release", "--restore", "a=zero", "--restore", "b=x=y"], {"restore": {"a": "zero", "b": "x=y"}}),
        (["resume", "--wait-for-memory", "2.5", "--verify"], {"wait_for_memory_s": 2.5, "verify": "token"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_given_is_sent_and_nothing_else(service: Service, arguments: list[str], sent: dict[str, Any]) -> None:
    assert service.sent_by(*arguments) == sent


def test_a_new_field_of_the_contract_is_an_option(service: Service, tmp_path: Path) -> None:
    """On the command line of an engine and of a fleet, after the generated files were written anew."""
    for name in (".ci", "memsaver_core", "server"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    requests = tmp_path / "memsaver_core/contract/requests.py"
    before = '    operation: ClassVar[Verb] = "release"\n'
    assert before in requests.read_text()
    requests.write_text(requests.read_text().replace(before, before + NEW_FIELDS))
    generated = subprocess.run(
        [sys.executable, "-c", GENERATE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert generated.returncode == 0, generated.stderr
    options = ["--zero", "--no-keep-pinned", "--order", "size", "--rate", "2MiB", "--pause", "0.5"]
    assert service.sent_by("release", *options, "--tries", "3", "--note", "x", folder=tmp_path) == {
        "zero": True,
        "keep_pinned": False,
        "order": "size",
        "rate_bytes": 2 << 20,
        "pause_s": 0.5,
        "tries": 3,
        "note": "x",
    }
    command = [sys.executable, "-c", COMMAND, "fleet", "release", "--help"]
    environment = {**os.environ, "COLUMNS": "120"}
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout
    assert all(option in shown for option in ("--zero", "--no-keep-pinned", "size|name", "--rate", "--pause", "--note"))
    keywords = (tmp_path / "server/memsaver_server/client/keywords.py").read_text()
    assert keywords.count('    order: Literal["size", "name"] | None\n') == 2  # of an engine's release and of a fleet's


@pytest.mark.parametrize("both", [("--async", "--dry-run"), ("--async", "--prepare"), ("--dry-run", "--prepare")])
def test_options_that_exclude_each_other_are_refused_by_name(both: tuple[str, str]) -> None:
    """One of them was dropped without a word."""
    ran = CliRunner().invoke(app, ["release", "--url", "http://127.0.0.1:1", *both])
    assert ran.exit_code == 2
    assert f"{both[0]} and {both[1]} exclude each other" in ran.output
