"""Fleets on Ray: engines in actors, the coordinator as an actor, its record in the cluster's own store.

In the actor of each engine::

    register("http://127.0.0.1:30000")    # or what attach() returned, or an engine

and wherever the training loop runs::

    fleet = RayFleet()
    fleet.release()
"""

from __future__ import annotations

from memsaver_server.fleet.ray.cluster import connect
from memsaver_server.fleet.ray.coordinator import RayFleet, coordinator
from memsaver_server.fleet.ray.membership import RayMembership
from memsaver_server.fleet.ray.record import RayRecord
from memsaver_server.fleet.ray.registry import EngineActor, Registration, placement_group_labels, register

__all__ = [
    "EngineActor",
    "RayFleet",
    "RayMembership",
    "RayRecord",
    "Registration",
    "connect",
    "coordinator",
    "placement_group_labels",
    "register",
]
