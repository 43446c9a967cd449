"""What is changed in vLLM's engine core, so that a sleep or a wake-up that fails leaves an engine that serves, for
resizes of its KV cache, and for updates of weights that sleep.

vLLM pauses its scheduler before its workers sleep, and lets it go on only at a wake-up. It also stops reading the
workers' answers at the first error, so that the next call would read the others' answers to this one.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from memsaver_core.compat.patching import Function
from memsaver_core.compat.vllm import asleep, block_limit, tier
from memsaver_core.compat.vllm.allocator import is_wanted
from memsaver_core.contract.errors import MemsaverError, UnsupportedError


class WeightsGoneError(MemsaverError):
    """A sleep at level 2 failed on one worker when others had given their weights up. All are awake again."""


def on_all_workers(call: Function, executor: Any, *args: Any, **kwargs: Any) -> None:
    """``Executor.sleep`` and ``wake_up``: raise the first worker's error once every worker has answered, before the
    executor counts as asleep or awake. A sleep that fails wakes all workers; a wake-up that fails can be repeated.
    Raises WeightsGoneError if the weights must be loaded again, else MemsaverError."""
    rpc = executor.collective_rpc

    def checked(name: str, **request: Any) -> None:
        answers = rpc(asleep.CALL, args=(name,), **request)
        failures = [failure for failure, *_ in answers if failure is not None]
        if not failures:
            return
        if name == "sleep":
            gone = request["kwargs"]["level"] == 2 and any(released for *_, released in answers)
            rpc(asleep.CALL, args=("wake_up",))
            if gone:
                again = "; other workers have given up their weights: load them again, then call wake_up"
                raise WeightsGoneError(failures[0].message + again)
        raise failures[0].to_error()

    if not is_wanted(executor.vllm_config.model_config):
        call(executor, *args, **kwargs)
        return
    executor.collective_rpc = checked
    try:
        call(executor, *args, **kwargs)
    finally:
        del executor.collective_rpc


def sleep_or_serve(sleep: Function, core: Any, level: int = 1, mode: str = "abort") -> Future[Any] | None:
    """``EngineCore.sleep``: if it fails, the scheduler goes on, unless it was paused before. It stays paused, until a
    wake-up, if weights are gone; and in data-parallel engines, which can only go on together. Raises UnsupportedError
    if the level is none of vLLM's, or the KV connector cannot follow: nothing was paused."""
    if not is_wanted(core.vllm_config.model_config):
        return sleep(core, level, mode)  # type: ignore[no-any-return]
    if level > 2:
        raise UnsupportedError(
            f"vLLM's engine core has no sleep level {level}; LLM.sleep and POST /sleep hibernate by 3"
        )
    if level > 0:
        tier.check_connector(core)
        tier.begin_sleep(core, level)
    stays_paused = core.is_scheduler_paused() or getattr(core, "dp_group", None) is not None

    def go_on_after(error: BaseException | None) -> None:
        tier.end_sleep(core)
        if error is not None and not stays_paused and not isinstance(error, WeightsGoneError):
            core.resume_scheduler()

    try:
        asleep: Future[Any] | None = sleep(core, level, mode)
    except Exception as error:
        go_on_after(error)
        raise
    if asleep is None:
        tier.end_sleep(core)
    else:
        asleep.add_done_callback(lambda done: go_on_after(done.exception()))
    return asleep


def collective_rpc(
    call: Function, core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
) -> Any:
    """``EngineCore.collective_rpc``."""
    if not is_wanted(core.vllm_config.model_config):
        return call(core, method, timeout, args, kwargs)
    if method == block_limit.CALL:
        return block_limit.answer(core, *args)
    with tier.forgotten_after(core, method):
        return asleep.write(call, core, method, timeout, args, kwargs)


#: By module.
WRAPPERS: dict[str, dict[str, Function]] = {
    "vllm.v1.engine.core": {
        "EngineCore.sleep": sleep_or_serve,
        "EngineCore.collective_rpc": collective_rpc,
        "EngineCore._reset_caches": tier.reset_but_tier,
    },
    "vllm.v1.executor.abstract": {"Executor.sleep": on_all_workers, "Executor.wake_up": on_all_workers},
}
