"""The service's answers as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from memsaver_server.cli.units import format_bytes, format_delta, format_rate, format_seconds
from memsaver_server.schemas import (
    DeviceAnswer,
    MeteredDeviceAnswer,
    OccupationAnswer,
    OccupiedDeviceAnswer,
    OperationAnswer,
    PhaseAnswer,
    TagAnswer,
    TagStatusAnswer,
)

_STATE_STYLES = {
    "resident": "green",
    "released": "cyan",
    "releasing": "yellow",
    "resuming": "yellow",
    "mixed": "yellow",
    "failed": "bold red",
}

#: A pipe has no width of its own; rows must not be folded there.
_PIPE_WIDTH = 160


def make_console(*, stderr: bool = False) -> Console:
    """Return a console that has colours on a terminal only (and NO_COLOR is respected)."""
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)


def state_text(state: str) -> Text:
    return Text(state, style=_STATE_STYLES.get(state, ""))


def _delta_text(count: int) -> Text:
    return Text(format_delta(count), style="green" if count < 0 else "yellow" if count > 0 else "dim")


def _size_text(count: int) -> Text:
    return Text(format_bytes(count), style="dim" if count == 0 else "")


def _table(columns: Sequence[str], *, right_from: int, footer: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", footer_style="bold", show_footer=footer, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number >= right_from else "left", no_wrap=True)
    return table


def operation_tags_table(tags: Iterable[TagAnswer], operation: str) -> Table:
    """One row per tag: what the release or resume did to it."""
    released = operation == "release"
    did = ["released", "backed up", "unchanged"] if released else ["resumed"]
    table = _table(["tag", "state", "restore", "size", *did, ""], right_from=3)
    for tag in tags:
        sizes = [tag.released_bytes, tag.backed_up_bytes, tag.unchanged_bytes] if released else [tag.resumed_bytes]
        note = Text("already so" if tag.already else "", style="dim")
        table.add_row(tag.tag, state_text(tag.state), tag.restore, _size_text(tag.bytes), *map(_size_text, sizes), note)
    return table


def phases_table(phases: Sequence[PhaseAnswer], devices: Sequence[MeteredDeviceAnswer], seconds: float) -> Table:
    """One row per phase with each device's memory: before, after and delta for one device, deltas for several."""
    one = len(devices) == 1
    names = ["before", "after", "delta"] if one else [f"device {device.index}" for device in devices]
    table = _table(["phase", "time", *names], right_from=1)
    for phase in phases:
        table.add_row(phase.name, format_seconds(phase.seconds), *_device_cells(phase.devices, devices, one))
    if phases:
        table.add_section()
    table.add_row("in all", format_seconds(seconds), *_device_cells(devices, devices, one), style="bold")
    return table


def _device_cells(readings: Sequence[DeviceAnswer], devices: Sequence[MeteredDeviceAnswer], one: bool) -> list[Text]:
    by_index = {reading.index: reading for reading in readings}
    cells: list[Text] = []
    for device in devices:
        reading = by_index.get(device.index)
        if reading is None:
            cells.extend([Text("")] * (3 if one else 1))
        elif one:
            cells.append(Text(format_bytes(reading.used_before_bytes)))
            cells.append(Text(format_bytes(reading.used_after_bytes)))
            cells.append(_delta_text(reading.delta_bytes))
        else:
            cells.append(_delta_text(reading.delta_bytes))
    return cells


def operation_view(result: OperationAnswer) -> RenderableType:
    """The whole answer of a release or a resume."""
    mark = Text("✓ " if result.success else "✗ ", style="green" if result.success else "red")
    moved = result.released_bytes or result.resumed_bytes
    rate = format_rate(moved, result.seconds)
    head = Text.assemble(mark, result.message, (f"  {rate}" if rate and result.seconds >= 0.05 else "", "dim"))
    parts: list[RenderableType] = [head]
    if result.tags:
        parts.append(operation_tags_table(result.tags, result.operation))
    if result.devices:
        parts.append(_devices_caption(result.devices))
        parts.append(phases_table(result.phases, result.devices, result.seconds))
    return Group(*parts)


def _devices_caption(devices: Sequence[MeteredDeviceAnswer]) -> Text:
    names = {device.name for device in devices if device.name}
    what = f"{len(devices)} x {names.pop()}" if len(devices) > 1 and len(names) == 1 else ", ".join(sorted(names))
    return Text(f"device memory, all processes: {what}" if what else "device memory, all processes", style="dim")


def status_view(occupation: OccupationAnswer) -> RenderableType:
    """What the engine holds now."""
    head = Text.assemble(("state ", "dim"), state_text(occupation.state))
    admission = occupation.admission
    head.append("   admission ", style="dim")
    head.append("open" if admission.open else "closed", style="green" if admission.open else "yellow")
    if admission.reason:
        head.append(f" ({admission.reason})", style="dim")
    head.append(f"   engine {occupation.engine}, driver {occupation.driver}", style="dim")
    parts: list[RenderableType] = [head]
    if not occupation.enabled:
        parts.append(Text("the saver is disabled: release and resume change nothing", style="yellow"))
    if occupation.tags:
        parts.append(status_tags_table(occupation.tags))
    if occupation.devices:
        parts.append(devices_table(occupation.devices))
    backup = occupation.host_backup
    line = f"host backup  {format_bytes(backup.bytes)} kept, {format_bytes(backup.capacity_bytes)} ready"
    if backup.limit_bytes:
        line += f", at most {format_bytes(backup.limit_bytes)}"
    parts.append(Text(line, style="dim"))
    return Group(*parts)


def status_tags_table(tags: Sequence[TagStatusAnswer]) -> Table:
    table = _table(["tag", "state", "restore", "size", "on device", "released", "backed up"], right_from=3)
    for tag in tags:
        sizes = (tag.bytes, tag.resident_bytes, tag.released_bytes, tag.backed_up_bytes)
        table.add_row(tag.tag, state_text(tag.state), tag.restore, *map(_size_text, sizes))
    if len(tags) > 1:
        table.add_section()
        table.add_row(
            "in all",
            "",
            "",
            format_bytes(sum(tag.bytes for tag in tags)),
            format_bytes(sum(tag.resident_bytes for tag in tags)),
            format_bytes(sum(tag.released_bytes for tag in tags)),
            format_bytes(sum(tag.backed_up_bytes for tag in tags)),
            style="bold",
        )
    return table


def devices_table(devices: Sequence[OccupiedDeviceAnswer]) -> Table:
    table = _table(["device", "name", "total", "used by all", "used here", "free"], right_from=2)
    for device in devices:
        own = "not told" if device.process_bytes is None else format_bytes(device.process_bytes)
        table.add_row(
            str(device.index),
            device.name,
            format_bytes(device.total_bytes),
            format_bytes(device.used_bytes),
            own,
            format_bytes(device.free_bytes),
        )
    return table
