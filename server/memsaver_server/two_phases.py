"""The JSON of operations in two phases: prepared under a lease, then committed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from memsaver_server.schemas import Fields, Ignored, PlannedTagAnswer, PreparedState, ReleaseFields, ResumeFields


class TwoPhaseFields(Fields):
    """Either ``prepare`` with the options of the operation, or ``commit`` alone."""

    prepare: bool = Field(
        default=False, description="Do all but moving memory, answer, and wait for the commit or the lease's end."
    )
    lease_s: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        default=None, description="With prepare: after how long it is undone without a commit. By default 30 s."
    )
    commit: Annotated[str, Field(max_length=64)] | None = Field(
        default=None, description="The operation_id of a prepared operation, to be done now. Takes no other field."
    )

    @model_validator(mode="after")
    def _phase(self) -> Self:
        if self.commit is not None and len(self.model_dump(exclude_defaults=True)) > 1:
            raise ValueError("a commit takes no other field: the operation has the options that it was prepared with")
        if self.lease_s is not None and not self.prepare:
            raise ValueError('lease_s needs "prepare": true')
        return self


class TwoPhaseReleaseFields(ReleaseFields, TwoPhaseFields):
    """The fields of a release, all optional."""


class TwoPhaseResumeFields(ResumeFields, TwoPhaseFields):
    """The fields of a resume, all optional."""


class PreparedAnswer(PreparedState):
    """An operation that waits for its commit: what it will do, and the estimate of how long that takes, if there was
    one like it. ``message`` says how to go on."""

    success: Literal[True]
    message: str
    prepared: Literal[True]
    expected_s: float | None
    tags: list[PlannedTagAnswer]
    ignored: Ignored = Field(default_factory=list)
