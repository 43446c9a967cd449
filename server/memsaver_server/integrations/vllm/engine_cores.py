"""vLLM's engine core: the process that schedules and owns the workers; one for each data-parallel rank."""

from __future__ import annotations

import asyncio
from typing import Any

from memsaver_core.ranks.protocol import Plain


def processes(core: Any) -> dict[str, int]:
    """Return the ids of the engine core's processes, by name.

    Args:
        core: ``engine_core`` of an ``AsyncLLM`` or an ``LLMEngine``. It has none of its own if it runs in this process,
            or in Ray.
    """
    manager = getattr(getattr(core, "resources", None), "engine_manager", None)
    started = getattr(manager, "processes", ())
    return {f"engine core {number}": each.pid for number, each in enumerate(started)}


async def ask_workers(engine: Any, message: Plain) -> list[Plain]:
    """Return the answers of the workers of every engine core; ``collective_rpc`` returns those of the first alone."""
    core = getattr(engine, "engine_core", None)
    cores = getattr(core, "core_engines", ())
    if core is None or len(cores) < 2:
        answers: list[Plain] = await engine.collective_rpc("memsaver", args=(message,))
        return answers
    arguments = ("collective_rpc", "memsaver", None, (message,), None)
    told = await asyncio.gather(*(core._call_utility_async(*arguments, engine=each) for each in cores))
    return [answer for group in told for answer in group]
