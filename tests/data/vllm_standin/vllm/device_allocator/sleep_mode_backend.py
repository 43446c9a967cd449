from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar


class SleepModeBackend(ABC):
    def __init__(self) -> None:
        self._state = "RUNNING"

    @abstractmethod
    def suspend(self, level: int = 1) -> None: ...

    @abstractmethod
    def resume(self, tags: list[str] | None = None) -> None: ...

    def state(self) -> str:
        return self._state


class CuMemBackend(SleepModeBackend):
    def suspend(self, level: int = 1) -> None:
        from vllm.device_allocator import get_mem_allocator_instance

        get_mem_allocator_instance().sleep(offload_tags=("weights",) if level == 1 else ())

    def resume(self, tags: list[str] | None = None) -> None:
        from vllm.device_allocator import get_mem_allocator_instance

        get_mem_allocator_instance().wake_up(tags)


class SleepModeBackendFactory:
    _registry: ClassVar[dict[str, Callable[[], type[SleepModeBackend]]]] = {}

    @classmethod
    def register_backend(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls._registry:
            raise ValueError(f"{name} is registered already")
        cls._registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)

    @classmethod
    def get_backend_class(cls, name: str) -> type[SleepModeBackend]:
        return cls._registry[name]()

    @classmethod
    def create_backend(cls, model_config: Any) -> SleepModeBackend:
        return cls.get_backend_class(model_config.sleep_mode_backend)()


SleepModeBackendFactory.register_backend("cumem", "vllm.device_allocator.sleep_mode_backend", "CuMemBackend")
