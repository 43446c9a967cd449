"""Patches functions, and modules right after their import, so that a plugin need not import them."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

logger = logging.getLogger("memsaver")

Patch = Callable[[ModuleType], None]
Function = Callable[..., Any]

_lock = threading.Lock()
_patches: dict[str, list[Patch]] = {}


def wrap(owner: Any, name: str, wrapper: Function, *, again: bool = False) -> None:
    """Have ``wrapper(original, ...)`` called in place of ``owner.name``; do nothing if there is no such function, or if
    it is wrapped already, unless ``again``. ``owner`` is a module, a class, or one object, whose calls alone change."""
    original = getattr(owner, name, None)
    if original is None or (hasattr(original, "_memsaver_wraps") and not again):
        return

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    call._memsaver_wraps = original  # type: ignore[attr-defined]
    is_static = isinstance(inspect.getattr_static(owner, name, None), (staticmethod, classmethod))
    setattr(owner, name, staticmethod(call) if is_static else call)


def wrap_in(module: str, wrappers: Mapping[str, Function]) -> None:
    """Wrap functions of a module once it is imported, by their names in it (``function`` or ``Class.method``)."""

    def patch(imported: ModuleType) -> None:
        for path, wrapper in wrappers.items():
            owner, _, name = path.rpartition(".")
            if owner and not hasattr(imported, owner):
                logger.warning("memsaver finds no %s in %s", owner, module)
            else:
                wrap(getattr(imported, owner) if owner else imported, name, wrapper)

    when_imported(module, patch)


def when_imported(name: str, patch: Patch) -> None:
    """Call ``patch`` with the module ``name``: now if it is imported, else right after that. A failure is logged."""
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
    """Finds modules that are to be patched, by the other finders, and patches them once they are executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _patches:
            return None
        others = [each.find_spec for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        spec = next(filter(None, (find(name, path, target) for find in others)), None)
        if spec is not None and spec.loader is not None:
            execute = functools.partial(_execute, spec.loader.exec_module)
            spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    with _lock:
        patches = _patches.pop(module.__name__, [])
    for patch in patches:
        _apply(module, patch)


_finder = _Finder()
