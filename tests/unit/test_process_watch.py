"""Processes of an engine are watched."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from memsaver_server.ranks.watch import ProcessWatch
from tests.waiting import wait_until


class Ended:
    def __init__(self) -> None:
        self.pids: list[int] = []

    def note(self, pid: int) -> None:
        self.pids.append(pid)


@pytest.mark.parametrize("descriptors", [True, False])
def test_an_end_is_told_once(monkeypatch: pytest.MonkeyPatch, descriptors: bool) -> None:
    """Also without a pidfd, by the process's state, which the kernel sets before it takes the memory down."""
    ended = Ended()

    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    if not descriptors:
        monkeypatch.setattr(os, "pidfd_open", refuse)
    with subprocess.Popen(["sleep", "600"]) as first, subprocess.Popen(["sleep", "600"]) as other:
        watch = ProcessWatch([first.pid, other.pid], ended.note)
        assert watch.pids == {first.pid, other.pid}
        first.kill()
        wait_until(lambda: ended.pids)
        other.kill()
        wait_until(lambda: len(ended.pids) == 2)
        assert ended.pids == [first.pid, other.pid]


def test_one_that_cannot_be_looked_at_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """While this process has no free descriptor; the pidfd that it has tells the end all the same."""
    ended, looks = Ended(), []

    def refuse(path: Path) -> str:
        looks.append(path)
        raise OSError(errno.EMFILE, "Too many open files")

    with subprocess.Popen(["sleep", "600"]) as one:
        watch = ProcessWatch([one.pid], ended.note)
        monkeypatch.setattr(Path, "read_text", refuse)
        wait_until(lambda: len(looks) > 1)
        assert not ended.pids
        one.kill()
        wait_until(lambda: ended.pids)
    assert watch.pids == {one.pid}


def test_a_process_that_is_gone_is_told_at_once() -> None:
    ended = Ended()
    with subprocess.Popen(["true"]) as gone:
        pass
    assert not ProcessWatch([gone.pid], ended.note).pids
    assert ended.pids == [gone.pid]
