"""A coordinator that cannot read the list of its members, or its record, for a while."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from memsaver_server.cli.commands import app
from memsaver_server.fleet import FileRecord, StaticMembership
from memsaver_server.fleet.turns.options import ModelOptions
from tests.clock import CLOCK
from tests.waiting import wait_until

from .conftest import Sites
from .served_fleet import served


@pytest.fixture
def files(sites: Sites, tmp_path: Path) -> dict[str, Path]:
    """The list and the record of a coordinator."""
    paths = {name: tmp_path / f"{name}.json" for name in ("list", "record")}
    paths["list"].write_text(json.dumps([{"name": name, "url": site.wire.url} for name, site in sites.items()]))
    return paths


@contextmanager
def coordinator(files: dict[str, Path], **options: float) -> Iterator[httpx.Client]:
    models = {"*": ModelOptions.model_validate({"wait_s": 60, **options})}
    with served(StaticMembership(files["list"]), models, record=FileRecord(files["record"])) as http:
        yield http


def break_file(http: httpx.Client, path: Path) -> str:
    """Return what was in it, once the coordinator has seen that it is broken."""
    text = path.read_text()
    path.write_text("no YAML: [")
    wait_until(lambda: http.get("/memory_occupation").is_success and http.get("/readyz").status_code == 503)
    return text


def memsaver(http: httpx.Client, command: str) -> tuple[int, str]:
    ran = CliRunner().invoke(app, [command, "--url", str(http.base_url)])
    return ran.exit_code, " ".join(ran.output.split())


def complete(http: httpx.Client, name: str) -> tuple[int, str]:
    answer = http.post("/v1/completions", json={"model": f"model of {name}"})
    return answer.status_code, answer.text


@pytest.mark.parametrize("broken", ["list", "record"])
def test_engines_are_as_they_are_all_the_same(
    sites: Sites, files: dict[str, Path], broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    """They were as last seen: a dead one was alive, one that was awake held nothing, and its requests hung."""
    path = files[broken]
    with coordinator(files) as http:
        http.post("/release_memory_occupation", json={"wake_on_request": True}).raise_for_status()
        text = break_file(http, path)
        sites["a"].http.post("/resume_memory_occupation").raise_for_status()  # as a new process is
        sites["b"].wire.cut()
        now = lambda: http.get("/memory_occupation").json()  # noqa: E731
        wait_until(lambda: [row["state"] for row in now()["engines"]] == ["resident", "unknown", "released"])
        assert [row["alive"] for row in now()["engines"]] == [True, False, True]
        assert now()["engines"][0]["resident_bytes"] == now()["engines"][2]["released_bytes"] > 0
        assert 'memsaver_fleet_engine_up{engine="b"} 0.0' in http.get("/metrics").text
        for command in ("status", "top"):
            code, output = memsaver(http, command)
            assert (code, "admission open" in output, str(path.name) in output) == (3, False, True), output
        refused = http.post("/release_memory_occupation")
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "fleet_unknown")
        assert complete(http, "a")[0] == 404  # by the engine, which has no such path
        status, said = complete(http, "c")
        assert (status, "no memory can be moved now" in said, path.name in said) == (503, True, True), said
        sites["b"].wire.heal()
        path.write_text(text)
        wait_until(lambda: http.get("/readyz").status_code == 200)
        assert complete(http, "c")[0] == 404
        wait_until(lambda: "the states of the engines can be read again" in caplog.messages)
        wait_until(lambda: memsaver(http, "status")[0] == 0)
    assert caplog.messages.count("the states of the engines can be read again") == 1


def test_trouble_of_the_fleet_alone_is_in_the_exit_code(sites: Sites, files: dict[str, Path]) -> None:
    with coordinator(files) as http:
        assert memsaver(http, "status")[0] == 0
        break_file(http, files["list"])
        code, output = memsaver(http, "status")
        assert (code, "admission closed" in output, "closed because the list of members" in output) == (3, True, True)


def test_no_idle_engine_is_released_without_end(sites: Sites, files: dict[str, Path]) -> None:
    """After each attempt, which failed, the next one began at once."""
    with coordinator(files, idle_release_s=5, awake_s=0) as http:
        operations = lambda: http.get("/operations").json()["operations"]  # noqa: E731
        break_file(http, files["list"])
        due = CLOCK.now() + 10
        wait_until(lambda: CLOCK.now() > due or operations())
        assert not operations()


def test_an_idle_engine_is_released_in_time_if_the_record_cannot_be_written(
    sites: Sites, files: dict[str, Path], tmp_path: Path
) -> None:
    """After each attempt that failed the next one began at once."""
    with coordinator(files, idle_release_s=5, awake_s=0) as http:
        operations = lambda: http.get("/operations").json()["operations"]  # noqa: E731
        (tmp_path / "record.json.new").mkdir()
        due = CLOCK.now() + 10
        wait_until(lambda: CLOCK.now() > due or len(operations()) > 50)
        assert 0 < len(operations()) < 50
        (tmp_path / "record.json.new").rmdir()
        wait_until(lambda: all(site.is_released for site in sites.values()))


@pytest.mark.parametrize("broken", ["list", "record"])
def test_what_was_never_read_is_named(sites: Sites, files: dict[str, Path], broken: str) -> None:
    """A request was told of the list, whichever it was. What callers want of engines is in the record."""
    files[broken].write_text("no YAML: [")
    with coordinator(files) as http:
        assert http.get("/memory_occupation").json()["engines"] == []
        status, said = complete(http, "a")
        assert (status, f"no engine of the fleet is known: the {broken}" in said) == (503, True), said
        assert memsaver(http, "status")[0] == 3
