"""pytest hooks for all tests, imported by conftest.py."""

from __future__ import annotations

import os
import signal

import pytest
import torch


def pytest_configure(config: pytest.Config) -> None:
    # Folders that run on the host driver set it when they are collected; a run of GPU tests is to use CUDA throughout.
    if config.option.markexpr == "gpu" and torch.cuda.is_available():
        os.environ.setdefault("MEMSAVER_DRIVER", "cuda")
    # What a shell runs in the background ignores SIGINT, and so would the programs that tests start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how long the tests of each folder took, set-up and teardown included."""
    seconds: dict[str, float] = {}
    tests: dict[str, set[str]] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                folder = os.path.dirname(report.location[0])
                seconds[folder] = seconds.get(folder, 0.0) + report.duration
                tests.setdefault(folder, set()).add(report.nodeid)
    if seconds:
        terminalreporter.section("time per folder")
    for folder in sorted(seconds):
        terminalreporter.write_line(f"{seconds[folder]:8.1f} s  {len(tests[folder]):5} tests  {folder}")
