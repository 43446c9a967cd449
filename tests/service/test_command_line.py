"""Commands at a served engine: what they would do, what they prepare, and what they show of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import httpx
import pytest
from typer.testing import CliRunner

from memsaver_server.cli.commands import app

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def http(serve: Callable[..., httpx.Client]) -> httpx.Client:
    return serve()


@pytest.fixture
def memsaver(http: httpx.Client) -> Run:
    """Run a command at the engine; returns its exit code and output."""

    def run(*arguments: str) -> tuple[int, str]:
        ran = CliRunner().invoke(app, [*arguments, "--url", str(http.base_url)])
        return ran.exit_code, ran.output

    return run


def state(http: httpx.Client) -> str:
    return str(http.get("/memory_occupation").json()["state"])


def test_a_dry_run(memsaver: Run, http: httpx.Client) -> None:
    code, output = memsaver("release", "weights", "--dry-run")
    assert code == 0
    assert re.search(r"dry run: would release .* of weights", output)
    assert json.loads(memsaver("release", "--dry-run", "--json")[1])["operation"] == "release"
    assert memsaver("resume", "--dry-run")[0] == 0
    assert state(http) == "resident"


def test_a_cache_that_cannot_be_resized(memsaver: Run) -> None:
    assert memsaver("kv-cache", "much%")[0] == 2
    assert memsaver("kv-cache", "0")[0] == 2
    for size in ((), ("50%",), ("--tokens", "5")):
        code, output = memsaver("kv-cache", *size)
        assert (code, "this engine cannot change the size of its KV cache" in output) == (5, True), output


@pytest.mark.parametrize("verb", ["commit", "abort"])
def test_two_phases(memsaver: Run, http: httpx.Client, verb: str) -> None:
    code, output = memsaver("release", "weights", "--prepare", "--lease", "600")
    assert code == 0
    found = re.search(rf"memsaver {verb} (\S+) --key (\S+)", output)
    assert found
    operation, key = found.groups()
    shown = memsaver("status")[1]
    assert re.search(rf"prepared: release {operation} of .*memsaver-client; \d+ s are left for its commit", shown)
    assert state(http) != "released"
    assert memsaver("resume", "weights")[0] == 5  # a conflict
    assert memsaver(verb, operation, "--key", key)[0] == 0
    assert state(http) == ("released" if verb == "commit" else "resident")
    assert "prepared:" not in memsaver("status")[1]
    for options in ((), ("--json",)):  # a failure has an exit code here, too
        assert memsaver("watch", operation, *options)[0] == (0 if verb == "commit" else 1)


def test_what_only_a_coordinator_does_is_refused_by_name(memsaver: Run, http: httpx.Client) -> None:
    code, output = memsaver("release", "--name", "a")
    assert code == 2
    assert "'selector' has no effect here" in output
    assert state(http) == "resident"
