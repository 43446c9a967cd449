"""The two ways to catch allocations, by name."""

from __future__ import annotations

from typing import ClassVar, Literal

HookMode = Literal["preload", "torch"]


class HookUtilBase:
    """A way to catch allocations. Subclasses give the mode that they are created by."""

    _modes: ClassVar[dict[str, type[HookUtilBase]]] = {}

    def __init_subclass__(cls, mode: HookMode) -> None:
        HookUtilBase._modes[mode] = cls

    @staticmethod
    def create(hook_mode: HookMode) -> HookUtilBase:
        """Return an object of the class for ``hook_mode``; raises KeyError if there is none."""
        return HookUtilBase._modes[hook_mode]()

    def get_path_binary(self) -> str:
        """Return the path of the library that catches allocations."""
        raise NotImplementedError
