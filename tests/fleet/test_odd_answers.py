"""Whatever one engine answers, the others are as before, and the coordinator says whose answer cannot be read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from memsaver_core.contract.requests import FleetRelease
from memsaver_server.fleet import FileRecord, RecordContent, RecordError, Wanted
from memsaver_server.fleet.answers import MAX_BYTES
from tests.waiting import wait_until

from .conftest import Sites
from .served_fleet import served

SURROGATE = b'{"message": "\\ud800", "error": {"type": "\\ud800"}}'
#: Much more than is read; but not endless, so that these tests end if it is.
CHUNK = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
TOO_LARGE = [CHUNK] * (16 * MAX_BYTES // 0x10000) + [b"0\r\n\r\n"]


def head(status: int, *more: str) -> bytes:
    lines = (f"HTTP/1.1 {status} Odd", "Content-Type: application/json", "Connection: close", *more)
    return "\r\n".join([*lines, "", ""]).encode()


def whole(status: int, content: bytes, *more: str) -> list[bytes]:
    return [head(status, f"Content-Length: {len(content)}", *more) + content]


def endless(status: int) -> list[bytes]:
    return [head(status, "Transfer-Encoding: chunked"), *TOO_LARGE]


def stuck(status: int) -> list[bytes]:
    return [head(status, "Content-Length: 10") + b"{"]


ODD = {
    "deep": whole(200, b"[" * 200_000),
    "deep, but whole": whole(200, b"[" * 900 + b"]" * 900),
    "surrogate": whole(200, SURROGATE),
    "refusal with a surrogate": whole(500, SURROGATE),
    "no number": whole(200, b'{"message": NaN}'),
    "infinite": whole(200, b'{"message": "", "bytes": 1e999}'),
    "no gzip": whole(200, b"no gzip", "Content-Encoding: gzip"),
    "too large": endless(200),
    "stuck": stuck(200),
}


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "record.json"


@pytest.fixture
def fleet(sites: Sites, record: Path) -> Iterator[httpx.Client]:
    with served([site.member for site in sites.values()], record=FileRecord(record)) as http:
        yield http
        for site in sites.values():
            site.wire.heal()


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize(("path", "body"), [("/flush_cache", {}), ("/release_memory_occupation", {"dry_run": True})])
def test_a_call_of_every_engine_names_the_one(
    fleet: httpx.Client, sites: Sites, path: str, body: dict[str, object], odd: str
) -> None:
    sites["b"].wire.answer(f"POST {path}", ODD[odd])
    answer = fleet.post(path, json=body)
    assert answer.status_code == 502, answer.text
    assert [row["success"] for row in answer.json()["engines"]] == [True, False, True]
    assert "b: gave an answer that cannot be read: " in answer.json()["message"]


def test_blockers_that_are_none_are_of_that_engine_alone(fleet: httpx.Client, sites: Sites) -> None:
    sites["b"].wire.answer("POST /release_memory_occupation", whole(200, b'{"message": "", "blockers": 5}'))
    answer = fleet.post("/release_memory_occupation", json={"dry_run": True})
    assert (answer.status_code, answer.json()["blockers"]) == (200, [])


def test_a_status_that_http_does_not_have_is_told(fleet: httpx.Client, sites: Sites) -> None:
    sites["b"].wire.answer("POST /flush_cache", whole(999, b"{}"))
    answer = fleet.post("/flush_cache")
    assert (answer.status_code, [row["status"] for row in answer.json()["engines"]]) == (502, [200, 999, 200])


@pytest.mark.parametrize("content", [b"[" * 200_000, SURROGATE, b"NaN", b"\xff"])
def test_a_refusal_of_a_request_is_passed_on_as_it_is(fleet: httpx.Client, sites: Sites, content: bytes) -> None:
    sites["b"].wire.answer("POST /v1/", whole(503, content))
    answer = fleet.post("/v1/completions", json={"model": "model of b"})
    assert (answer.status_code, answer.content) == (503, content)


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        (whole(999, b"{}"), "status 999"),
        (endless(503), "it is larger than"),
        (stuck(503), "it began, but did not end"),
    ],
)
def test_a_request_whose_answer_cannot_be_passed_on_fails_by_name(
    fleet: httpx.Client, sites: Sites, pieces: list[bytes], why: str
) -> None:
    sites["b"].wire.answer("POST /v1/", pieces)
    answer = fleet.post("/v1/completions", json={"model": "model of b"})
    assert answer.status_code == 502
    assert "engine b " in answer.json()["message"]
    assert why in answer.json()["message"]
    assert fleet.get("/memory_occupation").json()["engines"][1]["requests"] == 0


def error_of_b(fleet: httpx.Client) -> str:
    return fleet.get("/memory_occupation").raise_for_status().json()["engines"][1]["error"]


@pytest.mark.parametrize("odd", ["surrogate in the model", "too large", "infinite"])
def test_a_status_harms_no_other_engine(fleet: httpx.Client, sites: Sites, record: Path, odd: str) -> None:
    if odd == "surrogate in the model":
        sites["b"].wire.rewrite("model of b", "\\ud800")
    else:
        sites["b"].wire.answer("GET /memory_occupation", ODD[odd])
    wait_until(lambda: "gave an answer that cannot be read" in error_of_b(fleet))
    for path in ("/v1/models", "/operations", "/metrics", "/readyz"):
        assert fleet.get(path).status_code == 200, path
    failed = fleet.post("/release_memory_occupation", json={"operation_id": "all"})
    assert (failed.status_code // 100, [row["name"] for row in failed.json()["error"]["failed"]]) == (5, ["b"])
    assert "gave an answer that cannot be read" in failed.json()["message"]
    released = fleet.post("/release_memory_occupation", json={"selector": {"names": ["a"]}})
    assert released.is_success, released.text
    assert fleet.get("/operations").status_code == 200
    assert '"a"' in record.read_text()


@pytest.mark.parametrize("step", ['"prepare":true', "/commit"])
@pytest.mark.parametrize("odd", ["surrogate", "refusal with a surrogate", "deep", "too large"])
def test_an_operation_fails_by_name(fleet: httpx.Client, sites: Sites, record: Path, step: str, odd: str) -> None:
    sites["b"].wire.answer(step, ODD[odd])
    answer = fleet.post("/release_memory_occupation", json={"operation_id": "odd"})
    assert [row["name"] for row in answer.json()["error"]["failed"]] == ["b"], answer.text
    sites["b"].wire.heal()
    assert [each["operation_id"] for each in fleet.get("/operations").json()["operations"]].count("odd") == 1
    assert fleet.get("/memory_occupation").is_success
    wait_until(lambda: all(site.is_serving for site in sites.values()))
    assert fleet.post("/release_memory_occupation").is_success
    assert '"odd"' not in record.read_text().split('"ids"')[0]


def test_what_a_gateway_answers_is_not_the_engine_s_refusal(fleet: httpx.Client, sites: Sites) -> None:
    """The engine went on, and was closed to all until its lease ended."""
    b = sites["b"]
    # What looks for the operation has a field more.
    b.wire.answer('"prepare":true,"lease_s":30.0}', whole(504, b"<html>Gateway Time-out</html>"))
    answer = fleet.post("/release_memory_occupation", json={"operation_id": "late"})
    assert [row["type"] for row in answer.json()["error"]["failed"]] == ["http_504"], answer.text
    operation, *_ = b.http.get("/operations").json()["operations"]
    assert operation["answer"]["error"]["type"] == "cancelled", "by the fleet, not by the end of its lease"
    assert b.is_serving


def test_a_call_of_every_engine_ends_when_its_caller_has_gone(fleet: httpx.Client, sites: Sites) -> None:
    sites["b"].wire.answer("POST /flush_cache", [])
    address = urlsplit(str(fleet.base_url))
    with socket.create_connection((address.hostname, address.port)) as caller:
        caller.sendall(b"POST /flush_cache HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
        wait_until(lambda: any("POST /flush_cache" in text for text in sites["b"].wire.seen))
        assert not sites["b"].wire.left
    wait_until(lambda: sites["b"].wire.left, timeout_s=60)


def test_a_caller_that_leaves_at_once_has_every_engine_called(fleet: httpx.Client, sites: Sites) -> None:
    address = urlsplit(str(fleet.base_url))
    with socket.create_connection((address.hostname, address.port)) as caller:
        caller.sendall(b"POST /flush_cache HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
    for site in sites.values():
        wait_until(lambda site=site: any("POST /flush_cache" in text for text in site.wire.seen), timeout_s=60)


def test_a_record_that_has_no_json_is_not_written(record: Path) -> None:
    wanted = Wanted.of(FleetRelease().resolved(60), "\ud800", "somebody", False)
    with pytest.raises(RecordError, match="cannot be written"):
        asyncio.run(FileRecord(record).save(RecordContent(wanted=(wanted,))))
    assert not record.exists()
