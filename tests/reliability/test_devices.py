"""Two devices in one process, one of which fails."""

from __future__ import annotations

import pytest

from memsaver_core import _native
from memsaver_core.contract.errors import MemsaverError
from tests.unit.saver_memory import MIB, content, fill

DEVICES = (0, 1)


class Cards:
    """Memory that is kept, and memory that is discarded, on each of two devices."""

    def __init__(self) -> None:
        self.saver = _native.Saver(driver="host", host_devices=["", ""], host_capacity=16 * MIB, verify="full")
        self.kept = [self.saver.allocate(device, "kept", "host", 2 * MIB) for device in DEVICES]
        self.lost = [self.saver.allocate(device, "lost", "discard", MIB) for device in DEVICES]
        self.kept_content = [fill(address, 2 * MIB, seed) for seed, address in enumerate(self.kept)]
        self.lost_content = [fill(address, MIB, seed) for seed, address in enumerate(self.lost)]

    def released(self, tag: str) -> int:
        return sum(each["released_bytes"] for each in self.saver.status()["tags"] if each["tag"] == tag)

    def used(self) -> list[int]:
        return [total - free for free, total in map(self.saver.memory_info, DEVICES)]

    def kept_is_whole(self) -> bool:
        return [content(address, 2 * MIB) for address in self.kept] == self.kept_content

    def lost_is_whole(self) -> bool:
        return [content(address, MIB) for address in self.lost] == self.lost_content


def occurrences(call: str, operation: str) -> range:
    """Each occurrence of a call in an operation over both devices, counted from its start."""
    cards = Cards()
    if operation == "resume":
        cards.saver.release([], [], {})
    before = cards.saver.counts().get(call, 0)
    if operation == "release":
        cards.saver.release([], [], {})
    else:
        cards.saver.resume([])
    return range(1, cards.saver.counts()[call] - before + 1)


@pytest.mark.parametrize("call", ["synchronize", "copy_to_host", "record", "wait", "unmap", "release"])
@pytest.mark.guards("one rank or device failed while the others went on")
def test_a_release_that_fails_on_one_device(call: str) -> None:
    """Nothing is discarded on any device before all devices have backed up; until then a resume brings every device
    back unchanged."""
    failed = undone = 0
    for nth in occurrences(call, "release"):
        cards = Cards()
        cards.saver.fail(call, nth)
        try:
            cards.saver.release([], [], {})
        except MemsaverError:
            failed += 1
        else:
            continue  # the operation is over without it
        cards.saver.heal()
        whole = cards.released("lost") == 0
        assert whole or cards.released("kept") == 4 * MIB
        cards.saver.resume([])
        assert cards.kept_is_whole()
        if whole:
            assert cards.lost_is_whole()
            undone += 1
        assert cards.saver.audit() == []
        cards.saver.release([], [], {})
        assert cards.used() == [0, 0]
    assert failed > 0
    assert undone > 0


@pytest.mark.parametrize("call", ["memory_info", "create", "map", "allow_access", "copy_to_device", "record", "wait"])
@pytest.mark.guards("one rank or device failed while the others went on")
def test_a_resume_that_fails_on_one_device(call: str) -> None:
    """All devices are released again, with their backups, and the retry brings all of them back."""
    failed = 0
    for nth in occurrences(call, "resume"):
        cards = Cards()
        cards.saver.release([], [], {})
        cards.saver.fail(call, nth)
        try:
            cards.saver.resume([])
        except MemsaverError:
            failed += 1
        else:
            continue
        cards.saver.heal()
        assert cards.used() == [0, 0]
        assert cards.saver.audit() == []
        cards.saver.resume([])
        assert cards.kept_is_whole()
    assert failed > 0
