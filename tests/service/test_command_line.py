"""Commands at a served engine: what they would do, what they prepare, and what they show of it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import httpx
import pytest
from typer.testing import CliRunner

from memsaver_core._native import Saver as Driver
from memsaver_server.cli.commands import app
from tests.waiting import wait_until

from .tensor_engine import MIB

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


def test_a_dry_run_without_memory(memsaver: Run, http: httpx.Client, driver: Driver) -> None:
    """It ends as the resume would, and says once why."""
    memsaver("release")
    free = http.get("/memory_occupation").json()["devices"][0]["free_bytes"]
    tenant = driver.allocate(0, "tenant", "discard", free // (2 * MIB) * 2 * MIB)
    try:
        wait_until(lambda: memsaver("resume", "--dry-run")[0] == 6)  # a reading may be of a moment ago
        assert memsaver("resume", "--dry-run")[1].count("bytes are needed") == 1
    finally:
        driver.free(tenant)


def test_content_that_is_lost_is_named(memsaver: Run, http: httpx.Client) -> None:
    lost = "content lost: weights; requests are refused until the engine's weight update has written it"
    for command in (["release", "--dry-run"], ["release"]):
        assert lost in memsaver(*command, "--restore", "weights=discard")[1]
    for options in (["--dry-run"], []):
        code, output = memsaver("resume", *options)
        assert (code, lost in output) == (0, True)
    http.post("/content_written", json={}).raise_for_status()
    assert "content lost" not in memsaver("release")[1] + memsaver("resume")[1]


def test_a_key_is_missing_or_wrong(serve: Callable[..., httpx.Client]) -> None:
    at = ["--url", str(serve(api_key="right").base_url)]
    for key, says in ([], "this server requires a key"), (["--api-key", "wrong"], "the key is wrong"):
        ran = CliRunner().invoke(app, ["status", *at, *key])
        assert (ran.exit_code, says in ran.output, "Set --api-key" in ran.output) == (4, True, True)


def test_a_cache_that_cannot_be_resized(memsaver: Run) -> None:
    assert memsaver("kv-cache", "much%")[0] == 2
    for no_size in ("0", "50"):
        code, output = memsaver("kv-cache", no_size)
        assert (code, f"'{no_size}' is not a size; write for example 20GiB or 50%" in output) == (2, True)
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
    code, output = memsaver(verb, operation, "--key", key)
    assert (code, "✓" in output, "✗" in output) == (0, True, False)
    assert state(http) == ("released" if verb == "commit" else "resident")
    assert "prepared:" not in memsaver("status")[1]
    for options in ((), ("--json",)):  # a failure has an exit code here, too
        assert memsaver("watch", operation, *options)[0] == (0 if verb == "commit" else 1)


def test_what_only_a_coordinator_does_is_refused_by_name(memsaver: Run, http: httpx.Client) -> None:
    code, output = memsaver("release", "--name", "a")
    assert code == 2
    assert "--name/--model/--label/--host/--gpu has no effect here" in output
    assert state(http) == "resident"
