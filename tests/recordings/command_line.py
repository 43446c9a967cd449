"""What the command line prints, and what it sends."""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import typer
from click.testing import CliRunner

from memsaver_server.cli import main
from memsaver_server.cli.commands import app

from .clients import KEY, tapped
from .doors import RELEASED
from .engines import Site, VerifiedEngine, driver, generating, memory
from .fleets import both
from .normal import Names, brief

_TIME = re.compile(r"\b\d+(\.\d+)? (ms|s|min)\b( \d+ s)?|\b\d\d:\d\d:\d\d\b|\b\d+(\.\d+)? GB/s")
#: Figures of the process: what it takes of the host, and how much the pool of its backups has grown.
_FIGURE = re.compile(r"(?<=host memory  64 MiB  )(\S+(?: [KM]iB)?)  \S+ MiB|(?<= kept, )\S+ KiB of memory ready.*")
_GAP = re.compile(r"[ ─━═╭╮╰╯│]{2,}|[─━═╭╮╰╯│]")
RELEASE: tuple[tuple[str, ...], ...] = (
    (),
    ("kv_cache", "weights"),
    ("--timeout", "5", "--mode", "keep"),
    ("--restore", "weights=discard", "--restore", "kv_cache=host"),
    ("--at-least", "100KiB"),
    ("--trim",),
    ("--no-trim",),
    ("--hibernate",),
    ("--hibernate", "--no-trim"),
    ("--verify",),
    ("--wait",),
    ("--async",),
    ("no_such_tag",),
    ("--at-least", "1TB"),
    ("--mode", "sideways"),
    ("--restore", "weights"),
    ("--restore", "weights=tape"),
    ("--timeout", "nan"),
    ("--at-least", "0"),
    ("--colour", "red"),
)
RESUME: tuple[tuple[str, ...], ...] = (
    (),
    ("weights",),
    ("--wait-for-memory", "1.5"),
    ("--verify",),
    ("--wait", "--async"),
    ("no_such_tag",),
    ("--wait-for-memory", "inf"),
)
FLEET_COMMANDS: tuple[tuple[str, ...], ...] = (
    ("release",),
    ("resume",),
    ("release", "kv_cache", "--name", "a", "--label", "role=a"),
    ("status", "--name", "a"),
    ("resume", "--wait-for-memory", "1.5"),
    ("release", "--best-effort", "--timeout", "5", "--mode", "abort"),
    ("resume", "weights", "--best-effort", "--host", "host-b"),
    ("resume",),
    ("release", "--hibernate", "--name", "a"),
    ("release", "no_such_tag", "--name", "a"),
    ("release", "--name", "z"),
    ("release", "--label", "z"),
    ("release", "--mode", "sideways", "--name", "a"),
)


def command_line(folder: Path) -> Iterator[tuple[str, Any]]:
    """The recordings of the command line."""
    yield "command_line_help", _help()
    yield "command_line_refusals", _refusals(folder)
    seen: list[Any] = []
    engine = VerifiedEngine(memory())
    with tapped(engine, seen) as url, httpx.Client(base_url=url, timeout=600, verify=False) as http:
        yield "command_line", _commands(Site(engine, http), seen, url)
    engine.close()
    yield "command_line_fleet", _fleet_commands(folder)


_COMMAND = typer.main.get_command(app)


class _Run:
    """Runs commands; what they print is given names as one scenario's."""

    def __init__(self, texts: Mapping[str, str], seen: list[Any] | None = None) -> None:
        self._names = Names(texts)
        self._seen = seen if seen is not None else []
        self.last = ""

    def run(self, *arguments: str, **environment: str) -> Any:
        """Return what a command prints and sends."""
        self._seen.clear()
        ran = CliRunner().invoke(_COMMAND, list(arguments), prog_name="memsaver", env=environment)
        found: dict[str, Any] = {"command": self._names.text(" ".join(("memsaver", *arguments))), "code": ran.exit_code}
        if ran.stdout:
            found["stdout"] = self._printed(ran.stdout)
        if ran.stderr:
            found["stderr"] = self._lines(ran.stderr)
        if sent := [self._names.texts(each) for each in self._seen if not each[0].startswith("GET")]:
            found["sent"] = sent
        return found

    def fork(self, folder: Path, *arguments: str) -> Any:
        """Return what a command prints that takes over signals and output of its process."""
        said = folder / "said"
        if not (child := os.fork()):
            with said.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.argv = ["memsaver", *arguments]
            code = 1
            try:
                main()
            except SystemExit as ended:
                code = int(ended.code or 0)
            finally:
                sys.stdout.flush()
                atexit._run_exitfuncs()  # which write what is left for stderr
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        command = self._names.text(" ".join(("memsaver", *arguments)))
        return {"command": command, "code": code, "output": self._lines(said.read_text())}

    def _printed(self, text: str) -> Any:
        try:
            answer = json.loads(text)
        except ValueError:
            return self._lines(text)
        self.last = answer.get("operation_id", self.last)
        return self._names.normal(brief(answer))

    def _lines(self, text: str) -> list[Any]:
        """The lines without times; columns, whose width depends on them, are divided by two spaces."""
        found: list[Any] = []
        for line in text.splitlines():
            if line.startswith("{"):
                found.append(self._names.normal(brief(json.loads(line))))
            elif plain := _GAP.sub("  ", _TIME.sub("TIME", self._names.text(line))).strip():
                found.append(_FIGURE.sub(r"\1  SIZE", plain))
        return found


def _help() -> dict[str, Any]:
    """The help of every command."""
    found: dict[str, Any] = {}

    def walk(command: Any, *path: str) -> None:
        found[" ".join(("memsaver", *path))] = _Run({}).run(*path, "--help")["stdout"]
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, *path, name)

    walk(_COMMAND)
    return {**found, "memsaver --version": _Run({}).run("--version")}


def _refusals(folder: Path) -> list[Any]:
    """Commands that reach no service."""
    runs = _Run({str(folder): "/FOLDER"})
    run = runs.run
    closed = "http://127.0.0.1:9"
    return [
        run(),
        run("dance"),
        run("status", "--url", closed),
        run("status", "--url", closed, "--json"),
        run("release", "--url", closed, "--json"),
        run("status", "--url", "ftp://localhost"),
        run("status", "--uds", str(folder / "none.sock")),
        run("watch", "none", "--url", closed),
        run("top", "--url", closed),
        run("fleet"),
        run("fleet", "status", "--members", str(folder / "none.yaml")),
        run("fleet", "release", "--members", "dns:x"),
        run("fleet", "release"),
        *(
            runs.fork(folder, *arguments)
            for arguments in (
                ("serve", "--dtype", "no-such-type"),
                ("serve", "--host", "0.0.0.0"),
                ("serve", "--batch-sizes", "x"),
                ("serve", "--kv-cache-bytes", "much"),
                ("serve", "--while-released", "perhaps"),
                ("fleet", "serve", "--members", "dns:x", "--port", "0"),
                ("fleet", "serve", "--members", str(folder / "none.yaml"), "--host", "0.0.0.0"),
            )
        ),
    ]


def _commands(site: Site, seen: list[Any], url: str) -> dict[str, Any]:
    runs = _Run({url.removeprefix("http://"): "SERVER"}, seen)
    run = partial(runs.run, MEMSAVER_URL=url)
    site.restore()
    found: dict[str, list[Any]] = {"status": [run("status"), run("status", "--json")]}
    found["release"] = []
    for number, arguments in enumerate(RELEASE):
        for form in _forms(number):
            site.scenario()
            found["release"].append(run("release", *arguments, *form))
            site.state()
    found["resume"] = []
    for number, arguments in enumerate(RESUME):
        for form in _forms(number):
            site.bring(RELEASED)
            found["resume"].append(run("resume", *arguments, *form))
            site.state()
    site.restore()
    found["what is released"] = [
        *(run("release", "kv_cache"), run("release", "kv_cache"), run("status"), run("status", "--json")),
        *(run("resume"), run("resume"), run("release", "--hibernate"), run("status")),
    ]
    site.last = ""
    site.restore()
    run("release", "--async", "--json")
    site.state()
    found["watch and top"] = [
        *(run("watch", runs.last), run("watch", runs.last, "--json"), run("watch", "none"), run("top")),
    ]
    found["what fails"] = _failing(site, run)
    return found


def _forms(number: int) -> tuple[tuple[str, ...], ...]:
    """Tables and JSON for the first commands, then in turn."""
    forms: tuple[tuple[str, ...], ...] = ((), ("--json",))
    return forms if number < 2 else forms[number % 2 :][:1]


def _failing(site: Site, run: Callable[..., Any]) -> list[Any]:
    found = []
    for form in ((), ("--json",)):
        site.scenario()
        with generating(site):
            found.append(run("release", "--timeout", "0.01", *form))
            site.http.post("/release_memory_occupation", json={"async": True, "timeout_s": 60})
            found.append(run("resume", *form))
            site.http.delete(f"/operations/{site.http.get('/operations').json()['operations'][0]['operation_id']}")
        site.restore()
        driver().fail("unmap")
        found.append(run("release", *form))
        site.last = ""
        site.restore()
        site.http.post("/release_memory_occupation")
        driver().fail("create", kind="out_of_memory")
        found.append(run("resume", *form))
        site.last = ""
    site.restore()
    with tapped(site.engine, [], api_key=KEY) as keyed:
        for key in (None, "wrong", KEY):
            ran = _Run({keyed: "http://SERVER"}).run
            found.append(ran("release", "no_such_tag", "--url", keyed, *(("--api-key", key) if key else ())))
            found.append(ran("status", "--json", "--url", keyed, **({"MEMSAVER_API_KEY": key} if key else {})))
    return found


def _fleet_commands(folder: Path) -> list[Any]:
    members, record = folder / "members.yaml", folder / "record-of-commands.json"
    with both() as fleet:
        rows = [
            {"name": name, "url": str(http.base_url).rstrip("/"), "labels": {"role": name}, "host": f"host-{name}"}
            for name, http in fleet.https.items()
        ]
        members.write_text(json.dumps(rows))
        texts = {row["url"]: f"http://{row['name']}" for row in rows} | {str(folder): "/FOLDER"}
        found = []
        for number, (command, *arguments) in enumerate(FLEET_COMMANDS):
            for form in _forms(number):
                run = _Run(texts).run
                found.append(run("fleet", command, "--members", str(members), *arguments, *form))
            if command == "release" and arguments:
                run("fleet", "resume", "--members", str(members))
        run = _Run(texts).run
        where = ("--members", str(members), "--record", str(record))
        found += [run("fleet", "release", *where, "kv_cache"), run("fleet", "status", *where)]
        found += [run("fleet", "status", *where, "--json"), run("fleet", "resume", *where)]
        found.append({"record": Names(texts).normal(json.loads(record.read_text()))})
    return found
