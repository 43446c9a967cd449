"""tokenspeed's engine process with memsaver, for versions without plugins (up to 0.1.0):
``TS_SERVE_ENGINE_MODULE=memsaver_server.integrations.tokenspeed.serve tokenspeed serve ...``. tokenspeed starts its
schedulers by multiprocessing's ``spawn``, which imports this module in each of them."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
from typing import Any

from memsaver_core.compat.patching import wrap
from memsaver_server.integrations.tokenspeed.plugin import register


class RaisingClient:
    """tokenspeed's client of its scheduler, with memory calls that raise if the scheduler failed."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)

        async def raising(request: Any) -> Any:
            output = await call(request)
            if not output.success:
                raise RuntimeError(output.message)
            return output

        return raising if name in ("release_memory_occupation", "resume_memory_occupation") else call


def prepare() -> None:
    """Do in this process what a plugin would. The HTTP server of these versions reports success whatever its scheduler
    answers; have it report a failure with status 500 and the scheduler's message."""
    register()
    if importlib.util.find_spec("tokenspeed.runtime.plugins") is None:
        routes = importlib.import_module("tokenspeed.runtime.entrypoints.sglang_compat_http")
        wrap(routes, "_llm", lambda client_of, request: RaisingClient(client_of(request)))


if __name__ in ("__main__", "__mp_main__"):
    prepare()
if __name__ == "__main__":
    runpy.run_module("smg_grpc_servicer.tokenspeed", run_name="__main__", alter_sys=False)
