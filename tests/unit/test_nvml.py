"""NVML, with a stand-in for its module: tests/gpu asks the real one."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from memsaver_core import nvml


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


class Library(SimpleNamespace):
    """Each call of ``nvmlInit`` raises the next of ``failures``, if there are any left."""

    nvmlMemory_v2 = 0
    NVMLError = NVMLError

    def nvmlInit(self) -> None:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetMemoryInfo(self, _handle: str, version: int) -> Any:
        return SimpleNamespace(total=103, used=40, reserved=3)

    def nvmlDeviceGetComputeRunningProcesses(self, _handle: str) -> list[Any]:
        return [SimpleNamespace(pid=7, usedGpuMemory=10)]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library(calls=0, failures=[])
    monkeypatch.setitem(sys.modules, "pynvml", library)  # type: ignore[arg-type]
    return library


@pytest.mark.guards("a thread or file that was missing for a moment stopped the service for ever")
def test_what_fails_for_a_moment_is_tried_again(library: Library) -> None:
    library.failures = [NVMLError_LibraryNotFound(), OSError("Too many open files")]
    assert [nvml.read_memory("moment", {7}) for _ in range(4)] == [None, None, (100, 40, 10), (100, 40, 10)]
    assert library.calls == 3


def test_an_unknown_device_is_asked_for_once(library: Library) -> None:
    library.failures = [NVMLError_NotFound()]
    assert [nvml.read_memory("slice", {7}) for _ in range(2)] == [None, None]
    assert library.calls == 1
