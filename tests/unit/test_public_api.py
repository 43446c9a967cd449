"""What importing memsaver_core gives, and what its errors carry."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import memsaver_core as ms
from memsaver_core.contract import errors
from memsaver_server.client import Client
from memsaver_server.client.calls import Calls
from tests.programs import output_of

LIGHT = ("", ".contract.errors", ".contract.policies", ".contract.reports", ".contract.requests", ".settings")


def test_importing_loads_no_torch() -> None:
    """The command line, schemas and clients want these modules, and not torch."""
    lines = [*(f"import memsaver_core{name}" for name in LIGHT), "import sys", "print('torch' in sys.modules)"]
    assert output_of("\n".join(lines), by_itself=True) == "False\n"


def test_every_public_name_is_there() -> None:
    assert ms.__all__ == sorted(set(ms.__all__), key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    for name in ms.__all__:
        assert getattr(ms, name) is not None
    assert set(ms.__all__) <= set(dir(ms))
    with pytest.raises(AttributeError, match="no attribute 'releases'"):
        _ = ms.releases  # type: ignore[attr-defined]


def coroutines(of: type) -> set[str]:
    return {name for name, each in inspect.getmembers(of, inspect.iscoroutinefunction) if not name.startswith("_")}


def test_the_sync_client_has_every_call() -> None:
    assert coroutines(Calls) <= set(dir(Client))
    assert not coroutines(Client)


@pytest.mark.parametrize(
    ("error", "kind", "status", "retry_after_s", "details"),
    [
        (ms.MemsaverError("m"), "error", 500, None, {}),
        (ms.ConfigurationError("m"), "bad_request", 400, None, {}),
        (ms.UnknownTagError("m", ["a"], ["b"]), "unknown_tag", 400, None, {"unknown": ["a"], "known": ["b"]}),
        (ms.OutOfDeviceMemoryError("m", 2, 1, 0), "out_of_device_memory", 503, 1, {"needed_bytes": 2, "free_bytes": 1}),
        (ms.OutOfHostMemoryError("m", 2, 1), "out_of_host_memory", 507, None, {"needed_bytes": 2, "free_bytes": 1}),
        (
            ms.DriverError("m", "c", "e", "t", 3),
            "driver_error",
            500,
            None,
            {"call": "c", "code": "e", "tag": "t", "bytes": 3},
        ),
        (
            ms.ContextLostError("m", "c"),
            "context_lost",
            500,
            None,
            {"call": "c", "code": "", "tag": "", "bytes": 0},
        ),
        (ms.BackupError("m", "t", 2, 1), "backup_error", 500, None, {"tag": "t", "address": 2, "bytes": 1}),
        (ms.UnsupportedError("m"), "unsupported", 409, None, {}),
        (ms.ForkedProcessError("m"), "error", 500, None, {}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_errors_carry_what_the_service_answers(
    error: ms.MemsaverError, kind: str, status: int, retry_after_s: int | None, details: dict[str, object]
) -> None:
    assert (error.kind, error.status, error.retry_after_s, error.details()) == (kind, status, retry_after_s, details)


def test_every_error_type_is_public() -> None:
    core = Path(ms.__file__).parent
    sources = "".join(path.read_text() for path in core.rglob("*.py") if path.parent.name != "contract")
    types = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert {name for name in types if f"raise {name}(" in sources} <= set(ms.__all__)
