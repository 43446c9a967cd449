"""Where a fleet's members are listed, as a command line names it."""

from __future__ import annotations

from memsaver_server.fleet.members import Membership, StaticMembership


def membership_of(source: str) -> Membership:
    """Return the membership of ``FILE`` (YAML), ``dns:NAME:PORT`` or ``srv:NAME``.

    Raises:
        ValueError: it is none of them.
    """
    return StaticMembership(source)
