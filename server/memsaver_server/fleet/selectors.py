"""Which engines of a fleet a call is about."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pydantic import BaseModel, ConfigDict

from memsaver_server.fleet.members import Member


class Selector(BaseModel):
    """Selects the members that match every field given; one without fields selects all.

    Attributes:
        names: names of members.
        models: what the engines serve.
        labels: labels that a member must have, with these values.
        hosts: hosts on which the engines run.
        gpus: UUIDs; an engine matches if it uses one of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    labels: Mapping[str, str] = {}
    hosts: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()

    def matches(self, member: Member) -> bool:
        """Return whether ``member``, as far as it is described, is selected."""
        return (
            _any(self.names, [member.name])
            and _any(self.models, [member.model])
            and _any(self.hosts, [member.host])
            and _any(self.gpus, member.gpus)
            and all(member.labels.get(name) == value for name, value in self.labels.items())
        )

    def may_match(self, member: Member) -> bool:
        """Return whether ``member`` could match once its model and GPUs are known, if it does not name them."""
        unknown = {}
        if not member.model:
            unknown["models"] = ()
        if not member.gpus:
            unknown["gpus"] = ()
        return self.model_copy(update=unknown).matches(member)


def _any(wanted: Collection[str], found: Collection[str]) -> bool:
    return not wanted or any(one in wanted for one in found)
