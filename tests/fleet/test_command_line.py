"""``memsaver fleet``."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memsaver_core import MemsaverError, OutOfDeviceMemoryError, OutOfHostMemoryError, UnsupportedError
from memsaver_server.cli.commands import app
from tests import forks
from tests.waiting import wait_until

from .conftest import Site, Sites
from .served_fleet import served


@pytest.fixture
def members(sites: Sites, tmp_path: Path) -> str:
    path = tmp_path / "members.yaml"
    path.write_text(json.dumps([{"name": name, "url": site.wire.url} for name, site in sites.items()]))
    return str(path)


def memsaver(*arguments: str) -> tuple[int, str]:
    """The exit code and the output of a command."""
    ran = CliRunner().invoke(app, ["fleet", *arguments])
    return ran.exit_code, ran.output


def test_release_status_and_resume(members: str, sites: Sites) -> None:
    code, output = memsaver("release", "--members", members)
    assert code == 0
    assert "✓ released on 3 engines" in output
    assert re.search(r"b +done +released +.* +2 MiB", output)
    assert all(site.is_released for site in sites.values())
    code, output = memsaver("status", "--members", members, "--name", "a", "--name", "c")
    assert code == 0
    assert "fleet released" in output
    assert "2 of 2 engines answer" in output
    code, output = memsaver("resume", "--members", members, "--json")
    assert code == 0
    assert [engine["state"] for engine in json.loads(output)["engines"]] == ["resident"] * 3


def test_failures(members: str, sites: Sites, tmp_path: Path) -> None:
    sites["b"].engine.memory.fail("release", MemsaverError("no"))
    code, output = memsaver("release", "--members", members)
    assert code == 1
    assert "✗ b failed while committing: no; what was released was undone" in output
    sites["c"].wire.cut()
    code, output = memsaver("release", "--members", members)
    assert code == 3
    code, output = memsaver("status", "--members", members)
    assert code == 3
    assert re.search(r"c +no answer", output)
    for name in "ab":
        sites[name].wire.cut()
    code, output = memsaver("status", "--members", members)
    assert (code, "fleet unknown   0 of 3 engines answer" in output) == (3, True), output
    for arguments in (
        ["--members", str(tmp_path / "none.yaml")],
        ["--members", "dns:x"],
        ["--members", members, "--name", "z"],
        ["--members", members, "--label", "z"],
    ):
        assert memsaver("release", *arguments)[0] == 2


def test_content_that_is_lost_is_in_the_exit_code(members: str, sites: Sites) -> None:
    """Whoever is asked: each said that all was well."""
    discard = ["--name", "b", "--restore", "weights=discard"]
    assert memsaver("release", "--members", members, *discard)[0] == 0
    assert memsaver("status", "--members", members)[0] == 0
    code, output = memsaver("resume", "--members", members)
    assert (code, "Content to be written again: weights of b" in output) == (0, True)
    with served([site.member for site in sites.values()]) as http:
        at = ["--url", str(http.base_url)]
        for command in (["fleet", "status", "--members", members], ["status", *at], ["top", *at]):
            ran = CliRunner().invoke(app, command)
            assert (ran.exit_code, "b: it serves no request: the content of weights" in ran.output) == (3, True)
        sites["b"].write()
        assert [CliRunner().invoke(app, [command, *at]).exit_code for command in ("status", "top")] == [0, 0]
    assert memsaver("status", "--members", members)[0] == 0


def test_no_advice_about_the_coordinator_if_an_engine_is_down(sites: Sites) -> None:
    with served([site.member for site in sites.values()]) as http:
        sites["c"].wire.cut()
        ran = CliRunner().invoke(app, ["release", "--url", str(http.base_url)])
        assert (ran.exit_code, "c failed" in ran.output, "--url" in ran.output) == (3, True, False), ran.output


def test_an_engine_that_has_failed_is_in_the_exit_code(members: str, sites: Sites) -> None:
    sites["b"].engine.memory.fail("release", MemsaverError("rank 1 has ended"), ends=True)
    assert memsaver("release", "--members", members)[0] == 1
    with served([site.member for site in sites.values()]) as http:
        at = ["--url", str(http.base_url)]
        for command in (["fleet", "status", "--members", members], ["status", *at], ["top", *at]):
            ran = CliRunner().invoke(app, command)
            assert (ran.exit_code, "the engine has failed for good: rank 1 has ended" in ran.output) == (3, True)


def test_options_reach_every_engine(members: str, sites: Sites) -> None:
    options = ["--restore", "weights=discard", "--no-trim", "--mode", "abort", "--timeout", "7"]
    assert memsaver("release", "--members", members, "kv_cache", *options)[0] == 0
    for site in sites.values():
        (body,) = (json.loads(text[text.index("{") :]) for text in asked(site, "release"))
        assert (body["tags"], body["restore"], body["trim"]) == (["kv_cache"], {"weights": "discard"}, False)
        assert (body["mode"], body["timeout_s"]) == ("abort", 7.0)
    assert memsaver("resume", "--members", members, "--wait-for-memory", "3", "--timeout", "9")[0] == 0
    assert all('"wait_for_memory_s":3.0' in text for site in sites.values() for text in asked(site, "resume"))


def asked(site: Site, verb: str) -> list[str]:
    """The requests that an engine got to prepare an operation."""
    return [text for text in site.wire.seen if text.startswith(f"POST /{verb}_memory") and '"prepare":true' in text]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OutOfDeviceMemoryError("short"), 6),
        (OutOfHostMemoryError("short"), 6),
        (UnsupportedError("no"), 5),
        (MemsaverError("no"), 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_has_the_exit_code_that_it_has_from_one_engine(
    members: str, sites: Sites, error: MemsaverError, code: int
) -> None:
    sites["b"].engine.memory.fail("release", error)
    assert memsaver("release", "--members", members)[0] == code
    sites["b"].engine.memory.fail("release", error)
    assert CliRunner().invoke(app, ["release", "--url", sites["b"].wire.url]).exit_code == code


def test_what_is_wanted_is_kept(members: str, tmp_path: Path) -> None:
    record = str(tmp_path / "record.json")
    assert memsaver("release", "--members", members, "--record", record, "kv_cache")[0] == 0
    code, output = memsaver("status", "--members", members, "--record", record, "--json")
    assert code == 0
    assert [(wish["state"], wish["tags"]) for wish in json.loads(output)["wanted"]] == [("released", ["kv_cache"])]


def test_ctrl_c_gives_up_before_memory_is_moved(members: str, sites: Sites) -> None:
    with sites["b"].engine.request():
        command = [sys.executable, "-c", "from memsaver_server.cli import main; main()", "fleet", "release"]
        running = forks.Popen([*command, "--members", members], stdout=forks.PIPE, text=True)
        wait_until(lambda: not sites["a"].is_open)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=600)
    assert "nothing was released: it was cancelled. All engines are as before" in output
    assert running.returncode == 1
    assert all(site.is_serving for site in sites.values())


def test_watch(members: str, sites: Sites) -> None:
    command = [sys.executable, "-c", "from memsaver_server.cli import main; main()", "fleet", "watch", "--json"]
    running = forks.Popen([*command, "--members", members, "--interval", "0.1"], stdout=forks.PIPE, text=True)
    assert running.stdout is not None
    seen = [json.loads(running.stdout.readline()) for _ in range(6)]
    assert [(each["event"], each["engine"]) for each in seen if each["event"] == "joined"] == [
        ("joined", name) for name in "abc"
    ]
    sites["b"].wire.cut()
    while seen[-1]["event"] != "dead":
        seen.append(json.loads(running.stdout.readline()))
    assert seen[-1]["engine"] == "b"
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=600)
    assert running.returncode == 0


def test_commands_at_a_coordinator(sites: Sites) -> None:
    """They show its engines, act on some of them, and say by their exit code that one does not answer."""
    with served([site.member for site in sites.values()]) as http:

        def at(*arguments: str) -> tuple[int, str]:
            ran = CliRunner().invoke(app, [*arguments, "--url", str(http.base_url)])
            return ran.exit_code, ran.output

        code, output = at("release", "--name", "b", "--name", "c", "--dry-run")
        assert (code, "dry run: release is possible" in output) == (0, True)
        assert at("release", "--name", "b", "--name", "c")[0] == 0
        assert [site.is_released for site in sites.values()] == [False, True, True]
        code, output = at("status")
        assert code == 0
        for name, state in zip("abc", ("resident", "released", "released"), strict=True):
            assert re.search(rf"{name} +{state}", output)
        assert at("resume")[0] == 0
        sites["c"].wire.cut()
        wait_until(lambda: at("status")[0] == 3)
        assert re.search(r"c +no answer", at("status")[1])
        code, output = at("top")
        assert (code, bool(re.search(r"c +no answer", output))) == (3, True)
        assert at("release", "--dry-run")[0] == 3
        assert json.loads(at("status", "--json")[1])["engines"][2]["alive"] is False
