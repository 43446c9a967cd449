"""A fleet's answers as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memsaver_server.cli.tables import plain, state_text
from memsaver_server.cli.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from memsaver_server.fleet import EngineResult, EngineStatus, FleetResult, FleetStatus


def fleet_status_view(status: FleetStatus) -> RenderableType:
    """Return one row per engine, and what is wrong below."""
    alive = sum(engine.alive for engine in status.engines)
    count = f"   {alive} of {len(status.engines)} engines answer"
    head = Text.assemble("fleet ", state_text(status.state or "empty"), (count, "dim"))
    table = _table(["engine", "state", "wanted", "model", "host", "on device", "released", "GPUs"], right=(5, 6))
    for engine in status.engines:
        table.add_row(plain(engine.name), _state(engine), *map(plain, _about(engine)))
    wrong = [_wrong(engine.name, engine.error) for engine in status.engines if engine.error]
    return Group(head, "", table, *([""] if wrong else []), *wrong, "")


def fleet_result_view(result: FleetResult) -> RenderableType:
    """Return what happened, and one row per engine."""
    mark = Text("✓ " if result.success else "✗ ", style="green" if result.success else "red")
    table = _table(["engine", "", "state", "time", "moved", "operation"], right=(3, 4))
    for engine in result.engines:
        table.add_row(plain(engine.name), _mark(engine), state_text(engine.state), *_figures(engine))
    wrong = [_wrong(engine.name, engine.error) for engine in result.failed]
    return Group(Text.assemble(mark, plain(result.message)), "", table, *([""] if wrong else []), *wrong, "")


def _state(engine: EngineStatus) -> Text:
    return state_text(engine.state) if engine.alive else Text("no answer", style="bold red")


def _about(engine: EngineStatus) -> list[str]:
    tags = engine.occupation.tags if engine.occupation else ()
    held = format_bytes(sum(tag.resident_bytes for tag in tags)) if engine.alive else ""
    released = format_bytes(sum(tag.released_bytes for tag in tags)) if engine.alive else ""
    return [engine.wanted, engine.model, engine.host, held, released, " ".join(engine.gpus)]


def _mark(engine: EngineResult) -> Text:
    if engine.error:
        return Text("failed", style="bold red")
    return Text("done", style="green") if engine.success else Text("as before", style="yellow")


def _figures(engine: EngineResult) -> list[str]:
    moved = engine.released_bytes + engine.resumed_bytes
    return [format_seconds(engine.seconds) if engine.seconds else "", format_bytes(moved), engine.operation_id]


def _wrong(name: str, error: str) -> Text:
    return Text.assemble((f"{name}: ", "bold"), plain(error))


def _table(columns: Sequence[str], *, right: Sequence[int]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number in right else "left", no_wrap=True, max_width=40)
    return table
