"""``memsaver serve`` as a process: where it listens, what it refuses, how it exits."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest

from memsaver_core.contract.status import SharedStoreStatus
from memsaver_server.client import Client
from tests import forks
from tests.amount import amount
from tests.waiting import wait_until

from .serving import MEMSAVER, environment, memsaver, serving

PROMPT = {"text": "Memory that nobody uses", "sampling_params": {"max_new_tokens": 16, "temperature": 0}}


def test_a_whole_round_in_plain_http_gives_equal_tokens() -> None:
    with serving() as server, httpx.Client(base_url=server.url, timeout=600) as http:
        before = http.post("/generate", json=PROMPT).json()["output_ids"]
        loaded = http.get("/memory_occupation").json()
        assert loaded["state"] == "resident"

        released = http.post("/release_memory_occupation")
        assert released.status_code == 200
        answer = released.json()
        assert answer["success"] is True
        held = sum(tag["bytes"] for tag in loaded["tags"])
        assert answer["released_bytes"] == held > 0
        assert sum(device["delta_bytes"] for device in answer["devices"]) <= -held
        assert {"drain", "synchronize", "pause"} <= {phase["name"] for phase in answer["phases"]}

        assert http.get("/livez").status_code == 200
        assert http.get("/readyz").status_code == 503
        refused = http.post("/generate", json=PROMPT)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) >= 0

        resumed = http.get("/resume_memory_occupation")
        assert resumed.status_code == 200
        assert resumed.json()["resumed_bytes"] == held
        assert http.get("/readyz").status_code == 200
        assert http.post("/generate", json=PROMPT).json()["output_ids"] == before

        assert server.end() == 0


@pytest.mark.parametrize(
    ("number", "state"),
    [
        (signal.SIGTERM, "released"),
        (signal.SIGTERM, "hibernated"),
        (signal.SIGINT, "resident"),
        (signal.SIGTERM, "prepared"),
    ],
)
@pytest.mark.guards("the process aborted at exit")
def test_a_signal_ends_it_with_code_0_in_any_state(number: signal.Signals, state: str) -> None:
    with serving(changes={"TESTS_END_WHOLE": "1"}) as server:
        with Client(server.url) as client:
            if state in ("released", "hibernated"):
                client.release(hibernate=state == "hibernated")
            elif state == "prepared":
                client.release(prepare=True, lease_s=3600)
        assert server.end(number) == 0
        assert "Traceback" not in server.log


COUNTED = """
import atexit, gc, sys
gc.unfreeze()  # what the process that forks programs left out
atexit.register(lambda: print("left out:", gc.get_freeze_count(), file=sys.__stderr__))
from memsaver_server.cli import main
main()
"""


def test_what_is_loaded_is_left_out_of_full_garbage_collections() -> None:
    """A full collection takes 0.2 s in a process with torch loaded, and no probe is answered meanwhile."""
    with serving(program=(sys.executable, "-c", COUNTED)) as server:
        assert server.end() == 0
        [count] = [int(line.split()[-1]) for line in server.log.splitlines() if line.startswith("left out:")]
        assert count > 100_000


#: A signal whose handler raises in ``__del__``, from which Python passes on no exception.
SIGNALLED = """
import signal
class Last:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
set_handler = signal.signal
def set_and_signal(number, handler):
    before = set_handler(number, handler)
    if number == signal.SIGINT and callable(handler):
        Last()
    return before
signal.signal = set_and_signal
from memsaver_server.cli import main
main()
"""


@pytest.mark.parametrize("command", [("serve",), ("fleet", "serve", "--members", "members.yaml")])
def test_a_signal_whose_exception_is_lost_ends_it(command: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / "members.yaml").write_text("[]")
    program = [sys.executable, "-c", SIGNALLED, *command, "--port", "0"]
    ran = forks.run(program, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0
    assert "Exception ignored" in ran.stderr
    assert "serving" in ran.stdout


def test_a_unix_socket_is_the_users_alone_and_goes_with_the_process(tmp_path: Path) -> None:
    path = tmp_path / "memsaver.sock"
    with serving("--uds", str(path)) as server:
        assert server.url == f"unix://{path}"
        mode = os.stat(path).st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        with Client(server.url) as client:
            before = client.generate("over a socket", max_new_tokens=4, temperature=0)["output_ids"]
            assert client.release().released_bytes > 0
            assert client.resume().success
            assert client.generate("over a socket", max_new_tokens=4, temperature=0)["output_ids"] == before
        status = memsaver("status", "--uds", str(path))
        assert status.returncode == 0, status.stderr
        assert server.end() == 0
        assert not path.exists()


def test_beyond_loopback_it_needs_a_key() -> None:
    refused = memsaver("serve", "--host", "0.0.0.0", "--port", "0")
    assert refused.returncode == 1
    assert "MEMSAVER_API_KEY" in refused.stderr
    with serving("--host", "0.0.0.0", changes={"MEMSAVER_API_KEY": "a key"}) as server:
        url = server.url.replace("0.0.0.0", "127.0.0.1")
        assert memsaver("status", "--url", url).returncode == 4
        assert memsaver("status", "--url", url, changes={"MEMSAVER_API_KEY": "a key"}).returncode == 0
        assert httpx.get(f"{url}/livez").status_code == 200


#: Runs a program whose stderr is a pipe that is full and never read, a pipe whose reader is gone, or closed.
WITHOUT_READER = """
import os, sys
kind, *program = sys.argv[1:]
reader, writer = os.pipe()
os.set_inheritable(reader, True)
os.set_blocking(writer, False)
try:
    while kind == "full":
        os.write(writer, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(writer, True)
if kind == "broken":
    os.close(reader)
os.dup2(writer, 2)
if kind.startswith("closed"):
    os.close(2)
    sys.stderr = sys.__stderr__ = None
if kind == "closed at its start":
    os.execv(program[0], program)
sys.argv = ["memsaver", *program[3:]]
from memsaver_server.cli import main
main()
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "broken", "closed", *["closed at its start"][: amount(0, long=1)]])
def test_it_serves_without_a_reader_of_stderr(kind: str) -> None:
    """It starts, answers and ends as ever. Each operation writes an audit line there."""
    program = (sys.executable, "-c", WITHOUT_READER, kind, *MEMSAVER)
    with serving(program=program) as server, httpx.Client(base_url=server.url, timeout=600) as http:
        for _ in range(3):
            assert http.post("/release_memory_occupation").json()["state"] == "released"
            assert http.post("/resume_memory_occupation").json()["state"] == "resident"
        assert http.get("/livez").status_code == 200
        assert server.end() == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--model", "/nowhere"), "/nowhere"),
        (("--random-weights", "/nowhere.json"), "/nowhere.json"),
        (("--dtype", "float99"), "float99"),
        (("--kv-cache-bytes", "much"), "8GiB"),
        (("--batch-sizes", "one"), "1,2,4"),
        (("--while-released", "guess"), "queue"),
    ],
)
def test_what_it_cannot_serve_it_names(options: tuple[str, str], says: str) -> None:
    refused = memsaver("serve", "--port", "0", *options)
    assert refused.returncode in (1, 2)
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr


def test_without_a_gpu_it_says_so() -> None:
    refused = memsaver("serve", "--port", "0", changes={"MEMSAVER_DRIVER": "cuda", "CUDA_VISIBLE_DEVICES": ""})
    assert refused.returncode == 1
    assert "torch finds no NVIDIA GPU" in refused.stderr
    assert "MEMSAVER_DRIVER=host" in refused.stderr


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from memsaver_server.cli import main; main()"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("MEMSAVER_DRAIN_TIMEOUT_S", "soon", "must be a number"),
        ("MEMSAVER_HOST_CAPACITY", "lots", "must be a size"),
        ("MEMSAVER_WHILE_RELEASED", "guess", "must be 'refuse' or 'queue'"),
    ],
)
def test_a_wrong_setting_is_told_before_torch_is_loaded(variable: str, value: str, said: str) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "serve", "--port", "0"]
    ran = subprocess.run(command, env=environment({variable: value}), capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert f"memsaver: cannot start: {variable} is {value!r}, but {said}" in ran.stderr
    assert "pydantic" not in ran.stderr


def test_a_misspelt_setting_is_named_at_the_start() -> None:
    with serving(changes={"MEMSAVER_DRAIN_TIMOUT_S": "3"}) as server:
        assert server.end() == 0
        assert server.log.count("MEMSAVER_DRAIN_TIMOUT_S has no effect") == 1
        assert "MEMSAVER_DRAIN_TIMEOUT_S" in server.log


HOLDER = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
if os.fork():
    os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


def test_a_port_that_a_forked_child_kept_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        port, child = (int(parent.stdout.readline()) for _ in range(2))
        refused = memsaver("serve", "--port", str(port), "--model", str(tmp_path))
        parent.stdin.close()
    assert refused.returncode == 1
    assert f"cannot bind 127.0.0.1:{port}: Address already in use, by process {child} (python" in refused.stderr
    assert str(tmp_path) not in refused.stderr


@pytest.mark.parametrize("abstract", [False, True])
def test_systemd_is_told_when_it_serves_and_when_it_ends(tmp_path: Path, abstract: bool) -> None:
    name = f"@memsaver-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(name.replace("@", "\0"))
        systemd.settimeout(600)
        with serving(changes={"NOTIFY_SOCKET": name}) as server:
            assert systemd.recv(64) == b"READY=1"
            assert httpx.get(f"{server.url}/readyz").status_code == 200
            assert server.end() == 0
            assert systemd.recv(64) == b"STOPPING=1"


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_two_engines_of_one_host_device_take_turns(tmp_path: Path) -> None:
    """Out of memory on resume is an answer; released memory stays released, and the retry works."""
    shared = {"MEMSAVER_HOST_DEVICE": f"e2e-{os.getpid()}", "MEMSAVER_HOST_CAPACITY": "192MiB"}
    big = ("--kv-cache-bytes", "128MiB")
    with serving(*big, changes=shared) as first, Client(first.url) as one:
        before = one.generate("take turns", max_new_tokens=8, temperature=0)["output_ids"]
        one.release()
        with serving(*big, changes=shared) as second:
            short = memsaver("resume", "--url", first.url)
            assert short.returncode == 6, short.stderr
            assert one.occupation().state == "released"
            with Client(second.url) as two:
                two.release()
            assert memsaver("resume", "--url", first.url).returncode == 0
            assert second.end() == 0
        assert one.generate("take turns", max_new_tokens=8, temperature=0)["output_ids"] == before
        assert first.end() == 0
    assert not Path(f"/dev/shm/memsaver-{os.getuid()}-e2e-{os.getpid()}").exists()


def store_of(client: Client) -> SharedStoreStatus:
    shown = client.occupation().host_backup.shared_store
    assert shown is not None
    return shown


@pytest.mark.guards("each of several replicas pinned its own copy of the same weights")
def test_two_engines_keep_their_weights_once() -> None:
    """Released one after the other, the second copies nothing; status and metrics show its share and the store."""
    store = {"MEMSAVER_SHARED_BACKUPS": f"e2e-{os.getpid()}"}
    with serving(changes=store) as first, serving(changes=store) as second:
        clients = [Client(server.url) for server in (first, second)]
        before = [client.generate("Two of a kind", max_new_tokens=8, temperature=0)["text"] for client in clients]
        room = httpx.post(f"{first.url}/release_memory_occupation", json={"dry_run": True}).json()["host"]
        assert room["needed_bytes"] < room["free_bytes"] < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        copied, found = [client.release(tags=["weights"]).tags[0] for client in clients]
        # The first has given them to the store when it had loaded them, and the second has them from there.
        assert [each.backed_up_bytes + each.shared_bytes for each in (copied, found)] == [0, 0]
        content = found.unchanged_bytes
        # Two engines that start together make memory side by side: of little content a part of each piece is left. What
        # a release finds unused, it gives back in the background.
        wait_until(lambda: store_of(clients[0]).total_bytes < 1.5 * content)
        for client, server in zip(clients, (first, second), strict=True):
            shown = store_of(client)
            assert shown.processes == 2
            assert shown.share_bytes == pytest.approx(shown.held_bytes / 2, abs=64)
            assert 0.5 * content < shown.held_bytes <= shown.used_bytes < 1.1 * content
            assert shown.used_bytes <= shown.total_bytes < 1.5 * content
            assert 'memsaver_shared_store_bytes{kind="share"}' in httpx.get(f"{server.url}/metrics").text
            client.resume()
        after = [client.generate("Two of a kind", max_new_tokens=8, temperature=0)["text"] for client in clients]
        assert after == before
