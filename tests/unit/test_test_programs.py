"""Programs that tests start as forks are as those that start by themselves; the clock that tests hold."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memsaver_server import clock as product
from tests import forks
from tests.clock import HeldClock

SHOWN = """
import atexit, os, sys, threading
print(sys.argv, __name__, sys.path[0], os.getcwd(), os.environ.get("OURS"), os.environ.get("HOME"), input())
atexit.register(print, "at exit")
threading.Thread(target=lambda: (threading.main_thread().join(), print("a thread"))).start()
print(sys.modules["__main__"].__dict__ is globals(), file=sys.stderr)
raise SystemExit(7)
"""


@pytest.mark.parametrize("whole", [{}, {"TESTS_END_WHOLE": "1"}])
@pytest.mark.parametrize("kind", ["code", "script", "module"])
def test_a_fork_is_as_a_program_that_starts_by_itself(tmp_path: Path, kind: str, whole: dict[str, str]) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    program = {"code": ["-c", SHOWN], "script": [str(tmp_path / "shown.py")], "module": ["-m", "shown"]}[kind]
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "env": {**os.environ, **whole, "OURS": "1", "PYTHONPATH": str(tmp_path)},
        "input": "a line\n",
        "capture_output": True,
        "text": True,
    }
    command = [sys.executable, *program, "an argument"]
    forked, alone = forks.run(command, **options), subprocess.run(command, check=False, **options)
    assert (forked.returncode, forked.stdout, forked.stderr) == (alone.returncode, alone.stdout, alone.stderr)
    assert forked.returncode == 7


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_fork_is_ended_by_signals(number: signal.Signals) -> None:
    command = [sys.executable, "-c", "print('ready', flush=True); input()"]
    with forks.Popen(command, stdin=forks.PIPE, stdout=forks.PIPE, stderr=forks.DEVNULL, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        assert program.poll() is None
        with pytest.raises(forks.TimeoutExpired):
            program.wait(0.01)
        assert program.pid in forks.running()
        program.send_signal(number)
        assert program.wait() == -number
        assert program.pid not in forks.running()


def test_what_is_read_before_a_program_begins_is_not_for_a_fork() -> None:
    environment = {**os.environ, "LD_PRELOAD": "libc.so.6"}
    ran = forks.run([sys.executable, "-c", "print(1)"], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (70, "")
    assert "LD_PRELOAD=libc.so.6: start the program by itself" in ran.stderr


def moves(clock: HeldClock, meanwhile: Callable[[], object]) -> float:
    """By how much the clock moves."""
    with clock.held():
        before = clock.now()
        meanwhile()
        return clock.now() - before


def test_the_clock_moves_while_nothing_else_does() -> None:
    clock = HeldClock()
    before = clock.now()

    def until_it_has_moved() -> None:
        while clock.now() < before + 20:
            time.sleep(0.5)  # threads of an earlier test may have to end first

    moves(clock, until_it_has_moved)
    assert clock.now() >= before + 20  # and it has not gone back


def test_the_clock_stands_while_a_thread_or_a_program_computes() -> None:
    clock, ends = HeldClock(), threading.Event()

    def compute() -> None:
        while not ends.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    assert moves(clock, lambda: time.sleep(1)) < 1
    ends.set()
    thread.join()
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    with forks.Popen(command, stdout=forks.PIPE) as program:
        assert program.stdout is not None
        program.stdout.readline()
        assert moves(clock, lambda: time.sleep(1)) < 1
        program.kill()


def test_it_is_the_product_s_only_where_it_is_installed() -> None:
    assert product.source is time.monotonic
