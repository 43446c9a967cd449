"""tokenspeed's engine process with memsaver, for versions without plugins (up to 0.1.0):
``TS_SERVE_ENGINE_MODULE=memsaver_server.integrations.tokenspeed.serve tokenspeed serve ...``.

tokenspeed starts its schedulers by multiprocessing's ``spawn``, which imports this module in each of them.
"""

from __future__ import annotations

import runpy

from memsaver_server.integrations.tokenspeed.plugin import register

register()
if __name__ == "__main__":
    runpy.run_module("smg_grpc_servicer.tokenspeed", run_name="__main__", alter_sys=False)
