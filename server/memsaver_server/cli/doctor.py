"""``memsaver doctor``."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from memsaver_server.cli.options import ExitCode
from memsaver_server.cli.tables import make_console

if TYPE_CHECKING:
    from memsaver_server.doctor import Finding

_MARKS = {"ok": ("✓", "green"), "note": ("·", "dim"), "warning": ("!", "yellow"), "blocked": ("✗", "bold red")}


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Check driver, devices, torch and environment, and say what to do.

    Exits with 1 if something prevents memsaver from working.
    """
    from memsaver_server.doctor import Level, examine

    findings = examine()
    blocked = [finding for finding in findings if finding.level is Level.BLOCKED]
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        console = make_console()
        console.print(_table(findings))
        warnings = sum(finding.level is Level.WARNING for finding in findings)
        if blocked:
            console.print(f"[bold red]{len(blocked)} blocked[/], {warnings} to review")
        else:
            console.print("[green]nothing blocks[/]" + (f", {warnings} to review" if warnings else ""))
    raise typer.Exit(ExitCode.FAILED if blocked else ExitCode.OK)


def _table(findings: tuple[Finding, ...]) -> Table:
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.level]
        text = Text(finding.found)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", style="yellow")
        table.add_row(Text(mark, style=style), finding.subject, text)
    return table
