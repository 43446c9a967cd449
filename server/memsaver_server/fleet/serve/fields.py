"""What callers of a fleet send, beside what they would send to one engine."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema, model_validator
from typing_extensions import Self

from memsaver_server.fleet.results import Mode
from memsaver_server.fleet.selectors import Selector
from memsaver_server.schemas import Fields, ReleaseFields, ResumeFields

_Selector = Annotated[Selector, WithJsonSchema(Selector.model_json_schema())]


class SelectedFields(Fields):
    """Which engines a call is about; by default all."""

    selector: _Selector | None = Field(default=None, description="The engines, by names, models, labels, hosts, gpus.")
    model: Annotated[str, Field(max_length=256)] | None = Field(
        default=None, description="Only engines that serve this model."
    )

    def selected(self) -> Selector:
        """Return the selector."""
        selector = self.selector or Selector()
        return selector.model_copy(update={"models": (self.model,)}) if self.model is not None else selector


class FleetFields(SelectedFields):
    """The fields of an operation on a fleet."""

    fleet_mode: Mode = Field(default="all", description="All engines or none; or each by itself (best_effort).")
    operation_id: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[\w.:-]+$")] | None = Field(
        default=None, description="The id of the operation; a repeat carries out only what has failed."
    )


class _WholeFields(Fields):
    """Fields of one engine that a fleet cannot serve; passing them over would do something else than was asked."""

    prepare: bool = Field(default=False, exclude=True)
    commit: str | None = Field(default=None, exclude=True)
    at_least_bytes: int | None = Field(default=None, exclude=True)

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        if self.prepare or self.commit is not None:
            raise ValueError("a fleet prepares and commits by itself; send the operation without prepare and commit")
        if self.at_least_bytes is not None:
            raise ValueError("a fleet releases whole tags; send tags instead of at_least_bytes")
        return self


class FleetReleaseFields(ReleaseFields, FleetFields, _WholeFields):
    """The fields of a release of a fleet, all optional."""

    wake_on_request: bool = Field(
        default=False, description="A request for its model resumes an engine; otherwise only a resume does."
    )

    def options(self) -> dict[str, Any]:
        """Return the options of the coordinator's release."""
        return {
            "hibernate": self.hibernate,
            "drain": self.mode,
            "restore": self.restore or None,
            "trim": self.trim,
            "verify": self.verify,
        }


class FleetResumeFields(ResumeFields, FleetFields, _WholeFields):
    """The fields of a resume of a fleet, all optional."""

    def options(self) -> dict[str, Any]:
        """Return the options of the coordinator's resume."""
        return {"wait_for_memory_s": self.wait_for_memory_s or None, "verify": self.verify}
