"""Why a request for a model is not forwarded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field

from memsaver_core.contract.errors import MemsaverError


class UnknownModelError(MemsaverError, kind="model_not_found", status=404):
    """No engine of the fleet serves the model."""

    @classmethod
    def of(cls, model: str, models: Iterable[str]) -> UnknownModelError:
        known = ", ".join(sorted(map(repr, models))) or "none"
        return cls(f"no engine of the fleet serves {model!r}; the models are {known}")


class NoTurnError(MemsaverError, kind="no_turn", status=503):
    """The model cannot serve now; the message says why. A repeat may be served after ``retry_s``."""

    retry_s: int = field(default=1, metadata={"answered": False})

    def __post_init__(self, message: str) -> None:
        super().__post_init__(message)
        self.retry_after_s = self.retry_s  # type: ignore[misc]  # of this one error


class QueueFullError(NoTurnError, kind="queue_full"):
    """Too many requests wait for the model already."""
