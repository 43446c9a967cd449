"""``memsaver release``, ``memsaver resume`` and ``memsaver status``."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from memsaver_server.cli.connection import connected, size_of, sizes_as_asked
from memsaver_server.cli.options import DEFAULT_URL, ApiKey, Json, Tags, Uds, Url, Verify, WaitForMemory, finite
from memsaver_server.cli.progress import until_ended
from memsaver_server.cli.tables import make_console, operation_view, status_view

if TYPE_CHECKING:
    from memsaver_server.schemas import AcceptedAnswer, OperationAnswer, ReleaseArguments


def _policies(pairs: list[str] | None) -> dict[str, str] | None:
    policies: dict[str, str] = {}
    for pair in pairs or []:
        tag, separator, policy = pair.partition("=")
        if not (tag and separator and policy):
            raise typer.BadParameter(f"{pair!r} is not TAG=POLICY; write for example weights=discard")
        policies[tag] = policy
    return policies or None


def _show(answer: OperationAnswer | AcceptedAnswer, as_json: bool) -> None:
    from memsaver_server.schemas import OperationAnswer

    if as_json:
        typer.echo(answer.model_dump_json(indent=2))
    elif isinstance(answer, OperationAnswer):
        make_console().print(operation_view(answer))
    else:
        console = make_console()
        console.print(answer.message, markup=False)
        console.print(f"follow it with: memsaver watch {answer.operation_id}", style="dim", markup=False)


def release(
    tags: Tags = None,
    url: Url = DEFAULT_URL,
    uds: Uds = None,
    api_key: ApiKey = None,
    as_json: Json = False,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", help="Deadline of the drain, in seconds.", metavar="SECONDS", callback=finite),
    ] = None,
    mode: Annotated[
        str | None, typer.Option("--mode", help="Requests in flight: wait for them, abort them, or keep (freeze) them.")
    ] = None,
    restore: Annotated[
        list[str] | None,
        typer.Option(
            "--restore", help="Restore policy for this release, e.g. weights=discard. Repeatable.", metavar="TAG=POLICY"
        ),
    ] = None,
    at_least: Annotated[
        str | None,
        typer.Option(
            "--at-least",
            help="Release only as many tags as free this much (20GiB, 500MB, bytes), cheapest first.",
            metavar="SIZE",
        ),
    ] = None,
    trim: Annotated[
        bool | None,
        typer.Option(
            "--trim/--no-trim", help="Also release what libraries cache [only when hibernating].", show_default=False
        ),
    ] = None,
    hibernate: Annotated[
        bool, typer.Option("--hibernate", help="Release the CUDA context last; any resume restores it.")
    ] = False,
    verify: Verify = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a conflicting operation to end.")] = False,
    background: Annotated[bool, typer.Option("--async", help="Return as soon as the operation has started.")] = False,
) -> None:
    """Release the device memory of TAGS (default: all) to the driver. Ctrl-C cancels before memory is released."""
    options: ReleaseArguments = {
        "timeout_s": timeout,
        "mode": mode,
        "restore": _policies(restore),
        "at_least_bytes": size_of(at_least),
        "trim": trim,
        "hibernate": hibernate,
        "verify": "token" if verify else None,
        "wait": wait,
    }
    with connected(url, uds, api_key, as_json=as_json) as client, sizes_as_asked(at_least):
        start = partial(client.start_release, tags, **options)
        _show(start() if background else until_ended(client, start), as_json)


def resume(
    tags: Tags = None,
    url: Url = DEFAULT_URL,
    uds: Uds = None,
    api_key: ApiKey = None,
    as_json: Json = False,
    wait_for_memory: WaitForMemory = None,
    verify: Verify = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for a conflicting operation to end.")] = False,
    background: Annotated[bool, typer.Option("--async", help="Return as soon as the operation has started.")] = False,
) -> None:
    """Bring back the device memory of TAGS (default: all that are released), at the same addresses.

    Ctrl-C cancels before memory is mapped.
    """
    with connected(url, uds, api_key, as_json=as_json) as client:
        checked = "token" if verify else None
        start = partial(client.start_resume, tags, wait_for_memory_s=wait_for_memory, verify=checked, wait=wait)
        _show(start() if background else until_ended(client, start), as_json)


def status(url: Url = DEFAULT_URL, uds: Uds = None, api_key: ApiKey = None, as_json: Json = False) -> None:
    """Show what the engine holds: each tag's state and size, each device, the host backup."""
    with connected(url, uds, api_key, as_json=as_json) as client:
        occupation = client.occupation()
    if as_json:
        typer.echo(occupation.model_dump_json(indent=2))
    else:
        make_console().print(status_view(occupation))
