"""Engines enter a fleet from the actors in which they run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from pydantic import BaseModel
from ray.util import get_current_placement_group, get_node_ip_address

from memsaver_server.client import Client, ClientError
from memsaver_server.fleet.members import Member, checked
from memsaver_server.fleet.ray.cluster import NAMESPACE, actor_state, delete_key, list_keys, read_key, write_key
from memsaver_server.fleet.results import FleetError

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from memsaver_server import Attachment
    from memsaver_server.engine import Engine

#: Labels that every member has: its node and, if it is in one, its placement group, by Ray's ids in hex.
NODE_LABEL = "ray.io/node-id"
PLACEMENT_GROUP_LABEL = "ray.io/placement-group-id"


class Entry(BaseModel):
    """What the cluster's key-value store holds of an engine. It holds no keys: everybody in the cluster can read it."""

    actor: str
    member: Member


@dataclass
class Registration:
    """An engine's place in a fleet. It ends with the actor, however that ends, or by ``close``."""

    fleet: str
    member: Member
    _attachment: Attachment | None = None

    def close(self) -> None:
        """Leave the fleet, and end the service if ``register`` has started it. Idempotent."""
        delete_key(_key(self.fleet, self.member.name))
        notify(self.fleet)
        if self._attachment is not None:
            self._attachment.close()


def register(
    service: Engine | Attachment | str,
    *,
    fleet: str = "default",
    name: str | None = None,
    model: str = "",
    labels: Mapping[str, str] | None = None,
    gpus: Sequence[str] = (),
    api_key: str | None = None,
) -> Registration:
    """Enter the engine of this actor into a fleet. Call it in the actor; after its restart, call it again.

    Args:
        service: the address of a service that runs already, or what ``attach`` returned, or an engine. An engine is
            served on the node's address and a free port. This needs ``MEMSAVER_API_KEY``.
        fleet: the fleet's name; its coordinator is made by ``RayFleet``.
        name: unique in the fleet. The default is the actor's name, or ``engine-`` and its id.
        model: what it serves; the default is what the service says.
        labels: for selectors. The node's labels, its id and the placement group's are added.
        gpus: UUIDs of its GPUs; the default is what the service says.
        api_key: of the service; the default is ``MEMSAVER_API_KEY``. It is used here only, and stored nowhere.

    Raises:
        FleetError: this is no actor, the service does not answer, or a living actor has the name.
        MembershipError: the address is none, or has credentials.
        ConfigurationError: as for ``memsaver_server.attach``.
    """
    context = ray.get_runtime_context()
    actor = context.get_actor_id()
    if actor is None:
        raise FleetError("register() enters the actor that it is called in; call it inside of the actor of the engine")
    name = name or context.get_actor_name() or f"engine-{actor[:12]}"
    _check_is_free(fleet, name, actor)
    started = None
    if not isinstance(service, str) and not hasattr(service, "url"):
        from memsaver_server import attach

        service = started = attach(service, host=get_node_ip_address())
    url = service if isinstance(service, str) else service.url
    checked([Member(name, url)])
    try:
        its_model, its_gpus = _ask(url, api_key or os.environ.get("MEMSAVER_API_KEY"))
        member = Member(
            name=name,
            url=url,
            model=model or its_model,
            labels={**_places(context), **(labels or {})},
            host=get_node_ip_address(),
            gpus=tuple(gpus) or its_gpus,
        )
        write_key(_key(fleet, name), Entry(actor=actor, member=member).model_dump_json().encode())
    except BaseException:
        if started is not None:
            started.close()
        raise
    notify(fleet)
    return Registration(fleet, member, started)


class EngineActor:
    """Starts an engine and enters it into a fleet, also after a restart of the actor::

        @ray.remote(num_gpus=1, max_restarts=-1)
        class Rollout(EngineActor):
            fleet = "rollout"

            def start(self, model):
                return attach_to(LLM(model, enable_sleep_mode=True), host=ray.util.get_node_ip_address())

    The arguments of the actor are those of ``start``.

    Attributes:
        fleet: the name of the fleet.
        labels: for selectors.
    """

    fleet: str = "default"
    labels: Mapping[str, str] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.registration: Registration = register(self.start(*args, **kwargs), fleet=self.fleet, labels=self.labels)

    def start(self, *args: Any, **kwargs: Any) -> Engine | Attachment | str:
        """Start the engine; return it, what ``attach`` returned for it, or the address of its service."""
        raise NotImplementedError

    def address(self) -> str:
        return self.registration.member.url

    def leave(self) -> None:
        """Leave the fleet. The actor goes on."""
        self.registration.close()


def entries(fleet: str) -> list[Entry]:
    """Return what is registered, those whose actors have died included."""
    found = (read_key(key) for key in list_keys(_key(fleet, "")))
    return [Entry.model_validate_json(each) for each in found if each is not None]


def forget(fleet: str, entry: Entry) -> None:
    """Remove ``entry``, unless its name belongs to another actor by now."""
    key = _key(fleet, entry.member.name)
    stored = read_key(key)
    if stored is not None and Entry.model_validate_json(stored).actor == entry.actor:
        delete_key(key)


def placement_group_labels(group: PlacementGroup) -> dict[str, str]:
    """Return the labels of the engines in ``group``, for ``Selector(labels=...)``."""
    return {PLACEMENT_GROUP_LABEL: group.id.hex()}


def coordinator_name(fleet: str) -> str:
    return f"coordinator/{fleet}"


def notify(fleet: str) -> None:
    """Let the coordinator, if there is one, know that the members have changed. Does not wait."""
    try:
        ray.get_actor(coordinator_name(fleet), namespace=NAMESPACE).members_changed.remote()
    except ValueError:  # it reads the members when it starts
        return


def _key(fleet: str, name: str) -> str:
    return f"member/{fleet}/{name}"


def _check_is_free(fleet: str, name: str, actor: str) -> None:
    stored = read_key(_key(fleet, name))
    other = Entry.model_validate_json(stored).actor if stored is not None else actor
    if other != actor and not actor_state(other).is_dead:
        raise FleetError(f"actor {other} of fleet {fleet!r} is called {name!r} already; give another name")


def _ask(url: str, api_key: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the model and the UUIDs of the GPUs, as the service says."""
    try:
        with Client(url, api_key=api_key) as client:
            now = client.occupation()
    except ClientError as error:
        why = f"its service at {url} does not say its state: {error}"
        raise FleetError(f"the engine cannot be registered: {why}") from error
    return now.model, tuple(device.uuid for device in now.devices)


def _places(context: Any) -> dict[str, str]:
    """Return the labels of the node and the placement group of this actor."""
    labels = {**context.get_node_labels(), NODE_LABEL: context.get_node_id()}
    group = get_current_placement_group()
    return labels if group is None else {**labels, **placement_group_labels(group)}
