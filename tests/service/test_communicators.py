"""NCCL's communicators over HTTP: a tag, and what each one holds."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from memsaver_core import communicators
from tests.native import nccl
from tests.native.nccl import PERSISTENT_BYTES, SUSPENDABLE_BYTES
from tests.waiting import wait_until


@pytest.fixture
def communicator(tmp_path: Path) -> Iterator[None]:
    """One that meets nobody, registered as one of two ranks."""
    defined: dict[str, Any] = {}
    exec(nccl.prelude(), defined)
    comm = defined["join"](str(tmp_path / "tp"), 1, 0)
    communicators.register("tp", comm, ranks=2, rank=0)
    yield
    communicators.resume()
    communicators.unregister("tp")
    communicators.found()
    defined["library"].ncclCommDestroy(ctypes.c_void_p(comm))


@pytest.mark.guards("idle NCCL communicators held gigabytes while the engine slept")
def test_what_ranks_share_besides_is_shown(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays after a release; said without one, with what to change."""
    module = "vllm.distributed.device_communicators.pynccl_allocator"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(_mem_pool=object()))
    wait_until(lambda: http.get("/memory_occupation").json()["shared_by_ranks"])
    [told] = http.get("/memory_occupation").json()["shared_by_ranks"]
    assert told == "NCCL symmetric memory is in use; set VLLM_USE_NCCL_SYMM_MEM=0"


@pytest.mark.usefixtures("communicator")
@pytest.mark.guards("idle NCCL communicators held gigabytes while the engine slept")
def test_they_are_shown_with_what_can_be_suspended_and_what_stays(http: httpx.Client) -> None:
    """The service counts them by itself, with the devices."""
    wait_until(lambda: http.get("/memory_occupation").json()["communicators"])
    communicators.suspend(["tp"])
    shown = http.get("/memory_occupation").json()
    assert shown["communicators"] == [
        {
            "name": "tp",
            "ranks": 2,
            "rank": 0,
            "suspendable_bytes": 0,
            "suspended_bytes": SUSPENDABLE_BYTES,
            "persistent_bytes": PERSISTENT_BYTES,
            "suspended": True,
            "obstacle": "",
        }
    ]
    [tag] = [each for each in shown["tags"] if each["tag"] == "communicators"]
    assert (tag["restore"], tag["state"], tag["released_bytes"]) == ("host", "released", SUSPENDABLE_BYTES)
    told = text_string_to_metric_families(http.get("/metrics").text)
    samples = [(sample.name, sample.labels, sample.value) for family in told for sample in family.samples]
    labels = {"tag": "communicators", "state": "released"}
    assert ("memsaver_tag_bytes", labels, SUSPENDABLE_BYTES) in samples
    labels = {"communicator": "tp", "rank": "0"}
    assert ("memsaver_communicator_persistent_bytes", labels, PERSISTENT_BYTES) in samples
