"""No input from a caller is used as a file name, except in the one call for that."""

from __future__ import annotations

import ctypes
import gc
import os
import struct
import sys
import uuid
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import memsaver_core as ms
from memsaver_core import _native
from tests.amount import amount

#: The one field that is a path: the checkpoint folder of a weight update.
NAMES_A_FILE = ("/update_weights_from_disk", "model_path")
CONTENT = "not for callers"
IN_ALL_EVENTS = 0xFFF

_touched: list[str] | None = None


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _touched is not None and event.split(".")[0] in ("open", "os", "shutil", "subprocess", "ctypes", "tempfile"):
        _touched.extend(str(argument) for argument in arguments)


sys.addaudithook(_note)


@pytest.fixture
def touched() -> Iterator[list[str]]:
    """What the interpreter opens, lists, creates, moves or runs from here on, whether it exists or not."""
    global _touched
    _touched = []
    yield _touched
    _touched = None


class Watch:
    """File system events of folders and their content, from native code and other processes too.

    Only existing files, and files created there, are seen.
    """

    def __init__(self, *folders: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._file >= 0, os.strerror(ctypes.get_errno())
        self._folders: dict[int, Path] = {}
        for folder in folders:
            number = libc.inotify_add_watch(self._file, os.fsencode(folder), IN_ALL_EVENTS)
            assert number >= 0, os.strerror(ctypes.get_errno())
            self._folders[number] = folder
        self._seen: list[str] = []

    def seen(self) -> list[str]:
        """What was opened, read, written, created, moved or removed so far."""
        while True:
            try:
                events = os.read(self._file, 1 << 16)
            except BlockingIOError:
                return self._seen
            while events:
                number, _, _, size = struct.unpack_from("iIII", events)
                name = os.fsdecode(events[16 : 16 + size].rstrip(b"\0"))
                assert number in self._folders, "more happened than the system could tell"
                self._seen.append(str(self._folders[number] / name))
                events = events[16 + size :]

    def close(self) -> None:
        os.close(self._file)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file in a folder, both with names that occur nowhere else."""
    folder = tmp_path / f"mark-{uuid.uuid4().hex}"
    folder.mkdir()
    (folder / "content").write_text(CONTENT)
    return folder / "content"


@pytest.fixture
def watch(secret: Path) -> Iterator[Watch]:
    """Watches the secret, and the folders in which a bare name would be resolved."""
    watch = Watch(secret.parent, Path.cwd(), Path(ms.core_settings().file_dir))
    yield watch
    watch.close()


def bodies(schema: dict[str, Any], word: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """One body per field, with the word wherever the field's type allows it."""
    for name in schema.get("properties", {}):
        for value in (word, [word], {word: "file"}, {word: word}, {"weights": word}, [{"name": word}]):
            yield name, {name: value}
    if "restore" in schema.get("properties", {}):  # so that a file is created
        yield "", {"restore": {"weights": "file", "kv_cache": "file", word: "file"}, "other": word}


@pytest.mark.long
def test_no_request_names_a_file(http: httpx.Client, touched: list[str], secret: Path, watch: Watch) -> None:
    """Each field of each call, in the body and the query, and headers and paths: none of it is opened."""
    mark = secret.parent.name
    touched.clear()
    described = http.get("/openapi.json").json()["paths"]
    sent = 0
    released = 0
    words = (str(secret), f"../../../../../../..{secret}", str(secret.parent))
    operations = [(path, method, each) for path, found in described.items() for method, each in found.items()]
    for turn, (number, (path, method, operation)) in product(range(amount(1, long=3)), enumerate(operations)):
        word = words[(number + turn) % 3]
        schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        named = path.replace("{operation_id}", word).replace("{name}", word)
        headers = {"Idempotency-Key": f"{word}{sent}", "User-Agent": word, "Traceparent": word, "Accept": word}
        for field, body in [("", {}), *bodies(schema, word)]:
            if (path, field) == NAMES_A_FILE:
                continue
            for request in ({"json": body}, {"params": {field: word} if field else {"q": word}}):
                with http.stream(method, named, headers=headers, **request) as answer:
                    if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                        assert CONTENT not in answer.read().decode(errors="replace")
                    released += answer.status_code == 200 and "restore" in body
                sent += 1
        assert [name for name in watch.seen() if mark in name] == [], path
    assert sent > 200
    assert released > 3
    assert [name for name in touched if mark in name] == []


def test_a_tag_that_reads_like_a_path_is_none(http: httpx.Client, secret: Path, watch: Watch) -> None:
    """Its content goes to a file, but not to that one."""
    tag = str(secret)
    with ms.region(tag, restore="file"):
        held = torch.full((1 << 16,), 7, dtype=torch.int64, device=ms.torch_device())
    answer = http.post("/release_memory_occupation", json={"tags": [tag], "restore": {tag: "file"}})
    assert answer.status_code == 200, answer.text
    assert ms.status().host_backup.file_bytes > 0
    http.post("/resume_memory_occupation", json={"tags": [tag]}).raise_for_status()
    assert bool((held == 7).all())
    del held
    gc.collect()
    assert [name for name in watch.seen() if secret.parent.name in name] == []


def test_a_weight_update_names_one(http: httpx.Client, touched: list[str], secret: Path, watch: Watch) -> None:
    """Shows that the tests above would notice."""
    answer = http.post(NAMES_A_FILE[0], json={NAMES_A_FILE[1]: str(secret)})
    assert answer.status_code == 400
    assert str(secret) in touched
    assert str(secret) in watch.seen()


def test_what_native_code_opens_is_seen(secret: Path, watch: Watch) -> None:
    """A backup file has no name, but its creation in the folder is visible."""
    saver = _native.Saver(
        driver="host",
        host_devices=[f"mark-{uuid.uuid4()}"],
        host_capacity=1 << 20,
        file_folder=str(secret.parent),
    )
    address = saver.allocate(0, "weights", "file", 4096)
    assert [name for name in watch.seen() if secret.parent.name in name] == []
    saver.release([], [], {})
    assert [name for name in watch.seen() if secret.parent.name in name] != []
    saver.resume([])
    saver.free(address)
