"""Where the members of a fleet are listed, as a command line names it."""

from __future__ import annotations

from memsaver_server.fleet.members import Membership, StaticMembership
from memsaver_server.missing_package import missing_package


def membership_of(source: str) -> Membership:
    """Return the membership of ``FILE`` (YAML, see ``StaticMembership``), ``dns:NAME:PORT``, ``srv:NAME``, ``ray`` or
    ``ray:FLEET``; the last two connect this process to the Ray cluster of this machine. Raises ValueError if it is none
    of them, ModuleNotFoundError if it needs a package of the extra ``fleet``, or of ``ray``, which the message names.
    """
    kind, separator, rest = source.partition(":")
    if kind == "ray":
        try:
            from memsaver_server.fleet.ray import RayMembership, connect
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(missing_package(error, "ray")) from error
        connect()
        return RayMembership(rest or "default")
    if kind not in ("dns", "srv") or not separator:
        if not source:
            raise ValueError("no members are named; write a YAML file, dns:NAME:PORT or srv:NAME")
        return StaticMembership(source)
    name, port = (rest, "") if kind == "srv" else (rest.rpartition(":")[0], rest.rpartition(":")[2])
    if not name or (kind == "dns" and not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536)):
        raise ValueError(f"{source!r} does not name members; write dns:NAME:PORT, srv:NAME or a YAML file")
    from memsaver_server.fleet.dns_members import DnsMembership

    return DnsMembership(name, int(port) if port else None)
