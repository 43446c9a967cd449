"""Sees weights being written in vLLM's workers.

vLLM's own reload, its weight transfer and trainers' worker extensions all reach the workers by ``collective_rpc``, from
vLLM's routes or from this process. So what counts as an update is a call of that whose method names weights, once it
has returned. An update in several calls counts with its first one, as nothing marks the last: callers keep the KV cache
asleep, or generation paused, until all are done.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

#: Methods that write weights: all that name them, but for those that prepare, ask or only set a version.
_WRITES = re.compile(r"(?!init|start|begin|get|check|reset|destroy)(?!.*version).*weight", re.IGNORECASE)


def writes_weights(method: object) -> bool:
    """Return whether ``method``, a name or a function, writes weights by its name."""
    name = method if isinstance(method, str) else getattr(method, "__name__", "")
    return _WRITES.match(name) is not None


def watch_updates(engine: Any, updated: Callable[[], None]) -> None:
    """Have ``updated`` called after each call of ``engine.collective_rpc`` that has written weights.

    Args:
        engine: vLLM's engine client, or an ``LLM``.
    """
    call = engine.collective_rpc

    if inspect.iscoroutinefunction(call):

        @functools.wraps(call)
        async def watched(method: Any, *args: Any, **kwargs: Any) -> Any:
            result = await call(method, *args, **kwargs)
            if writes_weights(method):
                updated()
            return result

    else:

        @functools.wraps(call)
        def watched(method: Any, *args: Any, **kwargs: Any) -> Any:
            result = call(method, *args, **kwargs)
            if writes_weights(method):
                updated()
            return result

    engine.collective_rpc = watched
