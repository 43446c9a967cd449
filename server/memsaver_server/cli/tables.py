"""The answers of services and fleets as tables for a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import typer
from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text
from typer.models import OptionInfo

from memsaver_server.cli.request_options import Release, ResizeKvCache, Resume, Selector
from memsaver_server.cli.units import format_bytes, format_delta, format_seconds

if TYPE_CHECKING:
    from pydantic import BaseModel

    from memsaver_core.contract import reports, status
    from memsaver_server.fleet import EngineResult, EngineStatus, FleetResult, FleetStatus

    Planned = reports.PlanAnswer | reports.FleetPlanAnswer
    Said = reports.AcceptedAnswer | reports.PreparedAnswer | reports.ResizedAnswer

AnswerT = TypeVar("AnswerT", bound="BaseModel")
Cell = str | int | Text

_STATE_STYLES = {
    "resident": "green",
    "released": "cyan",
    "hibernated": "cyan",
    "releasing": "yellow",
    "resuming": "yellow",
    "mixed": "yellow",
    "succeeded": "green",
    "running": "yellow",
    "queued": "dim",
    "cancelled": "dim",
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


def show(answer: AnswerT, view: Callable[[AnswerT], RenderableType], *, as_json: bool) -> None:
    """Print an answer: its JSON, or ``view`` of it."""
    if as_json:
        typer.echo(answer.model_dump_json(indent=2))
    else:
        make_console().print(view(answer))


def plain(text: str, style: str = "") -> Text:
    """Return ``text`` as it is: without markup, and without characters that a terminal obeys or cannot show."""
    seen = (each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text)
    return Text("".join(seen), style=style)


#: By field of a request, the option that sets it.
_OPTIONS = {
    field: (option.param_decls or [""])[0].split("/")[0]
    for group in (Selector, ResizeKvCache, Resume, Release)
    for field, option in vars(group).items()
    if isinstance(option, OptionInfo)
}
_OPTIONS["selector"] = "/".join(_OPTIONS[field] for field in vars(Selector) if field in _OPTIONS)
del _OPTIONS["kv_cache"]  # in messages mostly the tag
#: A field in a message: ``{"prepare": true}``, ``"verify": "token"``, ``field 'verify'``, or a word with an underscore.
_FIELD = re.compile(r"""{?"(\w+)": (?:true|"(\w+)")}?|field '(\w+)'|\b([a-z]+_\w+)""")


def said(text: str, style: str = "") -> Text:
    """Return what a service says as ``plain`` does, with options in place of the fields that they set."""

    def option(found: re.Match[str]) -> str:
        name = _OPTIONS.get(found[1] or found[3] or found[4])
        return " ".join(filter(None, (name, found[2]))) if name else found[0]

    return plain(_FIELD.sub(option, text), style)


def progress_line(progress: reports.ProgressAnswer) -> str:
    left = f", {format_seconds(progress.seconds_left)} left" if progress.seconds_left is not None else ""
    done, total = format_bytes(progress.done_bytes), format_bytes(progress.total_bytes)
    return f"{done} of {total}, {progress.gb_per_s:.1f} GB/s{left}"


def state_text(state: str) -> Text:
    return Text(state, style=_STATE_STYLES.get(state, ""))


def _delta_text(count: int) -> Text:
    return Text(format_delta(count), style="green" if count < 0 else "yellow" if count > 0 else "dim")


def _cell(content: Cell) -> Text:
    if isinstance(content, int):
        return Text(format_bytes(content), style="dim" if content == 0 else "")
    return plain(content) if isinstance(content, str) else content


def table_of(columns: Iterable[str], rows: Iterable[Iterable[Cell]], total: Iterable[Cell] = ()) -> Table:
    """Return a table. A number is a size in bytes; the names of columns of figures begin with ``>``."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, show_edge=False)
    for name in columns:
        justify: JustifyMethod = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, no_wrap=True, max_width=_NAME_WIDTH)
    for row in rows:
        table.add_row(*map(_cell, row))
    if cells := [*map(_cell, total)]:
        table.add_section()
        table.add_row(*cells, style="bold")
    return table


def operation_tags_table(tags: Iterable[reports.TagReport], operation: str) -> Table:
    tags = list(tags)
    is_release = operation == "release" or (operation == "resize" and any(tag.released_bytes for tag in tags))
    moved = "released" if is_release else "resumed"
    return table_of(
        ["tag", "state", "restore", ">size", f">{moved}"],
        ([tag.tag, _state(tag), tag.restore, tag.bytes, getattr(tag, f"{moved}_bytes")] for tag in tags),
    )


def _state(tag: reports.TagReport | status.TagOccupation) -> Text:
    already = (" already", "dim") if getattr(tag, "already", False) else ""
    lost = (", content lost", "bold red") if getattr(tag, "content", "ok") == "lost" else ""
    return Text.assemble(state_text(tag.state), already, lost)


def operation_backups_table(tags: Iterable[reports.TagReport]) -> Table | None:
    """Return one row per tag whose content a release kept; None if there is none. Its figures: what was copied, what
    that takes, their ratio, what was unchanged, and what the shared store had."""
    kept = [tag for tag in tags if tag.backed_up_bytes or tag.unchanged_bytes or tag.shared_bytes]
    if not kept:
        return None
    found = ["unchanged", *(["shared"] if any(tag.shared_bytes for tag in kept) else [])]
    rows = ([*_kept_cells(tag), *(getattr(tag, f"{name}_bytes") for name in found)] for tag in kept)
    return table_of(["backup of", ">copied", ">kept", ">ratio", *(f">{name}" for name in found)], rows)


def _kept_cells(tag: reports.TagReport | status.TagOccupation) -> list[Cell]:
    content, kept = tag.backed_up_bytes, tag.kept_bytes
    return [tag.tag, content, kept, f"{100 * kept / content:.0f} %" if content else ""]


def phases_table(
    phases: Sequence[reports.PhaseReport], devices: Sequence[reports.MeteredDelta], seconds: float
) -> Table:
    """Return one row per phase with device memory: before, after and delta for one device, deltas for several."""
    names = ["before", "after", "delta"] if len(devices) == 1 else [f"device {device.index}" for device in devices]
    rows = [[each.name, format_seconds(each.seconds), *_device_cells(each.devices, devices)] for each in phases]
    if any(phase.details.get("copied_bytes") for phase in phases):
        names.append("copied")
        rows = [[*row, _copied_text(phase)] for row, phase in zip(rows, phases, strict=True)]
    total = ["in all", format_seconds(seconds), *_device_cells(devices, devices)]
    return table_of(["phase", ">time", *(f">{name}" for name in names)], rows, total)


def _copied_text(phase: reports.PhaseReport) -> Text:
    copied, rate = int(phase.details.get("copied_bytes", 0)), phase.details.get("gigabytes_per_second")
    if not copied:
        return Text("")
    return Text(format_bytes(copied) + (f" at {rate:.1f} GB/s" if rate else ""), style="dim")


def _device_cells(readings: Iterable[reports.DeviceDelta], devices: Sequence[reports.MeteredDelta]) -> list[Cell]:
    by_index = {reading.index: reading for reading in readings}
    found = [by_index.get(device.index) for device in devices]
    if len(found) == 1 and found[0] is not None:
        return [found[0].used_before_bytes, found[0].used_after_bytes, _delta_text(found[0].delta_bytes)]
    return [_delta_text(reading.delta_bytes) if reading else "" for reading in found]


def operation_view(result: reports.OperationAnswer) -> RenderableType:
    parts: list[RenderableType] = [_outcome(result)]
    if result.tags:
        parts += ["", operation_tags_table(result.tags, result.operation)]
        if (backups := operation_backups_table(result.tags)) is not None:
            parts += ["", backups]
    if result.devices:
        parts += ["", phases_table(result.phases, result.devices, result.seconds), _devices_caption(result.devices)]
    return Group(*parts, "")


def plan_view(plan: Planned) -> RenderableType:
    """Return what would happen or, unless the message has it already, what prevents that; and what content is lost."""
    blockers = [said(each, "dim") for each in plan.blockers if each not in plan.message]
    lost = lost_view(tag.tag for tag in plan.tags if tag.loses_content)
    return Group(said(plan.message), *blockers, lost)


def lost_view(tags: Iterable[str]) -> Group:
    """Return which ``tags`` lack their content, if any, and what to do."""
    names = ", ".join(tags)
    what = f"content lost: {names}; requests are refused until the engine's weight update has written it"
    return Group(*([plain(what, "yellow")] if names else []))


def said_view(answer: Said, *, hint: str) -> RenderableType:
    """Return an answer's message, and what to do below."""
    return Group(plain(answer.message), Text(hint, style="dim"))


def _outcome(result: reports.OperationAnswer | FleetResult) -> Text:
    mark = ("✓ ", "green") if result.success else ("✗ ", "red")
    return Text.assemble(mark, said(result.message))


def _devices_caption(devices: Sequence[reports.MeteredDelta]) -> Text:
    names = {device.name for device in devices if device.name}
    what = f"{len(devices)} x {names.pop()}" if len(devices) > 1 and len(names) == 1 else ", ".join(sorted(names))
    return plain(f"in use by all processes on {what or 'the device'}", "dim")


def status_view(occupation: status.OccupationAnswer) -> RenderableType:
    admission = occupation.admission
    opened = Text("open", style="green") if admission.open else Text("closed", style="yellow")
    state = "hibernated" if occupation.hibernated and occupation.state == "released" else occupation.state
    head = Text.assemble("state ", state_text(state), "   admission ", opened)
    model = plain(f", model {occupation.model}" if occupation.model else "")
    version = plain(f", weights of version {occupation.weights_version}" if occupation.weights_version else "")
    about = ("   engine ", plain(occupation.engine), model, version, f", driver {occupation.driver}")
    head.append_text(Text.assemble(*about, style="dim"))
    parts: list[RenderableType] = [head]
    if not occupation.enabled:
        parts.append(Text("the saver is disabled: release and resume change nothing", style="yellow"))
    if (prepared := occupation.prepared) is not None:
        parts.append(plain(f"prepared: {prepared.text()}", "yellow"))
    if admission.reason:
        parts.append(plain(f"closed because {admission.reason}", "dim"))
    if engines := getattr(occupation, "engines", ()):
        parts += ["", table_of(_ENGINE_COLUMNS, map(_engine_cells, engines)), *_wrong(engines)]
    if occupation.tags:
        parts += ["", status_tags_table(occupation.tags)]
    if occupation.devices:
        parts += ["", devices_table(occupation.devices), "", holders_table(occupation.devices)]
    if occupation.communicators:
        parts += ["", communicators_table(occupation.communicators), *_obstacles(occupation.communicators)]
    parts += [plain(f"stays: {each}", "yellow") for each in occupation.shared_by_ranks]
    if len(occupation.ranks) > 1:
        parts += ["", ranks_table(occupation.ranks)]
    if any(tag.backed_up_bytes for tag in occupation.tags):
        parts += ["", backups_table(occupation.tags)]
    backup = occupation.host_backup
    if backup.bytes or backup.capacity_bytes:
        parts += ["", Text(_backup_line(backup), style="dim")]
    if (store := backup.shared_store) is not None:
        parts += ["", plain(_store_line(store), "dim")]
    return Group(*parts)


def _backup_line(backup: status.HostBackup) -> str:
    line = f"host backup: {format_bytes(backup.bytes)} kept, {format_bytes(backup.capacity_bytes)} of memory ready"
    line += f" of at most {format_bytes(backup.limit_bytes)}" if backup.limit_bytes else ""
    line += f", {format_bytes(backup.unused_bytes)} of it for the next release" if backup.unused_bytes else ""
    return line + (f", {format_bytes(backup.file_bytes)} in files" if backup.file_bytes else "")


def _store_line(store: status.SharedStoreStatus) -> str:
    held, share, used = map(format_bytes, (store.held_bytes, store.share_bytes, store.used_bytes))
    size, limit = map(format_bytes, (store.total_bytes, store.limit_bytes))
    return (
        f"shared store {store.name}, processes: {store.processes}; {held} held here, a share of {share}; "
        f"{used} in use by any, {size} of memory of at most {limit}"
    )


def kv_cache_view(cache: status.KvCacheAnswer) -> RenderableType:
    sizes = (cache.bytes, cache.used_bytes, cache.smallest_bytes, cache.largest_bytes, cache.full_bytes)
    heads = [">kv cache", ">in use", ">smallest now", ">largest now", ">full"]
    limit = [] if cache.limit_bytes is None else [cache.limit_bytes]
    return table_of([*heads, *[">limit"] * len(limit), ">tokens"], [[*sizes, *limit, str(cache.tokens)]])


def status_tags_table(tags: Sequence[status.TagOccupation]) -> Table:
    shrunk = any(tag.shrunk_bytes for tag in tags)
    sizes = [(tag.bytes, tag.resident_bytes, tag.released_bytes, *[tag.shrunk_bytes] * shrunk) for tag in tags]
    return table_of(
        ["tag", "state", "restore", ">size", ">on device", ">released", *[">shrunk"] * shrunk],
        ([tag.tag, _state(tag), tag.restore, *its] for tag, its in zip(tags, sizes, strict=True)),
        ["in all", "", "", *map(sum, zip(*sizes, strict=True))] if len(tags) > 1 else (),
    )


def backups_table(tags: Iterable[status.TagOccupation]) -> Table:
    """Return one row per tag with a backup: its content, what is kept for it, and the ratio of the two."""
    rows = (_kept_cells(tag) for tag in tags if tag.backed_up_bytes)
    return table_of(["backup of", ">content", ">kept", ">ratio"], rows)


def devices_table(devices: Iterable[status.OccupiedDevice]) -> Table:
    def cells(device: status.OccupiedDevice) -> list[Cell]:
        own = "unknown" if device.process_bytes is None else device.process_bytes
        return [str(device.index), device.name, device.total_bytes, device.used_bytes, own, device.free_bytes]

    return table_of(["device", "name", ">total", ">in use", ">this process", ">free"], map(cells, devices))


def holders_table(devices: Sequence[status.OccupiedDevice]) -> Table:
    """Return one row per consumer of device memory: the tags together, what this process holds beside them, others."""
    held: dict[str, list[int]] = {"tags": [0] * len(devices)}
    for number, device in enumerate(devices):
        for source in device.sources:
            name = "tags" if source.kind == "tag" else source.name
            held.setdefault(name, [0] * len(devices))[number] += source.bytes
    return table_of(
        ["in use by", *(f">device {device.index}" for device in devices)],
        ([name, *sizes] for name, sizes in held.items() if name == "tags" or any(sizes)),
    )


def communicators_table(communicators: Sequence[status.CommunicatorStatus]) -> Table:
    """Return one row per NCCL communicator, of all its ranks here; ``communicators`` as in ``OccupationAnswer``."""
    rows: list[list[Cell]] = []
    for name in dict.fromkeys(each.name for each in communicators):
        same = [each for each in communicators if each.name == name]
        sizes = ((each.suspendable_bytes, each.suspended_bytes, each.persistent_bytes) for each in same)
        rows.append([name, str(same[0].ranks), *map(sum, zip(*sizes, strict=True))])
    return table_of(["communicator", ">ranks", ">can be suspended", ">suspended", ">stays"], rows)


def _obstacles(communicators: Sequence[status.CommunicatorStatus]) -> list[Text]:
    obstacles = dict.fromkeys((each.name, each.obstacle) for each in communicators if each.obstacle)
    return [plain(f"{name} stays: {obstacle}", "yellow") for name, obstacle in obstacles]


def ranks_table(ranks: Iterable[status.RankStatus]) -> Table:
    """Return one row per process of the engine; ``ranks`` as in ``OccupationAnswer``."""

    def cells(rank: status.RankStatus) -> list[Cell]:
        state = "dead" if rank.alive is False else "stopped" if rank.stopped else rank.state
        engine = f"{rank.rank} of engine {rank.dp_rank}" if rank.dp_rank is not None else str(rank.rank)
        return [engine, str(rank.pid or "elsewhere"), state_text(state)]

    return table_of(["rank", "process", "state"], map(cells, ranks))


# -- of a fleet -----------------------------------------------------------------------------------------------------


def fleet_status_view(status: FleetStatus) -> RenderableType:
    """Return one row per engine, and what is wrong below."""
    alive = sum(engine.alive for engine in status.engines)
    count = f"   {alive} of {len(status.engines)} engines answer"
    state = status.state or ("unknown" if status.engines else "empty")
    head = Text.assemble("fleet ", state_text(state), (count, "dim"))
    return Group(head, "", table_of(_ENGINE_COLUMNS, map(_engine_cells, status.engines)), *_wrong(status.engines), "")


def fleet_result_view(result: FleetResult) -> RenderableType:
    table = table_of(["engine", "", "state", ">time", ">moved", "operation"], map(_result_cells, result.engines))
    return Group(_outcome(result), "", table, *_wrong(result.failed), "")


def all_answer(occupation: status.OccupationAnswer | FleetStatus) -> bool:
    return not any(getattr(each, "error", "") for each in (occupation, *getattr(occupation, "engines", ())))


_ENGINE_COLUMNS = ("engine", "state", "wanted", "model", "host", ">on device", ">released", "GPUs")


def _engine_cells(engine: EngineStatus | status.EngineRow) -> list[Cell]:
    state = state_text(engine.state) if engine.alive else Text("no answer", style="bold red")
    held: tuple[Cell, ...] = (engine.resident_bytes, engine.released_bytes) if engine.alive else ("", "")
    return [engine.name, state, engine.wanted, engine.model, engine.host, *held, " ".join(engine.gpus)]


def _result_cells(engine: EngineResult) -> list[Cell]:
    done = Text("done", style="green") if engine.success else Text("as before", style="yellow")
    became = Text("failed", style="bold red") if engine.error else done
    took = format_seconds(engine.seconds) if engine.seconds else ""
    moved = engine.released_bytes + engine.resumed_bytes
    return [engine.name, became, state_text(engine.state), took, moved, engine.operation_id]


def _wrong(engines: Iterable[EngineStatus | EngineResult | status.EngineRow]) -> list[RenderableType]:
    wrong = [Text.assemble((f"{each.name}: ", "bold"), said(each.error)) for each in engines if each.error]
    return ["", *wrong] if wrong else []
