"""The API key appears in nothing that a caller, a log, a metric or an error shows."""

from __future__ import annotations

import hmac
import inspect
import json
import logging
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence

import httpx
import pytest
from typer.testing import CliRunner

from memsaver_core import ConfigurationError
from memsaver_server import Settings
from memsaver_server.cli import commands
from memsaver_server.cli import serve as command
from memsaver_server.http import request_signing
from tests.programs import run_python
from tests.waiting import wait_until

from .tensor_engine import TensorEngine

KEY = "the-word-nobody-may-read"
WRONG = "a-wrong-word-nobody-may-read"


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Every line that any level of any logger would write, with tracebacks."""
    caplog.set_level(1)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "memsaver", "memsaver.audit", "asyncio"):
        caplog.set_level(1, name)
    formatter = logging.Formatter()
    return lambda: [formatter.format(record) for record in caplog.records]


def answer_of(http: httpx.Client, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> str:
    """The whole answer, except a stream's content."""
    with http.stream(method, path, headers=headers, content=body) as answer:
        if answer.headers["content-type"].startswith("text/event-stream"):
            return str(answer.headers)
        return answer.read().decode() + str(answer.headers)


def test_it_is_in_no_log_line_and_no_answer(
    serve: Callable[..., httpx.Client],
    engine: TensorEngine,
    logged: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is a wrong key that a caller sent, at any log level and however the request ends."""
    http = serve(api_key=KEY)
    described = http.get("/openapi.json").json()["paths"]
    said = [http.get("/openapi.json").text]
    monkeypatch.setattr(engine, "flush_cache", lambda: 1 / 0)  # an unexpected error in one route
    for word in (KEY, WRONG):
        for scheme in ("Bearer", "Basic"):
            for path in described:
                for method in described[path]:
                    headers = {"Authorization": f"{scheme} {word}", "X-Api-Key": word}
                    said.append(answer_of(http, method, path.replace("{operation_id}", "none"), headers))
    assert len(said) > 100
    wait_until(lambda: any("ZeroDivisionError" in line for line in logged()))
    wait_until(lambda: any('"event": "release"' in line for line in logged()))
    lines = logged()
    for text in [*said, *lines]:
        assert KEY not in text
        assert WRONG not in text


def signed(key: str, method: str, path: str, body: bytes) -> Iterator[dict[str, str]]:
    """The headers of a signed call: the two older kinds, the current one, and mistakes that callers may make."""

    def signature(text: bytes) -> str:
        return "sha256=" + hmac.digest(key.encode(), text, "sha256").hex()

    for name in request_signing.BODY_HEADERS:
        yield {name: signature(body)}
        yield {name: key}
        yield {name: f"sha256={key}"}
    timestamp, nonce = str(int(time.time())), uuid.uuid4().hex
    head = f"trtllm-runtime-control-v1\n{method}\n{path}\n{timestamp}\n{nonce}\n".encode()
    dated = {request_signing.TIMESTAMP_HEADER: timestamp, request_signing.NONCE_HEADER: nonce}
    yield {request_signing.BODY_HEADERS[0]: signature(head + body), **dated}
    yield {
        request_signing.BODY_HEADERS[0]: key,
        request_signing.NONCE_HEADER: key,
        request_signing.TIMESTAMP_HEADER: key,
    }


SIGNED = [("POST", "/release_memory"), ("POST", "/resume_memory"), ("GET", "/memory_status")]


def test_what_a_call_is_signed_with_is_nowhere(
    serve: Callable[..., httpx.Client],
    engine: TensorEngine,
    logged: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the key nor a signature, which could be valid for another call; also if the call fails."""
    http = serve(api_key=KEY)
    said, secrets, statuses = [], {KEY, WRONG}, set()
    for broken in (False, True):
        if broken:
            monkeypatch.setattr(engine, "drain", lambda *_: 1 / 0)
        for key in (KEY, WRONG):
            for method, path in SIGNED:
                body = json.dumps({"tags": ["kv_cache"], "other": uuid.uuid4().hex}).encode()
                for headers in signed(key, method, path, body):
                    answer = http.request(method, path, headers=headers, content=body)
                    statuses.add((broken, key == KEY, answer.status_code))
                    said += [answer.text, str(answer.headers)]
                    secrets |= {value.removeprefix("sha256=") for name, value in headers.items() if "auth" in name}
    assert {(False, True, 200), (True, True, 500), (False, True, 401), (False, False, 401)} <= statuses
    assert not {(False, False, 200), (True, False, 500)} & statuses
    wait_until(lambda: sum('"event": "release"' in line for line in logged()) >= 2)
    lines = logged()
    for text in [*said, *lines]:
        assert not any(secret in text for secret in secrets)


def test_no_span_holds_it(
    serve: Callable[..., httpx.Client], engine: TensorEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever header it came, and whether the operation succeeded or failed."""
    trace = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    in_memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = in_memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    http = serve(api_key=KEY)
    own = {"Authorization": f"Bearer {KEY}", "User-Agent": KEY, "Traceparent": KEY}
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        http.post(path, headers={**own, "Idempotency-Key": KEY + path}).raise_for_status()
        http.post(path, headers={"Authorization": f"Bearer {WRONG}"})
    monkeypatch.setattr(engine, "drain", lambda *_: 1 / 0)
    assert http.post("/release_memory_occupation", headers={**own, "Idempotency-Key": WRONG}).status_code == 500
    wait_until(lambda: [span.name for span in exporter.get_finished_spans()].count("memsaver.release") == 2)
    spans = exporter.get_finished_spans()
    assert {"memsaver.release", "memsaver.release.pause", "memsaver.resume"} <= {span.name for span in spans}
    assert any("division by zero" in str(span.status.description) for span in spans)
    for span in spans:
        assert KEY not in span.to_json()
        assert WRONG not in span.to_json()


def said_by(arguments: Sequence[str], key: str, *, option: bool) -> tuple[int, str]:
    """A command's exit code and everything that it prints, its traceback if it crashes."""
    given = [arguments[0], "--api-key", key, *arguments[1:]] if option else list(arguments)
    result = CliRunner().invoke(commands.app, given, env={"MEMSAVER_API_KEY": None if option else key})
    broken = [] if result.exception is None else traceback.format_exception(result.exception)
    return result.exit_code, result.output + "".join(broken)


COMMANDS: list[Sequence[str]] = [
    ("status",),
    ("status", "--json"),
    ("release", "kv_cache"),
    ("resume", "--json"),
    ("release", "no-such-tag"),
    ("watch", "no-such-operation"),
    ("top",),
]
#: Options with which the command ends before any request.
WRONG_COMMANDS: list[Sequence[str]] = [
    ("status", "-v"),
    ("status", "--api-key"),
    ("release", "--at-least", "much"),
    ("status", "--help"),
    ("status", "--url", "http://["),
    ("status", "--url", "no scheme"),
    ("status", "--uds", "/nowhere"),
    ("status", "--url", "http://127.0.0.1:9"),
]
#: Keys that no header can carry; the first comes from files and secrets with a final newline.
UNFIT = [f"{KEY}\n", f"{KEY} ", f"{KEY}\r\nX-Other: 1", f"{KEY}\udcff", f"{KEY}\x01"]


@pytest.mark.parametrize("option", [False, True])
def test_no_command_prints_it(serve: Callable[..., httpx.Client], option: bool) -> None:
    """The right key, a wrong one and invalid ones, from the environment or the option."""
    url = str(serve(api_key=KEY).base_url)
    cases: list[tuple[Sequence[str], str]] = [
        *(((*arguments, "--url", url), KEY) for arguments in COMMANDS),
        *((arguments, KEY) for arguments in WRONG_COMMANDS),
        *((("status", "--url", url, *more), word) for more in ((), ("--json",)) for word in (WRONG, *UNFIT)),
        (("resume", "--url", url), UNFIT[0]),
    ]
    codes = set()
    for arguments, word in cases:
        code, said = said_by(arguments, word, option=option)
        codes.add(code)
        assert KEY not in said
        assert WRONG not in said
    assert {0, 2, 3, 4} <= codes


def test_settings_do_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSAVER_API_KEY", KEY)
    settings = Settings()
    assert settings.api_key is not None
    for text in (repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump())):
        assert KEY not in text
    monkeypatch.setenv("MEMSAVER_HISTORY", "none at all")
    with pytest.raises(ConfigurationError) as refused:
        Settings()
    assert "MEMSAVER_HISTORY" in str(refused.value)
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("name", ["MEMSAVER_API_KEY", "MEMSAVER_READ_KEY"])
@pytest.mark.parametrize("word", [f"{KEY}\x01{KEY}", f"{KEY}\nX-Other: 1", WRONG])
def test_an_unfit_key_is_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, word: str) -> None:
    """One with a control character, and one that does not fit the other, in errors and by ``doctor``."""
    monkeypatch.setenv("MEMSAVER_API_KEY", WRONG)
    monkeypatch.setenv("MEMSAVER_READ_KEY", WRONG)
    monkeypatch.setenv(name, word)
    with pytest.raises(ConfigurationError) as refused:
        Settings()
    for said in (
        str(refused.value),
        *(CliRunner().invoke(commands.app, ["doctor", *more]).output for more in ([], ["--json"])),
    ):
        assert "MEMSAVER_READ_KEY needs" in said if word == WRONG else "the API key contains" in said
        assert KEY not in said
        assert WRONG not in said


def test_serve_does_not_show_an_unfit_key() -> None:
    start = "from memsaver_server.cli import main; main()"
    ran = run_python(start, "serve", "--port", "0", MEMSAVER_API_KEY=f"{KEY}\x01")
    assert ran.returncode == 1
    assert "the API key contains" in ran.stderr
    assert KEY not in ran.stdout + ran.stderr


def test_the_server_takes_it_from_the_environment_alone() -> None:
    """Other users can read a process's arguments. The one with a key in its name is that of a file."""
    names = inspect.signature(command.serve).parameters
    assert [name for name in names if "key" in name or "password" in name] == ["ssl_keyfile"]
