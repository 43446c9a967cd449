"""Changing a module at the moment when somebody imports it, so that a plugin imports nothing of its own accord."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

logger = logging.getLogger(__name__)

Change = Callable[[ModuleType], None]

_lock = threading.Lock()
_changes: dict[str, list[Change]] = {}


def when_imported(name: str, change: Change) -> None:
    """Call ``change`` with the module ``name``: now where it is imported already, else right after its import.

    A change that fails is logged, and the import goes on: the module is as its authors made it then.
    """
    with _lock:
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        module = sys.modules.get(name)
        # A module that is being imported right now has its spec, and not yet its content.
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            _changes.setdefault(name, []).append(change)
            return
    _apply(module, change)


def _apply(module: ModuleType, change: Change) -> None:
    try:
        change(module)
    except Exception:
        logger.exception("memsaver cannot change %s; it stays as it is", module.__name__)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what somebody waits for by way of the finders after it, and wraps the loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _changes:
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
    """The module's own loader, and after it what waits for the module."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # From here on the module is its own loader's, which knows where its source and its data lie.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        with _lock:
            changes = _changes.pop(module.__name__, [])
        for change in changes:
            _apply(module, change)


_finder = _Finder()
