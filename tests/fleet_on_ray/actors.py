"""Actors with light engines, and a fleet of them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from memsaver_server.fleet import FleetStatus
from memsaver_server.fleet.ray import EngineActor, RayFleet, register

KEY = "the key of this fleet"
MODEL = "the model"


class Engines:
    """An actor that registers by itself, with some engines."""

    def __init__(self, fleet: str, names: list[str], labels: dict[str, str] | None = None) -> None:
        from tests.fleet.light_engine import LightEngine

        self.engines = {name: LightEngine(name, model=MODEL) for name in names}
        self.registered = [
            register(engine, fleet=fleet, name=name, labels=labels) for name, engine in self.engines.items()
        ]

    def pid(self) -> int:
        return os.getpid()

    def members(self) -> list[Any]:
        return [each.member for each in self.registered]

    def whole(self) -> bool:
        return all(engine.whole() for engine in self.engines.values())

    def fail(self, name: str, call: str) -> None:
        from memsaver_core import MemsaverError

        self.engines[name].memory.fail(call, MemsaverError("the fault of this test"))

    def hold(self, name: str, call: str) -> None:
        self.engines[name].memory.hold(call)

    def reached(self, name: str, call: str) -> int:
        return int(self.engines[name].memory.reached.get(call, 0))

    def heal(self) -> None:
        for engine in self.engines.values():
            engine.memory.heal()

    def register_again(self, fleet: str, name: str) -> None:
        register(self.registered[0].member.url, fleet=fleet, name=name)

    def leave(self) -> None:
        for each in self.registered:
            each.close()


class OneEngine(EngineActor):
    """An actor by the base class."""

    def start(self, fleet: str) -> Any:
        from tests.fleet.light_engine import LightEngine

        self.fleet, self.labels = fleet, {"kind": "base class"}
        return LightEngine("base", model=MODEL)


class Site:
    """A fleet on the cluster."""

    def __init__(self, name: str, nodes: list[str]) -> None:
        self.name = name
        self.nodes = nodes
        self._actors: list[Any] = []
        self._fleet: RayFleet | None = None

    @property
    def fleet(self) -> RayFleet:
        """Its coordinator, started at first use."""
        if self._fleet is None:
            self._fleet = RayFleet(self.name, silence_s=2.0, lease_s=4.0)
        return self._fleet

    def engines(self, *names: str, node: int = 0, restarts: int = 0, labels: dict[str, str] | None = None) -> Any:
        """Start an actor with engines of these names; return once they are registered."""
        actor = self.start(Engines, node, restarts, self.name, list(names), labels)
        ray.get(actor.pid.remote())
        return actor

    def start(self, kind: Any, node: int, restarts: int, *arguments: Any, **options: Any) -> Any:
        strategy = NodeAffinitySchedulingStrategy(self.nodes[node], soft=False)
        options = {"scheduling_strategy": strategy, "num_cpus": 0, "max_concurrency": 4, **options}
        actor = ray.remote(kind).options(max_restarts=restarts, **options).remote(*arguments)
        self._actors.append(actor)
        return actor

    def status(self) -> FleetStatus:
        return self.fleet.status()

    def states(self) -> dict[str, str]:
        return {engine.name: engine.state for engine in self.status().engines}

    def kill(self, actor: Any) -> None:
        """Kill an actor's process, as the kernel does when memory runs out."""
        os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)

    def kill_coordinator(self) -> None:
        os.kill(ray.get(self.fleet.actor.where.remote())[1], signal.SIGKILL)

    def close(self) -> None:
        for actor in self._actors:
            with suppress(ray.exceptions.RayActorError):
                ray.get(actor.heal.remote() if hasattr(actor, "heal") else actor.__ray_ready__.remote())
            ray.kill(actor)
        if self._fleet is not None:
            self._fleet.stop()
