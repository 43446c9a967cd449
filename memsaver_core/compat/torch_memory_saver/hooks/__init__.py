"""``torch_memory_saver.hooks`` and its modules: the two ways to catch allocations."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager
from typing import Literal

from memsaver_core import _native, process
from memsaver_core.compat.torch_memory_saver import state
from memsaver_core.compat.torch_memory_saver.utils import PRELOAD, change_env, get_binary_path_from_package

logger = logging.getLogger("memsaver")

HookMode = Literal["preload", "torch"]
base = mode_preload = mode_torch = sys.modules[__name__]


class HookUtilBase:
    """A way to catch allocations."""

    @staticmethod
    def create(hook_mode: HookMode) -> HookUtilBase:
        """Return an object of the class for ``hook_mode``; raises KeyError if there is none."""
        return {"preload": HookUtilModePreload, "torch": HookUtilModeTorch}[hook_mode]()


class HookUtilModePreload(HookUtilBase):
    """Catches what torch allocates in a region, and raw ``cudaMalloc`` if the library was preloaded."""

    def __init__(self) -> None:
        if state.attach_library() or not process.backend().has_memory_pools:
            return
        how = "start the process inside configure_subprocess(), or with LD_PRELOAD=" + self.get_path_binary()
        if state.flag("TMS_INIT_ENABLE"):
            raise state.MisuseError(
                "TMS_INIT_ENABLE=1 is for a process with the preload library, which is not loaded here, "
                f"so nothing outside a region could be paused; {how}"
            )
        logger.info("The preload library is not loaded: regions hold what torch allocates and nothing else; %s", how)

    @staticmethod
    def get_path_binary() -> str:
        """Return the path of the library that is or would be preloaded."""
        return state.attach_library() or str(get_binary_path_from_package(PRELOAD))


class HookUtilModeTorch(HookUtilBase):
    """Catches what torch allocates in a region, by its pluggable allocator."""

    def get_path_binary(self) -> str:
        """Return the path of the native core, whose functions torch calls."""
        return _native.__file__


def configure_subprocess() -> AbstractContextManager[None]:
    """Have processes started inside load the preload library; raise ConfigurationError if it is not installed. When
    such a process imports this package, the library leaves its ``LD_PRELOAD``, so its own children do not inherit it
    (``MEMSAVER_PRELOAD_INHERIT=1`` leaves it there)."""
    library = str(get_binary_path_from_package(PRELOAD))
    others = [each for each in state.preloaded() if each != library]
    return change_env("LD_PRELOAD", ":".join([library, *others]))
