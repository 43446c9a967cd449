"""What a sleep does to the tier: the cache that a KV connector keeps elsewhere, in host memory or on disk.

vLLM resets the tier in each sleep: the hashes of its prefixes do not cover the weights, which may be others afterwards.
With memsaver they are the same, unless the sleep discards them or a call writes them. Only then the tier is reset.

A connector's stores, also those that are not submitted yet, count as work of vLLM's scheduler (``has_requests``). So a
pause ends after all stores, none reads memory that was released, and the tier needs no flush. An engine core in the
caller's process does not step by itself: ``begin_sleep`` has it carry out its stores.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from memsaver_core.compat.patching import Function
from memsaver_core.contract.errors import UnsupportedError

#: Connectors that can follow a sleep, in versions of vLLM whose connectors do not say so. All their work on the cache
#: has ended when a pause has: that of the first counts as work, that of the second is done in each step. Others keep
#: the cache registered with a network card or with another process, which would go on to use memory that has gone.
FOLLOWING = ("OffloadingConnector", "LMCacheConnectorV1")

#: The attribute of an engine core whose sleep keeps the tier.
_KEEPS = "_memsaver_keeps_tier"

#: Methods of workers that write weights: those with "weight" in their name that do not prepare, ask or set a version.
_WRITES = re.compile(r"(?!init|start|begin|get|check|reset|destroy)(?!.*version).*weight", re.IGNORECASE)


def writes_weights(method: Any) -> bool:
    """Return whether a ``collective_rpc`` of this method, or function, writes weights, by its name."""
    return _WRITES.match(method if isinstance(method, str) else getattr(method, "__name__", "")) is not None


def _connector(core: Any) -> Any:
    return getattr(getattr(core, "scheduler", None), "connector", None)


def check_connector(core: Any) -> None:
    """Raise UnsupportedError if the core's KV connector may use the cache while its memory is released."""
    connector = _connector(core)
    if connector is None or hasattr(connector, "supports_sleep_mode"):  # from vLLM 0.33 on, which asked it at the start
        return
    if (name := type(connector).__name__) not in FOLLOWING:
        raise UnsupportedError(
            f"the KV connector {name} may use the KV cache while its memory is released; to sleep, start vLLM with "
            f"another (of these {', '.join(FOLLOWING)} can follow), or without --kv-transfer-config"
        )


def begin_sleep(core: Any, level: int) -> None:
    """The core is about to sleep at ``level``: from now on its resets leave the tier alone if the weights stay."""
    setattr(core, _KEEPS, level == 1)
    if _connector(core) is None or hasattr(core, "input_queue"):  # a core with a loop steps by itself
        return
    while core.scheduler.has_requests() and not core.scheduler.has_unfinished_requests():
        core.step_fn()
        time.sleep(0.001)


def end_sleep(core: Any) -> None:
    """The core is asleep, or could not fall asleep: its resets are vLLM's again."""
    setattr(core, _KEEPS, False)


def reset_but_tier(
    reset_caches: Function, core: Any, reset_running_requests: bool = True, reset_connector: bool = True
) -> None:
    """``EngineCore._reset_caches``. Resets the tier, too, if stores are pending, or are still to come for requests that
    have just ended: they would store zeros."""
    kept = getattr(core, _KEEPS, False) and _connector(core) is not None and not core.scheduler.has_requests()
    reset_caches(core, reset_running_requests, reset_connector and not kept)


@contextmanager
def forgotten_after(core: Any, method: Any) -> Iterator[None]:
    """Forget the tier after the block, a ``collective_rpc`` of ``method``, if that writes weights, also if it fails."""
    try:
        yield
    finally:
        if _connector(core) is not None and writes_weights(method):
            core.scheduler.reset_connector_cache()
