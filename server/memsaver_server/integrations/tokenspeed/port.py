"""tokenspeed's event loop as the loop of a rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from memsaver_server.integrations.scheduler_loop import ranks
from memsaver_server.integrations.scheduler_loop.event_loop import EventLoop, LeadingLoop
from memsaver_server.integrations.scheduler_loop.idle import IdleRest
from memsaver_server.integrations.tokenspeed.work import LoopWork


class Receiver:
    """Stands in for the socket that rank 0 reads: gives what ``handle`` makes of each batch of messages."""

    def __init__(self, socket: Any, handle: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._socket = socket
        self._handle = handle
        self._zmq = importlib.import_module("zmq")
        self._messages = self._batches()

    def recv_pyobj(self, flags: int) -> Any:
        """Return the next message.

        Raises:
            zmq.ZMQError: the batch is at its end.
        """
        if (message := next(self._messages)) is None:
            raise self._zmq.Again
        return message

    def _batches(self) -> Iterator[Any]:
        """Give the messages of each batch, then None."""
        while True:
            received = []
            with suppress(self._zmq.ZMQError):
                while True:
                    received.append(self._socket.recv_pyobj(self._zmq.NOBLOCK))
            yield from self._handle(received)
            yield None


def group(event_loop: Any) -> ranks.Group:
    """Return the ranks, which are those of one tensor-parallel group."""
    attention = event_loop.server_args.mapping.attn
    return ranks.Group(attention.tp_size, attention.tp_group, attention.tp_rank, event_loop.attn_tp_cpu_group)


def lead(event_loop: Any, work: LoopWork) -> LeadingLoop:
    """Return the loop of ``event_loop``, which is that of rank 0."""
    handler, ended = event_loop.request_handler, getattr(event_loop, "shutdown_event", None)
    socket = getattr(handler.recv_func, "_socket", handler.recv_func)
    idle = IdleRest([socket], work.has_nothing_to_do, 1)
    loop = LeadingLoop(work, idle, lambda: ended is not None and bool(ended.is_set()))
    handler.recv_func = Receiver(handler.recv_func, loop.handle)
    take_over(event_loop, loop, work)
    return loop


def join(event_loop: Any) -> None:
    """Have ``event_loop``, which is not that of rank 0, do what rank 0 sends."""
    work = LoopWork(event_loop)
    loop = EventLoop(work)
    take_over(event_loop, loop, work)
    ranks.join(group(event_loop), loop)


def take_over(event_loop: Any, loop: EventLoop, work: LoopWork) -> None:
    """Have each iteration of ``event_loop`` call ``loop``."""
    handler = event_loop.request_handler
    receive, process = handler.recv_reqs, handler.process_requests

    def begin() -> Any:
        loop.begin()
        return receive()

    def process_and_refuse(received: list[Any]) -> Any:
        result = process(received)
        work.refuse(*result[:2])
        work.stay_frozen()
        return result

    handler.recv_reqs = begin
    handler.process_requests = lambda received: loop.process(received, process_and_refuse)
    if hasattr(event_loop, "_paused_idle_step"):  # up to 0.1.0
        begin_iteration = event_loop._process_new_requests
        event_loop._process_new_requests = partial(stay_while_frozen, event_loop, begin_iteration, work)


def stay_while_frozen(event_loop: Any, begin_iteration: Callable[[], None], work: LoopWork) -> None:
    """Begin an iteration of ``event_loop``, and stay in it while nothing may be computed.

    The overlapping loop calls CUDA before each iteration. While the process is hibernated, such a call waits until the
    wake-up. The loop would then never receive the request for the wake-up.
    """
    was_frozen = work.frozen
    begin_iteration()
    # The iteration that froze still commits what was computed before.
    while was_frozen and work.frozen:
        event_loop._paused_idle_step()
        begin_iteration()
