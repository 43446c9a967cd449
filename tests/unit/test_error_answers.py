"""Each error carries its own answer: no list of classes has to be kept up with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import memsaver_server.app
import memsaver_server.fleet.turns.proxy
import memsaver_server.reference.engine  # noqa: F401
from memsaver_core import MemsaverError, OutOfDeviceMemoryError, UnknownTagError
from memsaver_core.contract.errors import UnauthorizedError
from memsaver_server.controller import Answer
from memsaver_server.engine import AdmissionClosedError, DrainTimeoutError

#: Status and kind are the service's interface.
ANSWERS = {
    "AdmissionClosedError": (503, "admission_closed", 1),
    "BackupError": (500, "backup_error", None),
    "BadGatewayError": (502, "bad_gateway", None),
    "BadRequestError": (400, "bad_request", None),
    "BodyTooLargeError": (413, "body_too_large", None),
    "ConfigurationError": (400, "bad_request", None),
    "ConflictError": (409, "conflict", 1),
    "ContextLostError": (500, "context_lost", None),
    "DiskFullError": (507, "disk_full", None),
    "DrainTimeoutError": (504, "drain_timeout", None),
    "DriverError": (500, "driver_error", None),
    "EngineDeadError": (503, "engine_dead", None),
    "EngineFailedError": (500, "context_lost", None),
    "FleetError": (400, "bad_request", None),
    "FleetUnknownError": (503, "fleet_unknown", 1),
    "ForbiddenError": (403, "forbidden", None),
    "ForkedProcessError": (500, "error", None),
    "GroupFailedError": (500, "rank_failed", None),
    "IdempotencyKeyError": (422, "idempotency_key_reused", None),
    "LeaseEndedError": (409, "lease_ended", None),
    "MembershipError": (503, "fleet_unknown", 1),
    "MemoryBusyError": (504, "memory_busy", None),
    "NoEngineError": (404, "not_found", None),
    "NoThreadError": (503, "no_thread", 1),
    "NoTurnError": (503, "no_turn", None),
    "NotEnoughToReleaseError": (400, "not_enough_to_release", None),
    "NotFoundError": (404, "not_found", None),
    "NotResidentError": (409, "not_resident", None),
    "OperationCancelledError": (409, "cancelled", None),
    "OutOfDeviceMemoryError": (503, "out_of_device_memory", 1),
    "OutOfHostMemoryError": (507, "out_of_host_memory", None),
    "PauseEndedError": (409, "pause_ended", None),
    "PhaseTimeoutError": (504, "phase_timeout", None),
    "QueueFullError": (503, "queue_full", None),
    "RanksFailedError": (500, "ranks_failed", None),
    "RecordError": (503, "fleet_unknown", 1),
    "ServerEndsError": (503, "server_ends", None),
    "TooLateToCancelError": (409, "too_late", None),
    "TooManyOperationsError": (503, "too_many_operations", 1),
    "UnauthorizedError": (401, "unauthorized", None),
    "UnknownModelError": (404, "model_not_found", None),
    "UnknownTagError": (400, "unknown_tag", None),
    "UnsupportedError": (409, "unsupported", None),
    "VerificationError": (500, "verification_failed", None),
    "VerificationUnavailableError": (400, "verification_unavailable", None),
    "WrongWeightsError": (409, "wrong_weights_version", None),
}


def subclasses(kind: type[MemsaverError]) -> Iterator[type[MemsaverError]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


def test_status_and_kind_are_those_that_clients_know() -> None:
    found = {
        each.__name__: (each.status, each.kind, each.retry_after_s)
        for each in subclasses(MemsaverError)
        if each.__module__.startswith(("memsaver_core.contract.errors", "memsaver_server."))
    }
    assert found == ANSWERS


@pytest.mark.parametrize(
    ("error", "status", "details", "headers"),
    [
        (UnknownTagError("m", ["a"], ["b"]), 400, {"unknown": ["a"], "known": ["b"]}, {}),
        (DrainTimeoutError(1.0, ["one"]), 504, {"phase": "drain", "pending": ["one"]}, {}),
        (OutOfDeviceMemoryError("", 7, 3), 503, {"needed_bytes": 7, "free_bytes": 3}, {"Retry-After": "1"}),
        (AdmissionClosedError("closed"), 503, {}, {"Retry-After": "1"}),
        (UnauthorizedError("no key", "missing"), 401, {"reason": "missing"}, {"WWW-Authenticate": "Bearer"}),
        (KeyError("x"), 500, {}, {}),
    ],
)
def test_an_error_is_its_answer(
    error: Exception, status: int, details: dict[str, object], headers: dict[str, str]
) -> None:
    answer = Answer.failure(error)
    assert (answer.status, answer.headers) == (status, headers)
    kind = getattr(error, "kind", "internal_error")
    assert answer.body["error"] == {"type": kind, "message": answer.body["message"], **details}
