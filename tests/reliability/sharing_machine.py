"""The state machine with a store that two other processes use, too: they write, release, resume and are killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

from hypothesis import strategies as st
from hypothesis.stateful import rule

import memsaver_core as ms
from tests.reliability.faults import RELEASING, RESUMING, Fault, faults_of
from tests.reliability.machine import BACKUP_LIMIT, Machine, overrides_of_a_call, step, tags_of_a_call, two_devices
from tests.reliability.memory_model import PAGE
from tests.reliability.neighbours import ORDERS, PAGES, Neighbour
from tests.waiting import wait_until


class SharingMachine(Machine):
    neighbours: tuple[Neighbour, ...]

    @rule(which=st.integers(0, 1), order=st.sampled_from(ORDERS))
    @step
    def neighbour_does(self, which: int, order: str) -> None:
        self.neighbours[which].obey(order)

    @rule(
        tags=tags_of_a_call,
        overrides=overrides_of_a_call,
        common=st.integers(0, PAGES),
        faults=st.just([]) | faults_of(RELEASING),
        dies=st.none() | st.none() | st.integers(0, 1),
    )
    @step
    def release_together(
        self, tags: list[str], overrides: dict[str, str], common: int, faults: list[Fault], dies: int | None
    ) -> None:
        """All release at once what is the same to this page; one of the others may be killed."""
        for neighbour in self.neighbours:
            neighbour.obey(f"write {common}")
        for neighbour in self.neighbours:
            neighbour.say("release")
        try:
            if dies is not None:
                self.neighbours[dies].die()
            self._release(tags, overrides, faults)
        finally:
            for number, neighbour in enumerate(self.neighbours):
                if number != dies:
                    neighbour.answer()

    @rule(tags=tags_of_a_call, faults=st.just([]) | faults_of(RESUMING))
    @step
    def resume_together(self, tags: list[str], faults: list[Fault]) -> None:
        for neighbour in self.neighbours:
            neighbour.say("resume")
        try:
            self._resume(tags, faults)
        finally:
            for neighbour in self.neighbours:
                neighbour.answer()

    def _kept_bytes(self) -> int:
        """The others may take as much as they have while this process releases."""
        return super()._kept_bytes() + used_bytes() + len(self.neighbours) * PAGES * PAGE

    def _leave_nothing(self) -> None:
        for neighbour in self.neighbours:
            neighbour.obey("forget")
        super()._leave_nothing()


def used_bytes() -> int:
    store = ms.status().host_backup.shared_store
    assert store is not None
    assert store.used_bytes <= store.total_bytes <= store.limit_bytes
    return store.used_bytes


@contextmanager
def three_processes() -> Iterator[None]:
    """The saver of this process, which shares a store with two others; none of it is used at the end."""
    store = f"machine-{uuid4().hex[:12]}"
    with two_devices(shared_backups=store):
        SharingMachine.neighbours = (Neighbour(store, BACKUP_LIMIT), Neighbour(store, BACKUP_LIMIT))
        try:
            yield
            wait_until(lambda: used_bytes() == 0)  # what one that was killed was writing, too
        finally:
            for neighbour in SharingMachine.neighbours:
                neighbour.end()
