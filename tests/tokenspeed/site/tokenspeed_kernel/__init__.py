"""Stands in for tokenspeed's kernels, which cannot be imported without a GPU: every name exists, none can be called.

Nothing else of tokenspeed is replaced by it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

CONSTANTS = {"CHUNK_SIZE": 64}
#: What the functions return that are called and are no kernels.
ANSWERS = {
    "compile_stats": None,
    "discover_plugins": None,
    "get_compiler_backend": "inductor",
    "install_compile_monitor": None,
}


class Kernel:
    """A name of the package. Attributes of a platform are false: it is of no vendor."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._name in ("current_platform", "Platform.get"):
            return Kernel("platform")
        if self._name in ANSWERS:
            return ANSWERS[self._name]
        raise RuntimeError(f"tokenspeed_kernel's {self._name} was called, of which the tests have no implementation")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return False if self._name == "platform" else Kernel(f"{self._name}.{name}")

    def __or__(self, other: object) -> Any:
        return self

    __ror__ = __or__


class Module(ModuleType):
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return CONSTANTS.get(name) or Kernel(name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        inside = name.startswith("tokenspeed_kernel.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if inside else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Module:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Kernel(name)
