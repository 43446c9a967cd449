"""tokenspeed's engine process with memsaver, for versions without plugins (up to 0.1.0):
``TS_SERVE_ENGINE_MODULE=memsaver_server.integrations.tokenspeed.serve tokenspeed serve ...``.

tokenspeed starts its schedulers by multiprocessing's ``spawn``, which imports this module in each of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import runpy
from collections.abc import Awaitable, Callable
from typing import Any

from memsaver_server.integrations.tokenspeed.plugin import register

CALLS = ("release_memory_occupation", "resume_memory_occupation")


def prepare() -> None:
    """Do in this process what a plugin would. The HTTP server of these versions answers with success whatever its
    scheduler says: have it answer a failure with status 500 and the message."""
    register()
    if importlib.util.find_spec("tokenspeed.runtime.plugins") is None:
        client = importlib.import_module("tokenspeed.runtime.engine.scheduler_control_client").SchedulerControlClient
        for call in CALLS:
            setattr(client, call, _raising(getattr(client, call)))


def _raising(call: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def called(client: Any, request: Any) -> Any:
        output = await call(client, request)
        if not output.success:
            raise RuntimeError(output.message)
        return output

    return called


if __name__ in ("__main__", "__mp_main__"):
    prepare()
if __name__ == "__main__":
    runpy.run_module("smg_grpc_servicer.tokenspeed", run_name="__main__", alter_sys=False)
