"""Which weights ``memsaver store drop`` and ``pin`` mean."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from memsaver_core import manifests
from memsaver_server.cli.commands import app

KEPT = {"abc1": "alpha", "abd2": "beta", "ffff": "abd2", "e1": "/a/gamma", "e2": "/b/gamma", "e3": "Org/delta"}


@pytest.mark.parametrize(
    ("which", "marked"),
    [
        ("beta", ["abd2"]),
        ("abc", ["abc1"]),
        ("abd2", ["ffff"]),  # a model's name first
        ("ab", "'ab' could be abc1, abd2"),
        ("/a/gamma", ["e1"]),
        ("delta", ["e3"]),  # as an engine's status calls it
        ("gamma", "'gamma' could be /a/gamma, /b/gamma"),
        ("", "no weights ''"),
    ],
)
@pytest.mark.parametrize("command", ["drop", "pin"])
def test_one_is_meant(monkeypatch: pytest.MonkeyPatch, command: str, which: str, marked: list[str] | str) -> None:
    seen: list[str] = []
    about = [{"id": each, "model": model} for each, model in KEPT.items()]
    store = SimpleNamespace(mark_text=lambda each, _: not seen.append(each))
    monkeypatch.setattr(manifests, "SharedStore", lambda _: store)
    monkeypatch.setattr(manifests, "kept_in", lambda _: [SimpleNamespace(description=lambda it=it: it) for it in about])
    ran = CliRunner().invoke(app, ["store", command, "some", which])
    if isinstance(marked, list):
        assert (ran.exit_code, seen) == (0, marked)
    else:
        assert (ran.exit_code, seen) == (2, [])
        assert marked in ran.output
