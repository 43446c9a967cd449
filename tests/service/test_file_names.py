"""What a caller says becomes no file's name, but in the one call that is there for it."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

#: The field whose job it is: the checkpoint folder of a weight update.
NAMES_A_FILE = ("/update_weights_from_disk", "model_path")

_touched: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _touched is not None and event.split(".")[0] in ("open", "os", "shutil", "subprocess", "ctypes", "tempfile"):
        _touched.extend(str(argument) for argument in arguments)


sys.addaudithook(_note)


@pytest.fixture
def touched() -> Iterator[list[str]]:
    """What this process opens, lists, makes, moves or runs from here on."""
    global _touched
    _touched = []
    yield _touched
    _touched = None


def bodies(schema: dict[str, Any], word: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A body for each field, with the word wherever the field's type lets it be."""
    for name in schema.get("properties", {}):
        for value in (word, [word], {word: "host"}, {word: word}, {"weights": word}, [{"name": word}]):
            yield name, {name: value}


def test_no_request_names_a_file(http: httpx.Client, touched: list[str], tmp_path: Path) -> None:
    """Every field of every call in turn, in the body and in the query, and headers and paths: none of it is opened."""
    mark = f"mark-{uuid.uuid4().hex}"
    secret = tmp_path / mark
    secret.write_text("not for callers")
    touched.clear()
    described = http.get("/openapi.json").json()["paths"]
    sent = 0
    for word in (str(secret), f"../../../../../../..{secret}"):
        for path, operations in described.items():
            for method, operation in operations.items():
                schema = (
                    operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
                )
                named = path.replace("{operation_id}", word).replace("{name}", word)
                headers = {"Idempotency-Key": word, "User-Agent": word, "Traceparent": word, "Accept": word}
                for field, body in [("", {}), *bodies(schema, word)]:
                    if (path, field) == NAMES_A_FILE:
                        continue
                    for request in ({"json": body}, {"params": {field: word} if field else {"q": word}}):
                        with http.stream(method, named, headers=headers, **request) as answer:
                            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                                assert "not for callers" not in answer.read().decode(errors="replace")
                        sent += 1
    assert sent > 200
    assert [name for name in touched if mark in name] == []


def test_a_weight_update_names_one(http: httpx.Client, touched: list[str]) -> None:
    """So that the test above would see it."""
    mark = f"/nowhere/mark-{uuid.uuid4().hex}"
    answer = http.post(NAMES_A_FILE[0], json={NAMES_A_FILE[1]: mark})
    assert answer.status_code == 400
    assert any(mark in name for name in touched)
