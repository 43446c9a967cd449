"""The commands against a running engine: what they print, and their exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import typer

from memsaver_server import attach
from memsaver_server.cli.live import until_ended
from memsaver_server.client import AcceptedAnswer, Client
from memsaver_server.engine.gate import Gate
from memsaver_server.reference import PYTHON
from tests import forks
from tests.waiting import wait_until

from .serving import MEMSAVER, Server, environment, memsaver

TAGS = {"weights", "kv_cache"}


def test_release_and_resume_print_tags_and_phases(server: Server) -> None:
    released = memsaver("release", "--url", server.url)
    assert released.returncode == 0, released.stderr
    for word in ("weights", "kv_cache", "released", "MiB", "drain", "synchronize", "pause", "in all", "delta"):
        assert word in released.stdout
    assert "\x1b[" not in released.stdout, "a pipe gets no colours"
    status = memsaver("status", "--url", server.url)
    assert status.returncode == 0
    assert "released" in status.stdout
    assert "admission closed" in status.stdout
    resumed = memsaver("resume", "--url", server.url)
    assert resumed.returncode == 0, resumed.stderr
    assert "restore" in resumed.stdout
    assert "admission open" in memsaver("status", "--url", server.url).stdout


def test_tags_are_arguments_and_json_is_the_services(server: Server) -> None:
    released = json.loads(memsaver("release", "kv_cache", "--url", server.url, "--json").stdout)
    assert [tag["tag"] for tag in released["tags"]] == ["kv_cache"]
    assert released["released_bytes"] > 0
    again = json.loads(memsaver("release", "kv_cache", "--url", server.url, "--json").stdout)
    assert again["success"]
    assert again["tags"][0]["already"]
    status = json.loads(memsaver("status", "--url", server.url, "--json").stdout)
    states = {tag["tag"]: tag["state"] for tag in status["tags"]}
    assert states["kv_cache"] == "released"
    assert states["weights"] == "resident"


def test_tokens_are_verified_if_asked(server: Server) -> None:
    assert memsaver("resume", "--verify", "--url", server.url).returncode == 2  # there is nothing to compare with
    for command in ("release", "resume"):
        done = memsaver(command, "--verify", "--url", server.url)
        assert done.returncode == 0, done.stderr
        assert re.search(r"^verify ", done.stdout, re.MULTILINE)


def test_an_unknown_tag_is_2_and_names_those_that_exist(server: Server, client: Client) -> None:
    refused = memsaver("release", "wieghts", "--url", server.url)
    assert refused.returncode == 2
    assert "'wieghts'" in refused.stderr
    assert "'weights'" in refused.stderr
    assert client.occupation().state == "resident"
    as_json = memsaver("release", "wieghts", "--url", server.url, "--json")
    assert as_json.returncode == 2
    assert json.loads(as_json.stdout)["error"]["type"] == "unknown_tag"


@pytest.mark.parametrize("url", ["{}", "http://{}", " {}/"])
def test_an_address_needs_no_scheme(server: Server, url: str) -> None:
    answered = memsaver("status", "--url", url.format(server.url.removeprefix("http://")))
    assert answered.returncode == 0, answered.stderr


@pytest.mark.parametrize("slashes", ["/", "///"])
def test_the_address_of_a_unix_socket(tmp_path: Path, slashes: str) -> None:
    with attach(Gate(), uds=tmp_path / "engine.sock"):
        answered = memsaver("status", "--url", f"unix:{slashes}{str(tmp_path)[1:]}/engine.sock")
    assert answered.returncode == 0, answered.stderr


@pytest.mark.parametrize(
    "url", ["ftp://localhost", "/run/memsaver.sock", "http://", "localhost:port", "unix:engine.sock", "unix://", ""]
)
def test_what_is_no_address_is_2(url: str) -> None:
    refused = memsaver("status", "--url", url)
    assert refused.returncode == 2
    assert "unix:///path" in refused.stderr


def test_too_much_asked_is_told_in_the_unit_that_was_asked_in(server: Server, client: Client) -> None:
    held = sum(tag.bytes for tag in client.occupation().tags)
    for asked, unit, size in ("2TB", "TB", 10**12), ("900GiB", "GiB", 1 << 30):
        refused = memsaver("release", "--at-least", asked, "--url", server.url)
        assert refused.returncode == 2
        assert f"--at-least {asked}: the tags hold {held / size:.4g} {unit} on the device" in refused.stderr
    assert memsaver("release", "--at-least", "0", "--url", server.url).returncode == 2
    assert client.occupation().state == "resident"


@pytest.mark.parametrize(
    "arguments",
    [
        ("release", "--restore", "weights"),
        ("release", "--at-least", "much"),
        ("resume", "--sideways"),
        ("dance",),
        ("resume", "--wait-for-memory", "inf"),
        ("release", "--timeout", "nan"),
    ],
)
def test_a_wrong_argument_is_2(arguments: tuple[str, ...]) -> None:
    assert memsaver(*arguments).returncode == 2


ON_OUTPUT = [("--help",), ("status",), ("status", "--json"), ("top",), ("release", "--async"), ("doctor",)]


@pytest.mark.parametrize("arguments", ON_OUTPUT, ids=" ".join)
def test_output_that_cannot_be_written_is_one_sentence(server: Server, arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        ran = run_into(full.fileno(), arguments, server)
    assert (ran.returncode, ran.stderr) == (1, "memsaver: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("arguments", ON_OUTPUT, ids=" ".join)
def test_a_reader_that_has_enough_is_told_nothing(server: Server, arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ran = run_into(writer, arguments, server)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, "")


def run_into(output: int, arguments: tuple[str, ...], server: Server) -> subprocess.CompletedProcess[str]:
    """Run a command with the file ``output`` as its standard output."""
    address = environment({"MEMSAVER_URL": server.url})
    return forks.run(
        [*MEMSAVER, *arguments], stdout=output, stderr=subprocess.PIPE, text=True, env=address, timeout=800, check=False
    )


def test_nothing_there_is_3_with_a_hint() -> None:
    gone = memsaver("status", "--url", "http://127.0.0.1:9")
    assert gone.returncode == 3
    assert "MEMSAVER_URL" in gone.stderr


def test_restore_and_at_least_reach_the_service(server: Server, client: Client) -> None:
    held = {tag.tag: tag.bytes for tag in client.occupation().tags}
    released = json.loads(memsaver("release", "--at-least", "1MiB", "--url", server.url, "--json").stdout)
    assert 1 << 20 <= released["released_bytes"] < sum(held.values())
    client.resume()


def test_a_release_in_the_background_can_be_watched(server: Server) -> None:
    accepted = json.loads(memsaver("release", "--async", "--url", server.url, "--json").stdout)
    watched = memsaver("watch", accepted["operation_id"], "--url", server.url)
    assert watched.returncode == 0, watched.stderr
    assert "drain" in watched.stdout
    assert "released" in watched.stdout
    events = memsaver("watch", accepted["operation_id"], "--url", server.url, "--json").stdout.splitlines()
    assert json.loads(events[-1])["event"] == "done"
    assert memsaver("watch", "no-such-operation", "--url", server.url).returncode == 2


def test_watch_shows_operations_as_they_come(server: Server, client: Client) -> None:
    watching = forks.Popen(
        [*MEMSAVER, "watch", "--url", server.url, "--json"], stdout=subprocess.PIPE, text=True, env=environment()
    )
    try:
        assert watching.stdout is not None
        # The watcher may not have started: repeat until it has seen something.
        seen = threading.Event()

        def act() -> None:
            while not seen.is_set():
                client.release()
                client.resume()

        acting = threading.Thread(target=act)
        acting.start()
        event = json.loads(watching.stdout.readline())
        seen.set()
        acting.join()
        assert event["event"] in ("phase", "phase_done", "progress", "done")
    finally:
        watching.kill()
        watching.wait()
        if watching.stdout is not None:
            watching.stdout.close()


def test_top_draws_one_picture_into_a_pipe(server: Server, client: Client) -> None:
    client.release(["kv_cache"])
    picture = memsaver("top", "--url", server.url)
    assert picture.returncode == 0, picture.stderr
    for word in ("device 0", "kv_cache", "release", "succeeded"):
        assert word in picture.stdout


def test_a_terminal_gets_colours_and_no_color_takes_them_away(server: Server) -> None:
    assert "\x1b[" in _on_a_terminal("status", "--url", server.url)
    assert "\x1b[3" not in _on_a_terminal("status", "--url", server.url, NO_COLOR="1")


def test_a_long_operation_shows_on_a_terminal_where_it_is() -> None:
    gate = Gate()
    with attach(gate) as attachment, Terminal("release", "--url", attachment.url) as terminal:
        # The command begins after the request, which keeps its drain from ending until the bar was seen.
        with gate.request():
            terminal.start()
            terminal.read_until("drain")
        assert terminal.end() == 0
        assert "nothing to release" in terminal.shown


@pytest.mark.parametrize(("on_terminal", "options"), [(False, ()), (True, ()), (False, ("--prepare",))])
@pytest.mark.guards("nobody could cancel an operation that waited")
def test_ctrl_c_cancels(on_terminal: bool, options: tuple[str, ...]) -> None:
    """What has not begun to move memory; stderr says so, and the engine serves."""
    gate = Gate()
    with (
        attach(gate) as attachment,
        Client(attachment.url) as client,
        Terminal("release", *options, "--url", attachment.url, on_terminal=on_terminal) as terminal,
        gate.request(),
    ):
        terminal.start()
        wait_until(lambda: [one.phase for one in client.operations()] == ["drain"])
        if on_terminal:
            terminal.read_until("drain")
        assert terminal.interrupt() == 130, terminal.shown
        assert "was cancelled by" in terminal.shown
        assert [one.status for one in client.operations()] == ["cancelled"]
        assert client.ready()


def test_ctrl_c_cancels_what_has_just_been_accepted() -> None:
    """The answer that names the operation is still on its way."""
    gate = Gate()
    with attach(gate) as attachment, Client(attachment.url) as client, gate.request():

        def start() -> AcceptedAnswer:
            accepted = client.start_release()
            signal.raise_signal(signal.SIGINT)
            return accepted

        with pytest.raises(typer.Exit) as ended:
            until_ended(client, start)
        assert ended.value.exit_code == 130
        assert [one.status for one in client.operations()] == ["cancelled"]


@pytest.mark.guards("nobody could cancel an operation that waited")
def test_ctrl_c_leaves_what_others_wait_for() -> None:
    gate = Gate()
    with (
        attach(gate) as attachment,
        Client(attachment.url) as client,
        Terminal("release", "--url", attachment.url) as terminal,
    ):
        with gate.request():
            terminal.start()
            wait_until(lambda: [one.phase for one in client.operations()] == ["drain"])
            other = client.start_release()
            assert terminal.interrupt() == 130, terminal.shown
            assert f"{other.operation_id} answers other calls, too, and continues" in terminal.shown
            assert client.operation(other.operation_id).status == "running"
        wait_until(lambda: client.operation(other.operation_id).status == "succeeded")


class Terminal:
    """A command that runs on a terminal of its own, or writes into a pipe."""

    def __init__(self, *arguments: str, on_terminal: bool = True, **changes: str) -> None:
        self._command = [*MEMSAVER, *arguments]
        self._environment = environment({"TERM": "xterm-256color", "COLUMNS": "120", **changes})
        self._master, self._slave = pty.openpty() if on_terminal else os.pipe()
        self._child: subprocess.Popen[bytes] | None = None
        self.shown = ""

    def start(self) -> None:
        self._child = forks.Popen(self._command, stdout=self._slave, stderr=self._slave, env=self._environment)
        os.close(self._slave)

    def interrupt(self) -> int:
        """Press Ctrl-C, and return the exit code."""
        assert self._child is not None
        self._child.send_signal(signal.SIGINT)
        return self.end()

    def read_until(self, text: str) -> None:
        while text not in self.shown:
            self.shown += os.read(self._master, 65536).decode(errors="replace")

    def end(self) -> int:
        """Read to the end and return the exit code."""
        assert self._child is not None
        with suppress(OSError):  # reported by a terminal after its last program's exit
            while chunk := os.read(self._master, 65536):
                self.shown += chunk.decode(errors="replace")
        return self._child.wait(600)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        os.close(self._master)


def _on_a_terminal(*arguments: str, **changes: str) -> str:
    with Terminal(*arguments, **changes) as terminal:
        terminal.start()
        assert terminal.end() == 0, terminal.shown
        return terminal.shown


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 always looks for modules in the current folder")
def test_programs_take_no_module_from_the_current_folder(tmp_path: Path) -> None:
    """A checkout has memsaver_core without its compiled part."""
    (tmp_path / "typer.py").write_text("raise ImportError('not this one')")
    ran = subprocess.run([*PYTHON, "-m", "memsaver_server.cli", "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, "Usage" in ran.stdout) == (0, True), ran.stderr
