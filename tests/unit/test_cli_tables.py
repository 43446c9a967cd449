"""The service's answers as tables: what a reader of a terminal sees."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console, RenderableType

from memsaver_server.cli.tables import ranks_table, status_view
from memsaver_server.schemas import OccupationAnswer

MIB = 1 << 20


def printed(view: RenderableType, width: int = 160) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, no_color=True, highlight=False).print(view)
    return file.getvalue()


def occupation(*tags: str, sources: list[tuple[str, str, int]] | None = None, **changes: Any) -> OccupationAnswer:
    """A status with ``tags`` of 1 MiB each, on one device whose memory ``sources`` hold."""
    held = {"bytes": MIB, "resident_bytes": MIB, "released_bytes": 0, "retained_bytes": 0, "backed_up_bytes": 0}
    consumers = [{"kind": kind, "name": name, "bytes": size * MIB} for kind, name, size in sources or ()]
    used = sum(size * MIB for _, _, size in sources or ())
    device = {"index": 0, "uuid": "", "name": "a device", "total_bytes": 512 * MIB, "used_bytes": used}
    return OccupationAnswer.model_validate(
        {
            "enabled": True,
            "driver": "cuda",
            "state": "resident",
            "hibernated": False,
            "engine": "an engine",
            "admission": {"open": True, "reason": ""},
            "operation_id": None,
            "ranks": [],
            "tags": [
                {"tag": tag, "restore": "host", "state": "resident", "allocations": 1, "chunks": 1, **held}
                for tag in tags
            ],
            "devices": [{**device, "free_bytes": 0, "process_bytes": used, "sources": consumers}],
            "host_backup": {
                "bytes": 0,
                "capacity_bytes": 0,
                "limit_bytes": 0,
                "file_bytes": 0,
                "prepared": True,
            },
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("tag", "shown"),
    [
        ("[red]loud[/red]", "[red]loud[/red]"),
        ("[/]", "[/]"),
        ("back\\[slash]", "back\\[slash]"),
        ("bell\x07 \x1b[2Jclear\x9b1m", "bell\\x07 \\x1b[2Jclear\\x9b1m"),
        ("half\ud800", "half\\ud800"),
    ],
)
def test_a_tag_is_printed_as_text(tag: str, shown: str) -> None:
    status = occupation("weights").model_copy()
    status.tags[0].tag = tag
    text = printed(status_view(status))
    assert shown in text
    assert not set("\x07\x9b") & set(text)
    assert "\x1b[2J" not in text


def test_a_long_tag_leaves_the_figures_readable() -> None:
    line = next(line for line in printed(status_view(occupation("x" * 256)), 100).splitlines() if "xxx" in line)
    assert "resident" in line
    assert line.count("1 MiB") == 2


def test_what_the_process_holds_beside_its_tags_has_names() -> None:
    sources = [("tag", "weights", 64), ("tag", "kv_cache", 8), ("torch", "torch outside regions", 20)]
    text = printed(status_view(occupation("weights", sources=[*sources, ("process", "context and modules", 16)])))
    assert re.search(r"^tags +72 MiB", text, re.MULTILINE)
    assert re.search(r"^torch outside regions +20 MiB", text, re.MULTILINE)
    assert re.search(r"^context and modules +16 MiB", text, re.MULTILINE)


def test_a_reason_is_printed_as_text() -> None:
    text = printed(status_view(occupation("weights", admission={"open": False, "reason": "[bold]lost[/] \x1b[2J"})))
    assert "closed because [bold]lost[/] \\x1b[2J" in text


def test_ranks_have_their_place() -> None:
    ranks = [
        {"rank": 0, "pid": 71, "alive": True, "state": "resident"},
        {"rank": 1, "pid": 72, "alive": False, "state": "released"},
        {"rank": 2, "pid": None, "alive": None, "state": "released"},
    ]
    lines = printed(ranks_table(ranks)).splitlines()
    assert [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in lines[2:]] == [
        ["0", "71", "resident"],
        ["1", "72", "dead"],
        ["2", "elsewhere", "released"],
    ]
