"""tokenspeed's event loop under the names that the loop and the ranks of the SGLang integration use.

Both engines iterate alike: rank 0 receives requests and broadcasts them, and every rank processes them once per
iteration. tokenspeed's ``RequestHandler`` does both, by ``recv_reqs`` and ``process_requests``.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from memsaver_server.integrations.tokenspeed.work import LoopWork


class Everything:
    """Broadcasts whatever was received: every rank refuses the same requests, or has them wait."""

    def admit(self, received: Sequence[Any]) -> list[Any]:
        return list(received)


@dataclasses.dataclass
class Receiver:
    """Stands in for the socket that rank 0 reads: gives what ``input_blocker`` makes of each batch of messages."""

    socket: Any
    receive: Callable[[Any], Any]
    input_blocker: Any = None
    ready: deque[Any] = dataclasses.field(default_factory=deque)
    asked: bool = False

    @property
    def recv_from_tokenizer(self) -> Any:
        """What the rest of an idle loop polls."""
        return getattr(self.socket, "_socket", self.socket)

    def recv_requests(self) -> Any:
        return self.receive(self)

    def recv_pyobj(self, flags: int = 0) -> Any:
        """Return the next message.

        Raises:
            zmq.ZMQError: there is none now.
        """
        again = importlib.import_module("zmq").Again
        if not self.asked:
            received = []
            while True:
                try:
                    received.append(self.socket.recv_pyobj(flags))
                except again:
                    break
            self.ready.extend(self.input_blocker.handle(received) if self.input_blocker else received)
        self.asked = bool(self.ready)
        if not self.ready:
            raise again
        return self.ready.popleft()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)


@dataclasses.dataclass(frozen=True)
class Step:
    """A broadcast call of a method of ``LoopWork`` of which nobody waits for the end."""

    name: str
    arguments: tuple[Any, ...] = ()


class Port:
    """An event loop of tokenspeed.

    Attributes:
        ps: ``tp_rank`` and the like.
        world_group: the ranks, which are those of one tensor-parallel group.
        sent: called in the loop's thread with each answer to tokenspeed's own server.
    """

    def __init__(self, loop: Any, work: LoopWork) -> None:
        self._loop = loop
        self._work = work
        self.handler = loop.request_handler
        attention = loop.server_args.mapping.attn
        self.ps = SimpleNamespace(
            tp_rank=attention.tp_rank, tp_size=attention.tp_size, pp_rank=0, pp_size=1, dp_size=attention.dp_size
        )
        self.world_group = SimpleNamespace(
            world_size=attention.tp_size,
            ranks=attention.tp_group,
            rank_in_group=attention.tp_rank,
            cpu_group=loop.attn_tp_cpu_group,
        )
        self.sent: Callable[[Any], None] = lambda output: None
        self._result: Any = None
        self._recv_reqs, self._process_requests = self.handler.recv_reqs, self.handler.process_requests
        self._send = self.handler.send_func
        self.request_receiver: Any = Receiver(self.handler.recv_func, self._receive)
        self.process_input_requests: Callable[[Sequence[Any]], None] = self._process
        self._request_dispatcher: Any = None
        self.handler.recv_reqs = lambda: self.request_receiver.recv_requests()
        self.handler.process_requests = self._process_all
        self.handler.send_func = self

    @property
    def gracefully_exit(self) -> bool:
        """Whether the loop is about to end."""
        ended = getattr(self._loop, "shutdown_event", None)
        return ended is not None and bool(ended.is_set())

    # In the loop's thread.

    def send_pyobj(self, output: Any) -> None:
        """Stands in for the handler's socket to tokenspeed's server."""
        self.sent(output)
        self._send.send_pyobj(output)

    def _receive(self, receiver: Receiver) -> Any:
        if self.handler.recv_func is not None:
            self.handler.recv_func = receiver
        return self._recv_reqs()

    def _process_all(self, received: Sequence[Any]) -> Any:
        self.process_input_requests(received)
        return self._result

    def _process(self, received: Sequence[Any]) -> None:
        for step in received:
            if isinstance(step, Step):
                getattr(self._work, step.name)(*step.arguments)
        self._result = self._process_requests([each for each in received if not isinstance(each, Step)])
        self._work.refuse(*self._result[:2])
        self._work.stay_frozen()
