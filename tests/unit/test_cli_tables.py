"""The service's answers as tables: what a reader of a terminal sees."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.console import Console, RenderableType

from memsaver_core.contract.reports import TagReport
from memsaver_core.contract.status import OccupationAnswer, RankStatus
from memsaver_server.cli.tables import operation_backups_table, ranks_table, said, status_view

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


def changed(status: OccupationAnswer, **changes: object) -> OccupationAnswer:
    """The status with another first tag, which is not checked."""
    first, *others = status.tags
    return status.model_copy(update={"tags": (first.model_copy(update=changes), *others)})


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
    text = printed(status_view(changed(occupation("weights"), tag=tag)))
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


def test_the_version_of_the_weights_is_shown() -> None:
    assert "weights of version step-1" in printed(status_view(occupation("weights", weights_version="step-1")))


def test_a_reason_is_printed_as_text() -> None:
    text = printed(status_view(occupation("weights", admission={"open": False, "reason": "[bold]lost[/] \x1b[2J"})))
    assert "closed because [bold]lost[/] \\x1b[2J" in text


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ('lease_s needs "prepare": true', "--lease needs --prepare"),
        ('Release with {"verify": "token"}, or', "Release with --verify token, or"),
        ('"communicators": "keep" contradicts', "--communicators keep contradicts"),
        ("a longer timeout_s, or wait", "a longer --timeout, or wait"),
        ("field 'selector' has no effect", "--name/--model/--label/--host/--gpu has no effect"),
    ],
)
def test_options_take_the_place_of_fields(message: str, shown: str) -> None:
    assert said(message).plain == shown


@pytest.mark.parametrize(
    "message",
    ["unknown tag 'wait'; there are 'kv_cache', 'tokens'", "8 MiB of kv_cache, cuda_graph", "wait for its mode"],
)
def test_what_is_no_field_stays(message: str) -> None:
    assert said(message).plain == message


def test_ranks_have_their_place() -> None:
    ranks = [
        {"rank": 0, "pid": 71, "alive": True, "state": "resident"},
        {"rank": 1, "pid": 72, "alive": False, "state": "released"},
        {"rank": 2, "pid": None, "alive": None, "state": "released"},
        {"rank": 3, "pid": 74, "alive": True, "state": "resident", "stopped": True},
    ]
    lines = printed(ranks_table(map(RankStatus.model_validate, ranks))).splitlines()
    assert [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in lines[2:]] == [
        ["0", "71", "resident"],
        ["1", "72", "dead"],
        ["2", "elsewhere", "released"],
        ["3", "74", "stopped"],
    ]


def test_backups_have_their_content_what_is_kept_and_the_ratio() -> None:
    """By tag; a tag without a backup has no row."""
    status = occupation("weights", "kv_cache")
    text = printed(status_view(changed(status, backed_up_bytes=200 * MIB, kept_bytes=142 * MIB)))
    assert re.search(r"backup of.+content.+kept.+ratio", text)
    assert re.search(r"^weights +200 MiB +142 MiB +71 %", text, re.MULTILINE)
    assert text.count("kv_cache") == 1


def test_a_release_tells_what_it_copied_kept_and_found() -> None:
    """By tag; one that keeps no content has no row."""
    sizes = {"bytes": MIB, "released_bytes": MIB, "resumed_bytes": 0, "unchanged_bytes": 0, "zero_bytes": 0}
    none = {"restore": "host", "state": "released", "backed_up_bytes": 0, "restored_bytes": 0, "already": False}
    tags = [
        TagReport.model_validate({**sizes, **none, **tag})
        for tag in (
            {"tag": "weights", "backed_up_bytes": 100 * MIB, "kept_bytes": 70 * MIB, "unchanged_bytes": 8 * MIB},
            {"tag": "experts", "shared_bytes": 30 * MIB},
            {"tag": "kv_cache"},
        )
    ]
    table = operation_backups_table(tags)
    assert table is not None
    rows = [re.sub(r"\x1b\[[\d;]*m", "", line).split() for line in printed(table).splitlines()]
    assert rows[0] == ["backup", "of", "copied", "kept", "ratio", "unchanged", "shared"]
    assert rows[2:] == [
        ["weights", "100", "MiB", "70", "MiB", "70", "%", "8", "MiB", "0"],
        ["experts", "0", "0", "0", "30", "MiB"],
    ]
    assert operation_backups_table(tags[2:]) is None


def test_communicators_have_what_can_be_suspended_and_what_stays() -> None:
    """All ranks of one in one row; why one cannot be suspended is said in words."""
    one = {"name": "tp", "ranks": 2, "suspended": False, "suspended_bytes": 0, "obstacle": ""}
    held = {"suspendable_bytes": 480 * MIB, "persistent_bytes": 4 * MIB}
    old = {"name": "ep", "ranks": 2, "rank": 0, "suspended": False, "suspendable_bytes": 0, "suspended_bytes": 0}
    told = [
        {**one, **held, "rank": 0},
        {**one, **held, "rank": 1},
        {**old, "persistent_bytes": 0, "obstacle": "NCCL 2.28.9 [cannot] suspend it; install NCCL 2.29.7 or later"},
    ]
    shared = ["MSCCL++ of sglang's group tp:0 is in use; leave out --enable-mscclpp"]
    text = printed(status_view(occupation("weights", communicators=told, shared_by_ranks=shared)))
    assert f"stays: {shared[0]}" in text
    assert re.search(r"^tp +2 +960 MiB .*0.* +8 MiB", text, re.MULTILINE)
    assert "ep stays: NCCL 2.28.9 [cannot] suspend it; install NCCL 2.29.7 or later" in text


def test_host_memory_that_is_kept_or_shared_is_told() -> None:
    store = {"name": "fleet", "processes": 2, "held_bytes": 64 * MIB, "share_bytes": 32 * MIB}
    store |= {"used_bytes": 64 * MIB, "total_bytes": 128 * MIB, "limit_bytes": 256 * MIB}
    backup = {"bytes": 0, "capacity_bytes": 96 * MIB, "limit_bytes": 512 * MIB, "file_bytes": 0, "prepared": True}
    text = printed(
        status_view(occupation("w", host_backup={**backup, "unused_bytes": 96 * MIB, "shared_store": store}))
    )
    assert "96 MiB of memory ready of at most 512 MiB, 96 MiB of it for the next release" in text
    assert "shared store fleet, processes: 2; 64 MiB held here, a share of 32 MiB; 64 MiB in use by any" in text
    assert "128 MiB of memory of at most 256 MiB" in text
