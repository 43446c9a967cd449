"""The service's answers as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memsaver_server.cli.units import format_bytes, format_delta, format_seconds

if TYPE_CHECKING:
    from memsaver_server.backup_schemas import HostBackupAnswer, SharedStoreAnswer
    from memsaver_server.schemas import (
        DeviceAnswer,
        MeteredDeviceAnswer,
        OccupationAnswer,
        OccupiedDeviceAnswer,
        OperationAnswer,
        PhaseAnswer,
        ProgressAnswer,
        TagAnswer,
        TagStatusAnswer,
    )

_STATE_STYLES = {
    "resident": "green",
    "released": "cyan",
    "hibernated": "cyan",
    "releasing": "yellow",
    "resuming": "yellow",
    "mixed": "yellow",
    "failed": "bold red",
    "dead": "bold red",
    "stopped": "bold red",
}

#: Width of names, which callers choose, so that a long one leaves room for the figures.
_NAME_WIDTH = 40
#: Width if the output is a pipe, in which rows must not be folded.
_PIPE_WIDTH = 160


def make_console(*, stderr: bool = False) -> Console:
    """Return a console with colours only on a terminal; respects NO_COLOR."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)


def plain(text: str) -> Text:
    """Return ``text`` as it is: without markup, and without characters that a terminal obeys or cannot show."""
    seen = (each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text)
    return Text("".join(seen))


def progress_line(progress: ProgressAnswer) -> str:
    left = f", {format_seconds(progress.seconds_left)} left" if progress.seconds_left is not None else ""
    done, total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
    return f"{done} of {total}, {progress.gb_per_s:.1f} GB/s{left}"


def state_text(state: str) -> Text:
    return Text(state, style=_STATE_STYLES.get(state, ""))


def _delta_text(count: int) -> Text:
    return Text(format_delta(count), style="green" if count < 0 else "yellow" if count > 0 else "dim")


def _size_text(count: int) -> Text:
    return Text(format_bytes(count), style="dim" if count == 0 else "")


def _table(columns: Sequence[str], *, right_from: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        width = None if number else _NAME_WIDTH
        table.add_column(column, justify="right" if number >= right_from else "left", no_wrap=True, max_width=width)
    return table


def operation_tags_table(tags: Iterable[TagAnswer], operation: str) -> Table:
    """Return one row per tag: what the release or resume did to it."""
    released = operation == "release"
    table = _table(["tag", "state", "restore", "size", "released" if released else "resumed"], right_from=3)
    for tag in tags:
        state = Text.assemble(state_text(tag.state), (" already", "dim") if tag.already else "")
        moved = tag.released_bytes if released else tag.resumed_bytes
        table.add_row(plain(tag.tag), state, tag.restore, _size_text(tag.bytes), _size_text(moved))
    return table


def operation_backups_table(tags: Sequence[TagAnswer]) -> Table | None:
    """Return one row per tag whose content a release kept: what it copied, what that takes and the ratio of the two,
    what was unchanged, and what the shared store had. None if there is no such tag."""
    rows = [tag for tag in tags if tag.backed_up_bytes or tag.unchanged_bytes or tag.shared_bytes]
    shared = ["shared"] if any(tag.shared_bytes for tag in rows) else []
    table = _table(["backup of", "copied", "kept", "ratio", "unchanged", *shared], right_from=1)
    for tag in rows:
        found = [tag.unchanged_bytes, *([tag.shared_bytes] if shared else [])]
        table.add_row(plain(tag.tag), *_kept_cells(tag), *map(_size_text, found))
    return table if rows else None


def _kept_cells(tag: TagAnswer | TagStatusAnswer) -> tuple[Text, Text, str]:
    content, kept = tag.backed_up_bytes, tag.kept_bytes
    return _size_text(content), _size_text(kept), f"{100 * kept / content:.0f} %" if content else ""


def phases_table(phases: Sequence[PhaseAnswer], devices: Sequence[MeteredDeviceAnswer], seconds: float) -> Table:
    """Return one row per phase with device memory: before, after and delta for one device, deltas for several."""
    one = len(devices) == 1
    names = ["before", "after", "delta"] if one else [f"device {device.index}" for device in devices]
    copies = ["copied"] if any(phase.details.get("copied_bytes") for phase in phases) else []
    table = _table(["phase", "time", *names, *copies], right_from=1)
    for phase in phases:
        cells = _device_cells(phase.devices, devices, one)
        copied = [_copied_text(phase)] if copies else []
        table.add_row(phase.name, format_seconds(phase.seconds), *cells, *copied)
    if phases:
        table.add_section()
    table.add_row("in all", format_seconds(seconds), *_device_cells(devices, devices, one), style="bold")
    return table


def _copied_text(phase: PhaseAnswer) -> Text:
    copied = int(phase.details.get("copied_bytes", 0))
    if not copied:
        return Text("")
    rate = phase.details.get("gigabytes_per_second")
    return Text(format_bytes(copied) + (f" at {rate:.1f} GB/s" if rate else ""), style="dim")


def _device_cells(readings: Sequence[DeviceAnswer], devices: Sequence[MeteredDeviceAnswer], one: bool) -> list[Text]:
    by_index = {reading.index: reading for reading in readings}
    cells: list[Text] = []
    for device in devices:
        reading = by_index.get(device.index)
        if reading is None:
            cells += [Text("")] * (3 if one else 1)
            continue
        if one:
            cells += [Text(format_bytes(reading.used_before_bytes)), Text(format_bytes(reading.used_after_bytes))]
        cells.append(_delta_text(reading.delta_bytes))
    return cells


def operation_view(result: OperationAnswer) -> RenderableType:
    """Return the whole answer of a release or a resume."""
    mark = Text("✓ " if result.success else "✗ ", style="green" if result.success else "red")
    parts: list[RenderableType] = [Text.assemble(mark, plain(result.message))]
    if result.tags:
        parts += ["", operation_tags_table(result.tags, result.operation)]
        if (backups := operation_backups_table(result.tags)) is not None:
            parts += ["", backups]
    if result.devices:
        parts += ["", phases_table(result.phases, result.devices, result.seconds), _devices_caption(result.devices)]
    return Group(*parts, "")


def _devices_caption(devices: Sequence[MeteredDeviceAnswer]) -> Text:
    names = {device.name for device in devices if device.name}
    what = f"{len(devices)} x {names.pop()}" if len(devices) > 1 and len(names) == 1 else ", ".join(sorted(names))
    return Text.assemble(plain(f"in use by all processes on {what or 'the device'}"), style="dim")


def status_view(occupation: OccupationAnswer) -> RenderableType:
    """Return what the engine holds now."""
    admission = occupation.admission
    opened = Text("open", style="green") if admission.open else Text("closed", style="yellow")
    state = "hibernated" if occupation.hibernated and occupation.state == "released" else occupation.state
    head = Text.assemble("state ", state_text(state), "   admission ", opened)
    model = plain(f", model {name}" if (name := getattr(occupation, "model", "")) else "")
    head.append_text(
        Text.assemble("   engine ", plain(occupation.engine), model, f", driver {occupation.driver}", style="dim")
    )
    parts: list[RenderableType] = [head]
    if not occupation.enabled:
        parts.append(Text("the saver is disabled: release and resume change nothing", style="yellow"))
    if admission.reason:
        parts.append(Text.assemble("closed because ", plain(admission.reason), style="dim"))
    if occupation.tags:
        parts += ["", status_tags_table(occupation.tags)]
    if occupation.devices:
        parts += ["", devices_table(occupation.devices), "", holders_table(occupation.devices)]
    if occupation.communicators:
        parts += ["", communicators_table(occupation.communicators), *_obstacles(occupation.communicators)]
    parts += [Text.assemble(plain(f"stays: {each}"), style="yellow") for each in occupation.shared_by_ranks]
    if len(occupation.ranks) > 1:
        parts += ["", ranks_table(occupation.ranks)]
    if any(tag.backed_up_bytes for tag in occupation.tags):
        parts += ["", backups_table(occupation.tags)]
    backup = occupation.host_backup
    if backup.bytes or backup.capacity_bytes:
        parts += ["", Text(_backup_line(backup), style="dim")]
    if (store := backup.shared_store) is not None:
        parts += ["", Text.assemble(plain(_store_line(store)), style="dim")]
    return Group(*parts)


def _backup_line(backup: HostBackupAnswer) -> str:
    line = f"host backup: {format_bytes(backup.bytes)} kept, {format_bytes(backup.capacity_bytes)} of memory ready"
    line += f" of at most {format_bytes(backup.limit_bytes)}" if backup.limit_bytes else ""
    line += f", {format_bytes(backup.unused_bytes)} of it for the next release" if backup.unused_bytes else ""
    return line + (f", {format_bytes(backup.file_bytes)} in files" if backup.file_bytes else "")


def _store_line(store: SharedStoreAnswer) -> str:
    held, share, used = map(format_bytes, (store.held_bytes, store.share_bytes, store.used_bytes))
    size, limit = map(format_bytes, (store.total_bytes, store.limit_bytes))
    return (
        f"shared store {store.name}, processes: {store.processes}; {held} held here, a share of {share}; "
        f"{used} in use by any, {size} of memory of at most {limit}"
    )


def status_tags_table(tags: Sequence[TagStatusAnswer]) -> Table:
    table = _table(["tag", "state", "restore", "size", "on device", "released"], right_from=3)
    for tag in tags:
        lost = (", content lost", "bold red") if getattr(tag, "content", "ok") == "lost" else ""
        state = Text.assemble(state_text(tag.state), lost)
        table.add_row(plain(tag.tag), state, tag.restore, *map(_size_text, _tag_sizes(tag)))
    if len(tags) > 1:
        table.add_section()
        totals = (sum(sizes) for sizes in zip(*map(_tag_sizes, tags), strict=True))
        table.add_row("in all", "", "", *map(format_bytes, totals), style="bold")
    return table


def _tag_sizes(tag: TagStatusAnswer) -> tuple[int, ...]:
    return tag.bytes, tag.resident_bytes, tag.released_bytes


def backups_table(tags: Iterable[TagStatusAnswer]) -> Table:
    """Return one row per tag with a backup: its content, what is kept for it, and the ratio of the two."""
    table = _table(["backup of", "content", "kept", "ratio"], right_from=1)
    for tag in tags:
        if tag.backed_up_bytes:
            table.add_row(plain(tag.tag), *_kept_cells(tag))
    return table


def devices_table(devices: Sequence[OccupiedDeviceAnswer]) -> Table:
    table = _table(["device", "name", "total", "in use", "this process", "free"], right_from=2)
    for device in devices:
        total, used, free = map(format_bytes, (device.total_bytes, device.used_bytes, device.free_bytes))
        own = "unknown" if device.process_bytes is None else format_bytes(device.process_bytes)
        table.add_row(str(device.index), plain(device.name), total, used, own, free)
    return table


def holders_table(devices: Sequence[OccupiedDeviceAnswer]) -> Table:
    """Return one row per consumer of device memory: the tags together, what this process holds beside them, others."""
    table = _table(["in use by", *(f"device {device.index}" for device in devices)], right_from=1)
    held: dict[str, list[int]] = {"tags": [0] * len(devices)}
    for number, device in enumerate(devices):
        for source in device.sources:
            name = "tags" if source.kind == "tag" else source.name
            held.setdefault(name, [0] * len(devices))[number] += source.bytes
    for name, sizes in held.items():
        if name == "tags" or any(sizes):
            table.add_row(plain(name), *map(_size_text, sizes))
    return table


def communicators_table(communicators: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row per NCCL communicator, of all its ranks here; ``communicators`` as in ``OccupationAnswer``."""
    table = _table(["communicator", "ranks", "can be suspended", "suspended", "stays"], right_from=1)
    fields = ("suspendable_bytes", "suspended_bytes", "persistent_bytes")
    for name in dict.fromkeys(each["name"] for each in communicators):
        same = [each for each in communicators if each["name"] == name]
        sizes = (sum(each[field] for each in same) for field in fields)
        table.add_row(plain(name), str(same[0]["ranks"]), *map(_size_text, sizes))
    return table


def _obstacles(communicators: Sequence[Mapping[str, Any]]) -> list[Text]:
    """Return why communicators cannot be suspended, and what to do."""
    told = dict.fromkeys((each["name"], each["obstacle"]) for each in communicators if each["obstacle"])
    return [Text.assemble(plain(f"{name} stays: {obstacle}"), style="yellow") for name, obstacle in told]


def ranks_table(ranks: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row per process of the engine; ``ranks`` as in ``OccupationAnswer``."""
    table = _table(["rank", "process", "state"], right_from=3)
    for rank in ranks:
        state = "dead" if rank["alive"] is False else "stopped" if rank.get("stopped") else rank["state"]
        table.add_row(str(rank["rank"]), "elsewhere" if rank["pid"] is None else str(rank["pid"]), state_text(state))
    return table
