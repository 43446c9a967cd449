"""The engines of a fleet, and where they are listed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import httpx

from memsaver_core.contract.errors import FleetUnknownError
from memsaver_server.address import parse_address

#: Interval at which a file of members is looked at for changes, seconds.
REREAD_S = 1.0


@dataclass(frozen=True)
class Member:
    """One engine.

    Attributes:
        name: unique in the fleet.
        url: the address of its service, as for the client.
        model: what it serves; empty if only the engine knows.
        labels: anything that a selector may ask for.
        host: the machine on which it runs; empty if unknown.
        gpus: UUIDs of the GPUs that it uses; empty if only the engine knows.
        api_key: its key, if it differs from the fleet's.
    """

    name: str
    url: str
    model: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    host: str = ""
    gpus: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)


class Membership(Protocol):
    """Where the members of a fleet are listed."""

    async def members(self) -> list[Member]:
        """Return the members now, each name once. Raises MembershipError, with the reason, if they cannot be read."""

    async def changed(self) -> None:
        """Return once the members may have changed since the last call of ``members``."""


class MembershipError(FleetUnknownError):
    """The members of a fleet cannot be read; the message says from where, and why."""


class StaticMembership:
    """Members from a list, or from a YAML file that is read again when it changes.

    The file is a list; each entry is an address, or a mapping with the fields of ``Member``::

        - http://10.0.0.1:30000
        - {name: b, url: "http://10.0.0.2:30000", model: qwen, labels: {role: rollout}}

    It may be a mapping with this list under ``members``, and under ``models`` how models take turns.
    """

    def __init__(self, members: Iterable[Member] | str | PathLike[str]) -> None:
        self._path = Path(members) if isinstance(members, (str, PathLike)) else None
        if self._path is not None:
            import_module("yaml")  # if it is missing, that is said here
        self._members = [] if isinstance(members, (str, PathLike)) else checked(members)
        self._seen: object = object()  # unlike any file

    async def members(self) -> list[Member]:
        if self._path is not None and (seen := self._stamp()) != self._seen:
            self._members = _read(self._path)
            self._seen = seen
        return list(self._members)

    async def changed(self) -> None:
        if self._path is None:
            await asyncio.get_running_loop().create_future()  # a list never changes
        while self._stamp() == self._seen:
            await asyncio.sleep(REREAD_S)

    def _stamp(self) -> object:
        """Return what differs after the file was written or replaced; a mounted ConfigMap is a link that moves."""
        assert self._path is not None
        try:
            about = self._path.stat()
        except OSError:
            return None
        return about.st_ino, about.st_mtime_ns, about.st_size


def checked(members: Iterable[Member]) -> list[Member]:
    """Return the members. Raises MembershipError if two have the same name, or an address is wrong, or has credentials,
    which the message does not show."""
    found: dict[str, Member] = {}
    for member in members:
        if "@" in member.url and not member.url.startswith("unix:"):
            address = f"the address of {member.name.rpartition('@')[2]!r}"
            raise MembershipError(f"{address} has a user or a password; write the engine's key as api_key")
        if member.name in found:
            raise MembershipError(f"two members are called {member.name!r} ({found[member.name].url}, {member.url})")
        try:
            httpx.URL(parse_address(member.url))
        except (ValueError, httpx.InvalidURL) as error:
            raise MembershipError(f"member {member.name!r}: {error}") from None
        found[member.name] = member
    return list(found.values())


def _read(path: Path) -> list[Member]:
    import yaml

    try:
        entries = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise MembershipError(f"the list of members {path} cannot be read: {error}") from None
    if isinstance(entries, dict):
        entries = entries.get("members")
    if not isinstance(entries, list):
        raise MembershipError(f"{path} is no list of members; write a line like '- http://host:30000' for each")
    return checked(_member(entry, f"{path}, entry {number}") for number, entry in enumerate(entries, 1))


def _member(entry: object, where: str) -> Member:
    if isinstance(entry, str):
        return Member(entry.split("://")[-1], entry)
    fields = Member.__dataclass_fields__
    if not isinstance(entry, dict) or "url" not in entry or not entry.keys() <= fields.keys():
        raise MembershipError(f"{where} is no address and no mapping with url and any of {', '.join(fields)}")
    gpus, labels = entry.get("gpus") or (), entry.get("labels") or {}
    if not isinstance(gpus, (str, list, tuple)) or not isinstance(labels, dict):
        raise MembershipError(f"{where}: gpus is a UUID or a list of them, labels is a mapping")
    about: dict[str, Any] = {key: str(value) for key, value in entry.items() if value is not None}
    about["gpus"] = (gpus,) if isinstance(gpus, str) else tuple(map(str, gpus))
    about["labels"] = {str(key): str(value) for key, value in labels.items()}
    return Member(**{"name": about["url"].split("://")[-1], **about})
