"""What the fleet needs of a Ray cluster and Ray has no public functions for. Tested with Ray 2.60.

Ray's own libraries use the same: Serve and Tune the key-value store, the dashboard the stream of actor events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray._private import state as ray_state
from ray._private.gcs_pubsub import GcsAioActorSubscriber
from ray.experimental import internal_kv

#: Ray namespace of the coordinators' names, and of the keys in the cluster's key-value store.
NAMESPACE = "memsaver"
#: Events taken at once.
_BATCH = 1000


@dataclass(frozen=True)
class ActorState:
    """An actor, as the cluster's control service (GCS) knows it."""

    state: str  # Ray's: PENDING_CREATION, DEPENDENCIES_UNREADY, ALIVE, RESTARTING or DEAD; empty if it is not known
    cause: str = ""  # why it is dead for good, if that was not intended; else empty
    ended_at: float = 0.0  # seconds since the epoch; 0 if it has not

    @property
    def is_dead(self) -> bool:
        """It will not come back."""
        return self.state in ("DEAD", "")


def connect() -> None:
    """Connect this process to the cluster, if it is not; raise ConnectionError if this machine is in none."""
    if not ray.is_initialized():
        ray.init(address="auto", log_to_driver=False, logging_level="WARNING")


def read_key(key: str) -> bytes | None:
    return cast(bytes | None, internal_kv._internal_kv_get(key, namespace=NAMESPACE))


def write_key(key: str, value: bytes) -> None:
    internal_kv._internal_kv_put(key, value, namespace=NAMESPACE)


def delete_key(key: str) -> None:
    internal_kv._internal_kv_del(key, namespace=NAMESPACE)


def list_keys(prefix: str) -> list[str]:
    return sorted(key.decode() for key in internal_kv._internal_kv_list(prefix, namespace=NAMESPACE))


def actor_state(actor_id: str) -> ActorState:
    """Return the state of the actor with this id (hex)."""
    found: dict[str, Any] = ray_state.state.actor_table(actor_id)
    if not found:
        return ActorState("")
    cause = _cause(found["DeathCause"]) if found["State"] == "DEAD" else ""
    return ActorState(found["State"], cause, found["EndTime"] / 1000)


def _cause(death: Any) -> str:
    """Return why an actor died, from Ray's ``ActorDeathCause``; empty if it was ended on purpose."""
    kind = death.WhichOneof("context")
    if kind is None:
        return ""
    about = getattr(death, kind)
    if kind == "actor_died_error_context":
        reasons = type(about).Reason
        if about.reason not in (reasons.Value("WORKER_DIED"), reasons.Value("NODE_DIED")):
            return ""
    said = str(getattr(about, "error_message", "") or kind.removesuffix("_context"))
    return said.split(" Some common causes")[0].strip()


async def actor_events() -> AsyncIterator[set[str]]:
    """Yield the ids (hex) of actors whose state has changed, as Ray's control service publishes it."""
    subscriber = GcsAioActorSubscriber(address=ray.get_runtime_context().gcs_address)
    await subscriber.subscribe()
    yield set()  # what happened before is known to the control service
    try:
        while True:
            yield {actor.hex() for actor, _ in await subscriber.poll(_BATCH)}
    finally:
        await subscriber.close()
