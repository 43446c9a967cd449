"""The two ways in which allocations are caught."""

from __future__ import annotations

from typing import Literal

HookMode = Literal["preload", "torch"]


class HookUtilBase:
    """A way in which allocations are caught."""

    @staticmethod
    def create(hook_mode: HookMode) -> HookUtilBase:
        """The one that ``hook_mode`` names; KeyError where it names none."""
        from memsaver_core.compat.torch_memory_saver.hooks.mode_preload import HookUtilModePreload
        from memsaver_core.compat.torch_memory_saver.hooks.mode_torch import HookUtilModeTorch

        modes: dict[str, type[HookUtilBase]] = {"preload": HookUtilModePreload, "torch": HookUtilModeTorch}
        return modes[hook_mode]()

    def get_path_binary(self) -> str:
        """The library that catches allocations."""
        raise NotImplementedError
