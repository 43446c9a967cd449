"""A served engine on a host that runs out of memory (control group), disk space or file descriptors."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path

import httpx
import pytest

from memsaver_core import MemsaverError, _native
from memsaver_server import doctor
from tests.reliability.surroundings import (
    control_group,
    in_child,
    keep_mounts_private,
    mount_small_disk,
    no_descriptors,
)
from tests.waiting import wait_until

from .program import Program, client, tokens
from .tensor_engine import MIB

#: An engine of 26 MiB, which pins nothing ahead of its first release.
ENVIRONMENT = {
    "MEMSAVER_DRIVER": "host",
    "MEMSAVER_HOST_CAPACITY": str(64 * MIB),
    "MEMSAVER_PREPARE_BACKUP": "0",
}
#: Keeps the two large tags, 24 MiB.
KEPT = {"restore": {"weights": "host", "kv_cache": "host"}}
ON_DISK = {"restore": {"weights": "file", "kv_cache": "file"}}


def is_untouched(http: httpx.Client) -> bool:
    """Whether everything is resident and requests are admitted."""
    occupation = http.get("/memory_occupation").json()
    return (
        occupation["state"] == "resident"
        and all(tag["released_bytes"] == 0 for tag in occupation["tags"])
        and occupation["admission"]["open"] is True
    )


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.guards("a backup larger than host memory ended in the OOM killer")
def test_a_backup_over_the_control_groups_limit(version: int) -> None:
    """507 with figures instead of the OOM killer; it stays resident and serves; with room the retry works."""
    with (
        control_group(22 * MIB, version) as group,
        Program(by_itself=True, **ENVIRONMENT) as engine,
        client(engine) as http,
    ):
        before = tokens(http)
        group.enter(engine.process.pid)
        for _ in range(2):
            response = http.post("/release_memory_occupation", json=KEPT)
            assert response.status_code == 507
            error = response.json()["error"]
            assert (error["type"], response.json()["state"]) == ("out_of_host_memory", "resident")
            assert error["needed_bytes"] >= 24 * MIB
            assert 0 < error["free_bytes"] <= 22 * MIB
            assert is_untouched(http)
            assert tokens(http) == before
        group.limit(512 * MIB)
        assert http.post("/release_memory_occupation", json=KEPT).json()["state"] == "released"
        assert http.post("/resume_memory_occupation").json()["state"] == "resident"
        assert tokens(http) == before


@pytest.mark.guards(
    "running out of memory or other resources killed the process",
    "a backup larger than host memory ended in the OOM killer",
)
def test_the_disk_fills_up_in_the_middle_of_a_backup(tmp_path: Path) -> None:
    """507 that says what to do. What was not written stays, what was written comes back, and with space the release
    works."""

    def body() -> None:
        keep_mounts_private()
        mount_small_disk(tmp_path, 32 * MIB)
        own = {**ENVIRONMENT, "MEMSAVER_FILE_DIR": str(tmp_path)}
        with Program("mounts", str(os.getpid()), **own) as engine, client(engine) as http:
            before = tokens(http)
            copies = engine.count("copy_to_host")
            engine.hold("copy_to_host")
            with ThreadPoolExecutor(1) as pool:
                releasing = pool.submit(http.post, "/release_memory_occupation", json=ON_DISK)
                engine.wait_for("copy_to_host", more_than=copies)  # the look at the disk has been taken
                intruder = tmp_path / "intruder"
                with intruder.open("wb") as file:
                    os.posix_fallocate(file.fileno(), 0, 12 * MIB)  # space for one of the two tags
                engine.heal()
                response = releasing.result()
            assert response.status_code == 507
            assert response.json()["error"]["type"] == "disk_full"
            for word in ("ENOSPC", str(tmp_path), "MEMSAVER_FILE_DIR"):
                assert word in response.json()["message"]
            assert response.json()["state"] == ("resident" if is_untouched(http) else "released")
            assert http.get("/livez").status_code == 200
            assert http.post("/resume_memory_occupation").json()["state"] == "resident"
            assert is_untouched(http)
            assert tokens(http) == before
            refused = http.post("/release_memory_occupation", json=ON_DISK)  # now by the check of disk space
            assert (refused.status_code, refused.json()["state"]) == (507, "resident")
            assert refused.json()["error"]["needed_bytes"] > refused.json()["error"]["free_bytes"] >= 0
            assert is_untouched(http)
            intruder.unlink()
            assert http.post("/release_memory_occupation", json=ON_DISK).json()["state"] == "released"
            assert http.post("/resume_memory_occupation").json()["state"] == "resident"
            assert tokens(http) == before

    in_child(body)


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_prepare_and_dry_run_see_the_disk(tmp_path: Path) -> None:
    """As the release finds it: too small, taken by another engine's preparation, and for content that host memory
    keeps now."""

    def body() -> None:
        keep_mounts_private()
        mount_small_disk(tmp_path, 40 * MIB)
        own = {**ENVIRONMENT, "MEMSAVER_FILE_DIR": str(tmp_path)}
        path = "/release_memory_occupation"
        with (
            Program("mounts", str(os.getpid()), **own) as one,
            client(one) as first,
            Program("mounts", str(os.getpid()), **own) as other,
            client(other) as second,
        ):
            for http in (first, second):  # content that was kept in host memory needs space on the disk all the same
                http.post(path, json=KEPT).raise_for_status()
                http.post("/resume_memory_occupation").raise_for_status()

            def fits(http: httpx.Client) -> bool:
                plan = http.post(path, json={**ON_DISK, "dry_run": True}).json()
                assert plan["file"]["needed_bytes"] >= 24 * MIB
                assert bool(plan["blockers"]) == (plan["file"]["needed_bytes"] > plan["file"]["free_bytes"])
                return not plan["blockers"]

            assert fits(first)
            assert fits(second)
            prepared = first.post(path, json={**ON_DISK, "prepare": True, "lease_s": 600})
            assert prepared.status_code == 200
            assert not fits(second)
            refused = second.post(path, json={**ON_DISK, "prepare": True})
            assert (refused.status_code, refused.json()["error"]["type"]) == (507, "disk_full")
            assert refused.json()["error"]["needed_bytes"] > refused.json()["error"]["free_bytes"]
            assert is_untouched(second)
            assert 'outcome="disk_full"' in second.get("/metrics").text
            first.post(f"/operations/{prepared.json()['operation_id']}/abort").raise_for_status()
            assert fits(second)
            prepared = second.post(path, json={**ON_DISK, "prepare": True, "lease_s": 600})
            done = second.post(f"/operations/{prepared.json()['operation_id']}/commit")
            assert (done.status_code, done.json()["state"]) == (200, "released")
            assert second.post("/resume_memory_occupation").json()["state"] == "resident"

    in_child(body)


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_prepare_and_dry_run_see_the_limit_of_a_shared_store() -> None:
    """What is more than the whole store has; the commit failed."""
    own = {"MEMSAVER_SHARED_BACKUPS": f"small-{os.getpid()}", "MEMSAVER_HOST_BACKUP_LIMIT": str(16 * MIB)}
    with Program(**ENVIRONMENT, **own, MEMSAVER_PACK="off") as program, client(program) as http:
        for restore, fits in ((KEPT, False), ({"restore": {"weights": "host"}}, True)):
            plan = http.post("/release_memory_occupation", json={**restore, "dry_run": True}).json()
            assert any("host memory" in each for each in plan["blockers"]) != fits
            prepared = http.post("/release_memory_occupation", json={**restore, "prepare": True})
            assert prepared.status_code == (200 if fits else 507)
            assert fits or is_untouched(http)


def test_descriptors_run_out() -> None:
    """Open connections are answered, a release is refused if it needs a descriptor, and a resume needs none; with
    descriptors again everything works."""
    with Program(**ENVIRONMENT) as engine, client(engine) as http, client(engine) as observer:
        before = tokens(http)
        assert observer.get("/readyz").status_code == 200
        with no_descriptors(engine.process.pid):
            for path in ("/livez", "/health", "/readyz", "/metrics", "/memory_occupation", "/operations"):
                assert observer.get(path).status_code == 200
            assert tokens(http) == before
            new = HTTPConnection(http.base_url.host, http.base_url.port, timeout=600)
            new.request("GET", "/livez")  # waits in the kernel to be accepted
            refused = http.post("/release_memory_occupation", json=KEPT)  # it cannot read the memory limits
            assert refused.status_code == 500
            assert refused.json()["error"]["type"] == "backup_error"
            assert "ulimit -n" in refused.json()["message"]
            assert is_untouched(observer)
            assert tokens(http) == before
            answer = http.post("/release_memory_occupation", json={"tags": ["kv_cache", "workspace"]}).json()
            assert (answer["success"], answer["state"]) == (True, "released")
            assert observer.get("/livez").status_code == 200
            assert observer.get("/readyz").status_code == 503
            assert http.post("/resume_memory_occupation").json()["state"] == "resident"
            assert tokens(http) == before
        assert new.getresponse().status == 200
        new.close()
        assert http.post("/release_memory_occupation", json=KEPT).json()["state"] == "released"
        maps = engine.count("map")
        engine.hold("map")
        with ThreadPoolExecutor(1) as pool:
            resuming = pool.submit(http.post, "/resume_memory_occupation")
            engine.wait_for("map", more_than=maps)
            with no_descriptors(engine.process.pid):  # from the middle of the resume on
                engine.heal()
                assert resuming.result().raise_for_status().json()["state"] == "resident"
                assert is_untouched(observer)
                assert tokens(http) == before


@pytest.mark.guards("an operation waited forever, and nothing said why")
def test_a_connection_that_cannot_be_accepted_costs_little(
    serve: Callable[..., httpx.Client], caplog: pytest.LogCaptureFixture
) -> None:
    """A log line now and then, instead of thousands at once that delay the connected clients."""
    http = serve()
    assert http.get("/livez").status_code == 200
    with socket.socket() as new:
        new.settimeout(600)
        with no_descriptors(os.getpid()):
            new.connect((http.base_url.host, http.base_url.port))
            new.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")

            def was_logged() -> bool:
                assert http.get("/livez").status_code == 200
                return bool(caplog.records)

            wait_until(was_logged)
            assert http.get("/livez").status_code == 200
            assert len([record for record in caplog.records if record.name == "asyncio"]) < 10
        assert new.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.guards("running out of memory or other resources killed the process")
def test_a_host_device_in_a_full_shared_memory_is_an_error() -> None:
    """Not a SIGBUS at its first use. `memsaver doctor` finds it."""

    def body() -> None:
        keep_mounts_private()
        mount_small_disk(Path("/dev/shm"), 64 << 10)
        with open("/dev/shm/full", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 64 << 10)
        with pytest.raises(MemsaverError, match=r"/dev/shm/memsaver-.*No space left on device"):
            _native.Saver(driver="host", host_devices=["full"], host_capacity=64 * MIB)
        os.environ["MEMSAVER_HOST_DEVICE"] = "full"
        found = doctor.check_host_driver(doctor.look())
        assert found.level is doctor.Level.BLOCKED
        assert "/dev/shm, which has the account that they share, is full" in found.found

    in_child(body)
