"""``memsaver demo``, as ``make demo`` runs it."""

from __future__ import annotations

from .serving import memsaver


def test_the_demo_ends_by_itself_with_equal_tokens() -> None:
    shown = memsaver("demo")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for word in ("Generate", "Release", "drain", "pause", "Status", "Resume", "restore", "tokens equal"):
        assert word in shown.stdout


def test_an_engine_that_cannot_start_is_said_to() -> None:
    shown = memsaver("demo", "--", "--model", "/nowhere")
    assert shown.returncode == 1
    assert "/nowhere" in shown.stdout
