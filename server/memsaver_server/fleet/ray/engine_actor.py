"""A base class for Ray actors that run an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memsaver_server.fleet.ray.registry import Registration, register

if TYPE_CHECKING:
    from memsaver_server import Attachment
    from memsaver_server.engine import Engine


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
