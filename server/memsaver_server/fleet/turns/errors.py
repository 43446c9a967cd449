"""Why a request for a model is not forwarded."""

from __future__ import annotations

from collections.abc import Iterable

from memsaver_core.contract.errors import MemsaverError


class UnknownModelError(MemsaverError):
    """No engine of the fleet serves the model."""

    kind = "model_not_found"
    status = 404

    def __init__(self, model: str, models: Iterable[str]) -> None:
        known = ", ".join(sorted(map(repr, models))) or "none"
        super().__init__(f"no engine of the fleet serves {model!r}; the models are {known}")


class NoTurnError(MemsaverError):
    """The model cannot serve now; the message says why."""

    kind = "no_turn"
    status = 503

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s  # type: ignore[misc]  # of this one error


class QueueFullError(NoTurnError):
    """Too many requests wait for the model already."""

    kind = "queue_full"
