"""Stands in for vLLM's protocol modules, which Ray Serve LLM's ingress imports. vLLM itself needs a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Protocol(ModuleType):
    """A package whose every public name is a model that takes any field."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        from pydantic import BaseModel

        made = type(name, (BaseModel,), {"__module__": self.__name__, "model_config": {"extra": "allow"}})
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "vllm" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Protocol(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def installed() -> Iterator[None]:
    """Have the modules importable in this process while the block runs."""
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]


if __name__ == "sitecustomize":  # in a worker process of Ray, by its PYTHONPATH
    sys.meta_path.append(_Finder())
