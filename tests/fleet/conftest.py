"""Fixtures: three light engines, each behind a wire, and coordinators of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

# Before memsaver is loaded: these tests are about fleets, and run on the host driver everywhere.
os.environ.setdefault("MEMSAVER_DRIVER", "host")
os.environ.setdefault("MEMSAVER_HOST_CAPACITY", str(64 << 20))  # so that tests can fill the device

import httpx
import pytest
import torch

from memsaver_server import Attachment, Settings, attach
from memsaver_server.fleet import Fleet, Member, StaticMembership
from tests.clock import CLOCK
from tests.waiting import wait_until

from .light_engine import LightEngine
from .served_fleet import TRUST
from .wire import Loop, Wire

CLOCK.install()
NAMES = ("a", "b", "c")
#: Short, so that what waits for them does not make the tests slow.
SILENCE_S, LEASE_S = 1.5, 3.0


class Site:
    """An engine, its service and the wire to it."""

    def __init__(self, name: str, loop: Loop) -> None:
        self.engine = LightEngine(name, model=f"model of {name}")
        self.attachment: Attachment = attach(self.engine, settings=Settings(phase_timeout_s=60))
        self.wire = Wire(self.attachment.url, loop.loop)
        self.member = Member(name, self.wire.url)
        self.http = httpx.Client(base_url=self.attachment.url, timeout=600, verify=False)

    @property
    def is_open(self) -> bool:
        """Whether the engine takes requests, and nothing is prepared or in progress."""
        now = self.http.get("/memory_occupation").json()
        return now["admission"]["open"] and now["operation_id"] is None

    @property
    def is_serving(self) -> bool:
        """Whether all is as in an engine that was never released."""
        return self.engine.whole() and self.is_open

    @property
    def is_released(self) -> bool:
        now = self.http.get("/memory_occupation").json()
        return not self.engine.resident() and now["operation_id"] is None

    @property
    def free_bytes(self) -> int:
        """Of the device, as the engine tells it; a reading may be of a moment ago."""
        free: int = self.http.get("/memory_occupation").json()["devices"][0]["free_bytes"]
        return free

    def write(self) -> None:
        """Write what was lost."""
        self.engine.weights.copy_(torch.arange(len(self.engine.weights)))
        self.http.post("/content_written", json={}).raise_for_status()

    def reset(self) -> None:
        self.wire.heal()
        self.wire.seen.clear()
        self.engine.memory.heal()
        controller = self.attachment._server.config.app.state.memsaver.controller  # type: ignore[union-attr]
        controller._held.clear()  # coordinators of this test, for 30 s
        self.http.post("/resume_memory_occupation", json={"wait": True}).raise_for_status()
        self.write()
        wait_until(lambda: self.is_serving)


Sites = dict[str, Site]


@pytest.fixture(autouse=True)
def _limits_of_time() -> Iterator[None]:
    with CLOCK.held():
        yield


@pytest.fixture(scope="package")
def _sites() -> Iterator[Sites]:
    loop = Loop()
    sites = {name: Site(name, loop) for name in NAMES}
    yield sites
    for site in sites.values():
        site.wire.close()
        site.attachment.close()
    loop.close()


@pytest.fixture
def sites(_sites: Sites) -> Iterator[Sites]:
    """The engines, serving, without faults."""
    yield _sites
    for site in _sites.values():
        site.reset()


@pytest.fixture
def coordinate(sites: Sites) -> Iterator[Callable[..., Fleet]]:
    """Make a coordinator of the engines."""
    made: list[Fleet] = []

    def make(**options: object) -> Fleet:
        members = StaticMembership([site.member for site in sites.values()])
        made.append(Fleet(members, **{"silence_s": SILENCE_S, "lease_s": LEASE_S, "verify": TRUST, **options}))
        return made[-1]

    yield make
    for site in sites.values():
        site.wire.heal()
        site.engine.memory.heal()
    for fleet in made:
        fleet.close()


@pytest.fixture
def fleet(coordinate: Callable[..., Fleet]) -> Fleet:
    return coordinate()
