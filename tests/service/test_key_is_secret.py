"""The key: what a caller, a log, a metric or an error shows of it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable

import httpx
import pytest
from pydantic import ValidationError

from memsaver_server import Settings
from memsaver_server.cli import serve as command

from .tensor_engine import TensorEngine

KEY = "the-word-nobody-may-read"
WRONG = "a-wrong-word-nobody-may-read"


def test_it_is_in_no_log_line_and_no_answer(
    serve: Callable[..., httpx.Client],
    engine: TensorEngine,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor is a wrong one that somebody sent, whatever the level of the logs and however a request ends."""
    caplog.set_level(1)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access", "memsaver", "memsaver.audit", "asyncio"):
        caplog.set_level(1, name)
    http = serve(api_key=KEY)
    described = http.get("/openapi.json").json()["paths"]
    said = [http.get("/openapi.json").text]
    monkeypatch.setattr(engine, "flush_cache", lambda: 1 / 0)  # one route fails in a way that nobody foresaw
    for word in (KEY, WRONG):
        for scheme in ("Bearer", "Basic"):
            for path in described:
                for method in described[path]:
                    headers = {"Authorization": f"{scheme} {word}", "X-Api-Key": word}
                    with http.stream(method, path.replace("{operation_id}", "none"), headers=headers) as answer:
                        if not answer.headers["content-type"].startswith("text/event-stream"):
                            said.append(answer.read().decode())
                        said.append(str(answer.headers))
    assert len(said) > 100
    assert len(caplog.records) > 0
    formatter = logging.Formatter()  # tracebacks, too
    logged = [formatter.format(record) for record in caplog.records]
    assert any("ZeroDivisionError" in line for line in logged)
    assert any('"event": "release"' in line for line in logged)
    for text in [*said, *logged]:
        assert KEY not in text
        assert WRONG not in text


def test_settings_do_not_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMSAVER_API_KEY", KEY)
    settings = Settings()
    assert settings.api_key is not None
    for text in (repr(settings), str(settings), settings.model_dump_json(), str(settings.model_dump())):
        assert KEY not in text
    monkeypatch.setenv("MEMSAVER_HISTORY", "none at all")
    with pytest.raises(ValidationError) as refused:
        Settings()
    assert "history" in str(refused.value)
    assert KEY not in str(refused.value)


def test_the_server_takes_it_from_the_environment_alone() -> None:
    """Whoever lists processes reads their arguments."""
    assert not any("key" in name for name in inspect.signature(command.serve).parameters)
