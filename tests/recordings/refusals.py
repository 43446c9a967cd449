"""What one engine refuses: paths, methods, keys, pages of other sites, signatures, bodies, and what fails below it."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from memsaver_core.contract.errors import ContextLostError
from memsaver_server.http import connection_limits
from tests.native import injection
from tests.obstacles import put_in

from .engines import KEY, PROMPT, READ_KEY, Site, driver, generating, payload, served
from .scenario import ABSENT, Scenario, raw

RELEASE, RESUME = "POST /release_memory_occupation", "POST /resume_memory_occupation"


def refusals(_folder: Path) -> Iterator[tuple[str, Any]]:
    """The recordings of what is refused."""
    with served(history=4) as site:
        found = {
            "paths and methods": _paths(site),
            "bodies": _bodies(site),
            "pages of other sites": _pages(site),
            "malformed HTTP": _malformed(site),
            "weights that are released": _weights_released(site),
        }
        yield "engine_errors", {**found, "a body that is sent too slowly": _slow()}
        yield "engine_faults", _faults(site)
    with served(api_key=KEY, read_key=READ_KEY, protect_probes=True) as site:
        yield "engine_keys", _keys(site)
    with served(api_key=KEY) as site:
        yield "engine_signatures", _signatures(site)
    with served(while_released="queue", queue_limit=1, hosts="engine.example") as site:
        yield "engine_settings", {"requests are held while memory is released": _held(site), "hosts": _hosts(site)}


def _paths(site: Site) -> list[Any]:
    scenario = site.scenario()
    for line in (
        *("GET /no-such-path", "POST /no-such-path", "GET /release_memory_occupation/", "GET //livez"),
        *("GET /sleep", "PUT /release_memory_occupation", "DELETE /memory_occupation", "PATCH /operations"),
        *("POST /livez", "OPTIONS /sleep", "HEAD /memory_occupation", "HEAD /livez", "HEAD /metrics"),
        *("GET /docs", "GET /redoc", "POST /is_sleeping", "GET /wakeup", "POST /v1/models"),
    ):
        scenario.call(line, whole=line == "GET /no-such-path")
    return scenario.steps


def _bodies(site: Site) -> list[Any]:
    scenario = site.scenario()
    many = "{" + ", ".join(f'"{number}": 1' for number in range(65)) + "}"
    scenario.call(RELEASE, b'{"tags": ["' + b"x" * 70_000 + b'"]}', whole=True)
    scenario.call("POST /flush_cache", b" " * 70_000)
    scenario.call("POST /generate", b'{"text": "' + b"x" * 70_000 + b'"}')
    scenario.call("POST /generate", b'{"input_ids": [' + b"[]," * (1 << 20) + b"[]]}")
    scenario.call(RELEASE, many.encode())
    scenario.call(RELEASE, b'{"tags": ["\\ud800"]}')
    scenario.call(RELEASE, b"\xff\xfe")
    scenario.call(RELEASE, '{"dry_run": true}'.encode("utf-16"))
    scenario.call(RELEASE, {"tags": [1] * 20}, whole=True)
    scenario.call(RELEASE, b'{"timeout_s": NaN}')
    scenario.call(RELEASE, b'{"timeout_s": 1e400}')
    scenario.call(RELEASE, b'{"dry_run": true}', {"Content-Type": "application/x-www-form-urlencoded"})
    scenario.call("POST /release_memory_occupation?mode=%ED%A0%80")
    return scenario.steps


def _pages(site: Site) -> list[Any]:
    scenario = site.scenario()
    headers: tuple[Mapping[str, str], ...] = (
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Origin": "http://site.example"},
        {"Origin": "null"},
        {"Referer": "http://site.example/"},
        {"Purpose": "prefetch"},
        {"Host": "site.example"},
        {"Host": "0.0.0.0"},
        {"User-Agent": "Mozilla/5.0"},
    )
    for each in headers:
        scenario.call("GET /flush_cache", ABSENT, each, whole=each is headers[0])
        scenario.call("GET /memory_status", ABSENT, each)
        scenario.call("GET /livez", ABSENT, each)
    return scenario.steps


def _malformed(site: Site) -> list[Any]:
    """On connections of their own: what the server itself answers."""
    head = b"POST /release_memory_occupation HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    return [
        raw(site.http, sent)
        for sent in (
            b"nonsense\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            head + b"Content-Length: x\r\n\r\n",
            head + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
            b"GET /livez HTTP/1.0\r\n\r\n",
            b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
        )
    ]


def _slow() -> list[Any]:
    before, connection_limits.BODY_S = connection_limits.BODY_S, 0.5
    try:
        with served() as site:
            head = b"POST /release_memory_occupation HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n"
            return [raw(site.http, head + b'{"tags": ')]
    finally:
        connection_limits.BODY_S = before


def _weights_released(site: Site) -> list[Any]:
    scenario = site.scenario({payload(site): "PAYLOAD"})
    body = {"serialized_named_tensors": [payload(site)]}
    scenario.call(RELEASE, {"tags": ["weights"]})
    scenario.call("POST /update_weights_from_disk", {"model_path": "/none"}, whole=True)
    scenario.call("POST /update_weights_from_tensor", body)
    return scenario.steps


def _keys(site: Site) -> dict[str, Any]:
    """Every route without a key, with wrong ones, and with the one that reads."""
    described = site.http.get("/openapi.json").json()["paths"]
    lines = [f"{method.upper()} {path}" for path in described for method in described[path]]
    lines += ["GET /", "GET /dashboard/page.js", "GET /openapi.json", "HEAD /livez"]
    given = {
        "no key": None,
        "a wrong key": {"Authorization": "Bearer wrong"},
        "another scheme": {"Authorization": f"Basic {KEY}"},
        "the key that reads": {"Authorization": f"Bearer {READ_KEY}"},
    }
    found: dict[str, Any] = {}
    with httpx.Client(base_url=site.http.base_url, timeout=600, verify=False) as http:
        for line in sorted(lines):
            method, path = line.replace("{operation_id}", "no-such-id").split()
            found[line] = {name: http.request(method, path, headers=sent).status_code for name, sent in given.items()}
        scenario = Scenario(http)
        for headers in given.values():
            for line in ("POST /sleep", "GET /is_sleeping", "GET /livez", "POST /release_memory"):
                scenario.call(line, ABSENT, headers, whole=line == "POST /sleep")
    return {"statuses": found, "answers": scenario.steps, "then": site.state()}


def _signatures(site: Site) -> list[Any]:
    nonce, stamp = "0123456789abcdef" * 2, str(int(time.time()))
    body = b'{"tags": ["kv_cache"]}'
    head = "\n".join(("trtllm-runtime-control-v1", "POST", "/release_memory", stamp, nonce)).encode()
    none = {"Authorization": ""}
    whole = {
        "x-trtllm-runtime-control-auth": _digest(head + b"\n" + body),
        "x-trtllm-runtime-control-timestamp": stamp,
        "x-trtllm-runtime-control-nonce": nonce,
    }
    old = {"x-trtllm-rl-control-auth": _digest(body)}
    texts = {
        stamp: "STAMP",
        whole["x-trtllm-runtime-control-auth"]: "SIGNATURE",
        old["x-trtllm-rl-control-auth"]: "OLD",
    }
    scenario = site.scenario(texts)
    scenario.call("POST /release_memory", body, {**none, **whole})
    scenario.call("POST /release_memory", body, {**none, **whole}, whole=True)
    scenario.call("POST /resume_memory", body, {**none, **old})
    scenario.call("POST /resume_memory", b"{}", {**none, **old})
    scenario.call("POST /resume_memory?dry_run=1", body, {**none, **old}, whole=True)
    scenario.call("POST /resume_memory", body, {**none, **old, "Idempotency-Key": "1"})
    scenario.call("POST /sleep", body, {**none, **old})
    scenario.call("GET /memory_status", ABSENT, {**none, "x-trtllm-rl-control-auth": _digest(b"")})
    scenario.call("GET /memory_status", ABSENT, {**none, "x-trtllm-rl-control-auth": "sha256=0"})
    return scenario.steps


def _digest(signed: bytes) -> str:
    return "sha256=" + hmac.new(KEY.encode(), signed, hashlib.sha256).hexdigest()


def _held(site: Site) -> list[Any]:
    scenario = site.scenario()
    scenario.call(RELEASE, {"tags": ["kv_cache"]})
    with scenario.during("POST /generate", PROMPT):
        site.engine.wait_until(lambda engine: engine.held)
        scenario.call("POST /generate", PROMPT)
        scenario.call(RESUME)
    return scenario.steps


def _hosts(site: Site) -> list[Any]:
    scenario = site.scenario()
    for host in ("engine.example", "ENGINE.example:80", "other.example"):
        scenario.call("GET /livez", ABSENT, {"Host": host})
        scenario.call("GET /memory_status", ABSENT, {"Host": host})
    return scenario.steps


def _faults(site: Site) -> dict[str, Any]:
    faults: dict[str, Callable[[Scenario], None]] = {
        "a call of the driver fails in a release": _release_fails,
        "a call of the driver fails in a resume": _resume_fails,
        "the device is short of memory": _short,
        "a hibernation fails": _hibernation_fails,
        "the process cannot be hibernated": _cannot_hibernate,
        "a drain takes too long": lambda scenario: _drain_fails(site, scenario),
    }
    found: dict[str, Any] = {}
    for name, provoke in faults.items():
        scenario = site.scenario()
        provoke(scenario)
        found[name] = scenario.steps
    return found


def _release_fails(scenario: Scenario) -> None:
    driver().fail("synchronize")
    found = scenario.call(RELEASE, whole=True).json()["operation_id"]
    scenario.call(f"GET /operations/{found}")
    scenario.call(f"GET /operations/{found}/events", whole=True)
    driver().fail("unmap")
    scenario.call("POST /sleep?level=2")
    driver().fail("copy_to_host")
    scenario.call("POST /release_memory", {"tags": ["model"]})
    driver().fail("copy_to_host", kind="out_of_host_memory")
    scenario.call(RELEASE, whole=True)


def _resume_fails(scenario: Scenario) -> None:
    scenario.call(RELEASE)
    for call in ("map", "copy_to_device"):
        driver().fail(call)
        scenario.call(RESUME, whole=call == "map")
    driver().fail("create")
    scenario.call("POST /wake_up")
    driver().fail("create")
    scenario.call("POST /resume_memory", {"tags": ["model"]})


def _short(scenario: Scenario) -> None:
    scenario.call(RELEASE)
    for line, body in (
        (RESUME, ABSENT),
        (RESUME, {"prepare": True}),
        ("POST /wake_up", ABSENT),
        ("POST /resume_memory", ABSENT),
        (RESUME, {"wait_for_memory_s": 60}),
    ):
        driver().fail("create", kind="out_of_memory")
        scenario.call(line, body, whole=line == RESUME)


def _hibernation_fails(scenario: Scenario) -> None:
    for step in ("lock", "checkpoint"):
        injection.fail_step(step)
        scenario.call(RELEASE, {"hibernate": True}, whole=step == "lock")
    scenario.call("POST /sleep?level=3")
    injection.fail_step("unlock")
    scenario.call("POST /wake_up")


def _cannot_hibernate(scenario: Scenario) -> None:
    """The reasons are put in, as the host driver has none."""
    with put_in(managed_bytes=1, ipc_tensors=1):
        scenario.call(RELEASE, {"hibernate": True}, whole=True)
        scenario.call(RELEASE, {"hibernate": True, "dry_run": True})
        scenario.call(RELEASE, {"hibernate": True, "prepare": True})
        scenario.call("POST /sleep?level=3")


def _drain_fails(site: Site, scenario: Scenario) -> None:
    with generating(site):
        scenario.call(RELEASE, {"timeout_s": 0.01}, whole=True)
        scenario.call("POST /sleep", {"mode": "wait", "timeout_s": 0.01})
        scenario.call("POST /release_memory", {"timeout_s": 0.01})
        scenario.call("POST /release_kv_cache_memory", {"timeout_s": 0.01})
        scenario.call(RELEASE, {"timeout_s": 0.01, "prepare": True})


# -- engines in other surroundings -------------------------------------------------------------------------------------


def disabled(_folder: Path) -> Iterator[tuple[str, Any]]:
    """With MEMSAVER_ENABLED=0."""
    with served() as site:
        scenario = Scenario(site.http)
        for line, body in _everything():
            scenario.call(line, body, whole=line == RELEASE)
        yield "engine_disabled", scenario.steps


def without_room(_folder: Path) -> Iterator[tuple[str, Any]]:
    """With a MEMSAVER_HOST_BACKUP_LIMIT that is less than the weights take."""
    with served() as site:
        scenario = site.scenario()
        for line in (RELEASE, "POST /sleep", "POST /release_memory"):
            scenario.call(line, whole=line == RELEASE)
        scenario.call(RELEASE, {"dry_run": True})
        scenario.call(RELEASE, {"prepare": True})
        scenario.call(RELEASE, {"tags": ["kv_cache"]})
        yield "engine_without_host_memory", scenario.steps


def lost(_folder: Path) -> Iterator[tuple[str, Any]]:
    """After which the process can do nothing any more."""
    with suppress(ContextLostError), served() as site:
        driver().fail("synchronize", kind="context_lost")
        scenario = Scenario(site.http)
        scenario.call(RELEASE, whole=True)
        for line, body in _everything():
            scenario.call(line, body)
        scenario.call("POST /generate", PROMPT)
        scenario.call("GET /operations")
        yield "engine_that_failed", scenario.steps


def _everything() -> list[tuple[str, Any]]:
    return [
        *(
            (line, ABSENT)
            for line in (RELEASE, RESUME, "POST /sleep", "POST /wake_up", "POST /release_kv_cache_memory")
        ),
        *((line, ABSENT) for line in ("POST /release_memory", "POST /resume_memory", "GET /memory_occupation")),
        *((line, {"dry_run": True}) for line in (RELEASE, RESUME)),
        *((line, {"prepare": True}) for line in (RELEASE, RESUME)),
        (RELEASE, {"hibernate": True}),
        (RELEASE, {"tags": ["no_such_tag"]}),
        *((f"GET /{path}", ABSENT) for path in ("livez", "readyz", "is_sleeping", "memory_status", "version")),
        *((f"POST /{path}", ABSENT) for path in ("flush_cache", "pause_generation", "continue_generation")),
    ]
