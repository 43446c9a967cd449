"""Catch allocations through the shared CUDA runtime, torch's and others, by a preloaded library."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from memsaver_core import process
from memsaver_core.compat.torch_memory_saver import state
from memsaver_core.compat.torch_memory_saver.hooks.base import HookUtilBase
from memsaver_core.compat.torch_memory_saver.utils import change_env, get_binary_path_from_package

logger = logging.getLogger(__name__)

_LIBRARY = "torch_memory_saver_hook_mode_preload"


class HookUtilModePreload(HookUtilBase, mode="preload"):
    """Catches what torch allocates in a region, and raw ``cudaMalloc`` if the library was preloaded."""

    def __init__(self) -> None:
        if state.this_process.attach_library() or not process.backend().has_memory_pools:
            return
        how = "start the process inside configure_subprocess(), or with LD_PRELOAD=" + str(
            get_binary_path_from_package(_LIBRARY)
        )
        if state.flag("TMS_INIT_ENABLE"):
            raise state.MisuseError(
                "TMS_INIT_ENABLE=1 is for a process with the preload library, which is not loaded here, "
                f"so nothing outside a region could be paused; {how}"
            )
        logger.info("The preload library is not loaded: regions hold what torch allocates and nothing else; %s", how)

    def get_path_binary(self) -> str:
        """Return the path of the library that is or would be preloaded."""
        return state.this_process.attach_library() or str(get_binary_path_from_package(_LIBRARY))


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Have processes started inside load the preload library.

    When such a process imports this package, the library leaves its ``LD_PRELOAD``, so its own children do not inherit
    it (``MEMSAVER_PRELOAD_INHERIT=1`` leaves it there).

    Raises:
        ConfigurationError: the library is missing from this installation.
    """
    library = str(get_binary_path_from_package(_LIBRARY))
    others = [each for each in os.environ.get("LD_PRELOAD", "").replace(":", " ").split() if each != library]
    with change_env("LD_PRELOAD", ":".join([library, *others])):
        yield
