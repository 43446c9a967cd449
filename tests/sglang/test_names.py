"""The names of SGLang that memsaver relies on, in the source of the installed version."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from memsaver_server.integrations.sglang import names


def source(path: str) -> str:
    found = find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "srt" / path).read_text()


def test_names_of_the_scheduler() -> None:
    scheduler = source("managers/scheduler.py")
    for name in names.SCHEDULER:
        assert re.search(rf"\bself\.{name}(: [^=]*)? = |def {name}\(|\) = self\.{name}\b", scheduler), name


def test_names_of_requests() -> None:
    messages = source("managers/io_struct.py")
    for name in names.MESSAGES:
        assert f"class {name}(" in messages, name
