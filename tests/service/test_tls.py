"""HTTPS by a certificate and a key of the operator's."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from memsaver_core.contract.errors import ConfigurationError
from memsaver_server import Client, attach
from memsaver_server.client import UnreachableError
from memsaver_server.fleet import Member
from tests.fleet.served_fleet import served

from .tensor_engine import TensorEngine

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")


def certificate(folder: Path, name: str, *options: str) -> tuple[Path, Path]:
    """A certificate of this machine's loopback address, and its private key."""
    made = folder / f"{name}.pem", folder / f"{name}.key"
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "1"]
    subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-out", str(made[0]), "-keyout", str(made[1])]
    command = ["openssl", "req", *kind, *subject, *files, *(options or ["-nodes"])]
    subprocess.run(command, check=True, capture_output=True)
    return made


def test_a_client_checks_the_certificate(engine: TensorEngine, tmp_path: Path) -> None:
    made, key = certificate(tmp_path, "ours")
    trusting = ssl.create_default_context(cafile=str(made))
    with attach(engine, ssl_certfile=made, ssl_keyfile=key) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with Client(server.url, verify=trusting) as client:
            assert client.release().success
            assert client.resume().success
        with Client(server.url, verify=False) as client:
            assert client.occupation().state == "resident"
        with (
            Client(server.url, attempts=1) as client,
            pytest.raises(UnreachableError, match="CERTIFICATE_VERIFY_FAILED"),
        ):
            client.occupation()
        with Client(server.url.replace("https", "http"), attempts=1) as client, pytest.raises(UnreachableError):
            client.occupation()


def test_a_coordinator_trusts_the_same_authorities_in_all_that_it_sends(engine: TensorEngine, tmp_path: Path) -> None:
    """Requests that it passed on were checked against those of a package."""
    made, key = certificate(tmp_path, "ours")
    trusting = ssl.create_default_context(cafile=str(made))
    with (
        attach(engine, ssl_certfile=made, ssl_keyfile=key) as server,
        served([Member("a", server.url)], verify=trusting) as http,
    ):
        assert http.post("/release_memory_occupation").is_success
        assert http.post("/resume_memory_occupation").is_success
        assert http.get("/flush_cache").is_success
        assert http.get("/v1/models", headers={"x-memsaver-engine": "a"}).status_code != 502


def test_files_that_do_not_fit_are_named(engine: TensorEngine, tmp_path: Path) -> None:
    made, key = certificate(tmp_path, "ours")
    _, other = certificate(tmp_path, "other")
    _, locked = certificate(tmp_path, "locked", "-passout", "pass:word")
    for wrong in (other, locked, tmp_path / "missing"):
        with pytest.raises(ConfigurationError, match=wrong.name):
            attach(engine, ssl_certfile=made, ssl_keyfile=wrong)
    with pytest.raises(ConfigurationError, match="certificate"):
        attach(engine, ssl_keyfile=key)
