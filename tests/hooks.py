"""pytest hooks for all tests, imported by conftest.py."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tests import engine_runs, forks
from tests.amount import amount


def pytest_configure(config: pytest.Config) -> None:
    # Folders that run on the host driver set it when they are collected; a run of GPU tests is to use CUDA throughout.
    if config.option.markexpr == "gpu" and torch.cuda.is_available():
        os.environ.setdefault("MEMSAVER_DRIVER", "cuda")
    with suppress(ModuleNotFoundError):  # in an environment of another engine's tests
        import hypothesis

        slow = [hypothesis.HealthCheck.too_slow]
        sample = bool(amount(1, long=0))  # always the same, so that nobody meets what another change has broken
        hypothesis.settings.register_profile(
            "any machine", deadline=None, suppress_health_check=slow, derandomize=sample
        )
        hypothesis.settings.load_profile("any machine")
    # What a shell runs in the background ignores SIGINT, and so would the programs that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


#: CPU seconds of each file's tests, set-up, teardown and ended programs included.
_cpu_seconds: Counter[str] = Counter()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _used_cpu_seconds()
    yield
    _cpu_seconds[item.location[0]] += _used_cpu_seconds() - before


def _used_cpu_seconds() -> float:
    return sum(os.times()[:4]) + forks.cpu_seconds()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "TESTS_RUNS" in os.environ and (report.when == "call" or report.failed):
        engine_runs.record(report.nodeid, report.outcome)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report what the tests took: to ``run``, or by folder."""
    outcomes = {
        outcome: sum(isinstance(report, pytest.TestReport) for report in reports)
        for outcome, reports in terminalreporter.stats.items()
        if outcome and outcome != "warnings"
    }
    if "TESTS_RESULTS" in os.environ:
        results = {"outcomes": outcomes, "seconds": _cpu_seconds, "forks_cpu_seconds": forks.cpu_seconds()}
        Path(os.environ["TESTS_RESULTS"]).write_text(json.dumps(results))
        return
    folders: Counter[str] = Counter()
    for file, seconds in _cpu_seconds.items():
        folders[os.path.dirname(file)] += seconds
    terminalreporter.section("CPU seconds per folder")
    for folder, seconds in sorted(folders.items()):
        terminalreporter.write_line(f"{seconds:8.1f} s  {folder}")
