"""SGLang's scheduler as the loop of a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from memsaver_server.integrations.scheduler_loop import ranks
from memsaver_server.integrations.scheduler_loop.event_loop import EventLoop, LeadingLoop
from memsaver_server.integrations.scheduler_loop.idle import IdleRest
from memsaver_server.integrations.sglang import names
from memsaver_server.integrations.sglang.work import SchedulerWork


def lead(scheduler: Any, work: SchedulerWork) -> LeadingLoop:
    """Return the loop of ``scheduler``, which is rank 0."""
    receiver = scheduler.request_receiver
    sockets = [getattr(receiver, name, None) for name in ("recv_from_tokenizer", "recv_from_rpc")]
    idle = IdleRest(sockets, work.has_nothing_to_do, names.parallel(scheduler).pp_size)
    if (sleeper := getattr(scheduler, "idle_sleeper", None)) is not None and idle.poller is not None:
        sleeper.poller = idle.poller  # the sleep of --sleep-on-idle, which SGLang's own sockets alone would end
    loop = LeadingLoop(work, idle, lambda: bool(scheduler.gracefully_exit))
    blocker = receiver.input_blocker  # asked between the receipt of requests and their broadcast

    def handle(received: Sequence[Any]) -> list[Any]:
        return loop.handle(blocker.handle(received) if blocker is not None else received)

    scheduler.request_receiver = dataclasses.replace(receiver, input_blocker=SimpleNamespace(handle=handle))
    take_over(scheduler, loop)
    return loop


def join(scheduler: Any) -> None:
    """Have ``scheduler``, which is not rank 0, do what rank 0 sends."""
    loop = EventLoop(SchedulerWork(scheduler))
    take_over(scheduler, loop)
    ranks.join(scheduler.world_group, loop)


def take_over(scheduler: Any, loop: EventLoop) -> None:
    """Have each iteration of ``scheduler`` call ``loop``."""
    receive, process = scheduler.request_receiver.recv_requests, scheduler.process_input_requests

    def begin(*arguments: Any, **named: Any) -> Any:
        loop.begin()
        return receive(*arguments, **named)

    scheduler.request_receiver = SimpleNamespace(recv_requests=begin)
    scheduler.process_input_requests = lambda received: loop.process(received or (), process)
