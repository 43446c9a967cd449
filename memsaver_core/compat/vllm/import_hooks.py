"""Patching functions, and modules right after their import, so that a plugin need not import them."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

Patch = Callable[[ModuleType], None]
Function = Callable[..., Any]

_lock = threading.Lock()
_patches: dict[str, list[Patch]] = {}


def wrap(owner: Any, name: str, wrapper: Function) -> None:
    """Have ``wrapper(original, ...)`` called in place of a function; do nothing if there is none, or it is wrapped."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_memsaver_wraps"):
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    call._memsaver_wraps = original  # type: ignore[attr-defined]
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    setattr(owner, name, staticmethod(call) if is_static else call)


def when_imported(name: str, patch: Patch) -> None:
    """Call ``patch`` with the module ``name``: now if it is imported already, else right after its import.

    A patch that fails is logged, and the import succeeds.
    """
    with _lock:
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        module = sys.modules.get(name)
        # A module that is being imported right now has its spec, but not yet its content.
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            _patches.setdefault(name, []).append(patch)
            return
    _apply(module, patch)


def _apply(module: ModuleType, patch: Patch) -> None:
    try:
        patch(module)
    except Exception:
        logger.exception("memsaver cannot patch %s; it stays unpatched", module.__name__)


class _Finder(importlib.abc.MetaPathFinder):
    """Delegates watched modules to the remaining finders and wraps their loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _patches:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: importlib.machinery.ModuleSpec | None = find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads a module by its own loader, then applies its patches."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module sees its own loader, which knows where its source and data are.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with _lock:
            patches = _patches.pop(module.__name__, [])
        for patch in patches:
            _apply(module, patch)


_finder = _Finder()
