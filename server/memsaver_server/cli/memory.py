"""``memsaver release``, ``memsaver resume`` and ``memsaver status``."""

from __future__ import annotations

from functools import partial

from memsaver_server.cli.connection import connected, sizes_as_asked
from memsaver_server.cli.live import until_ended
from memsaver_server.cli.options import Connection, Json, Tags, grouped
from memsaver_server.cli.request_options import Release, Resume
from memsaver_server.cli.tables import accepted_view, operation_view, show, status_view


@grouped
def release(tags: Tags = None, *, connection: Connection, as_json: Json = False, asked: Release) -> None:
    """Release the device memory of TAGS (default: all) to the driver. Ctrl-C cancels before memory is released."""
    _operate(tags, connection, as_json, asked)


@grouped
def resume(tags: Tags = None, *, connection: Connection, as_json: Json = False, asked: Resume) -> None:
    """Bring back the device memory of TAGS (default: all that are released), at the same addresses.

    Ctrl-C cancels before memory is mapped.
    """
    _operate(tags, connection, as_json, asked)


def _operate(tags: list[str] | None, connection: Connection, as_json: bool, asked: Release | Resume) -> None:
    given = asked.given()
    in_background = given.pop("run_async", False)
    with connected(connection, as_json=as_json) as client, sizes_as_asked(getattr(asked, "at_least_bytes", None)):
        start = partial(client.start_release if isinstance(asked, Release) else client.start_resume, tags, **given)
        if in_background:
            show(start(), accepted_view, as_json=as_json)
        else:
            show(until_ended(client, start), operation_view, as_json=as_json)


@grouped
def status(connection: Connection, as_json: Json = False) -> None:
    """Show what the engine holds: each tag's state and size, each device, the host backup."""
    with connected(connection, as_json=as_json) as client:
        occupation = client.occupation()
    show(occupation, status_view, as_json=as_json)
