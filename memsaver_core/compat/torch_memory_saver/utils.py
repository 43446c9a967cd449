"""Helpers that users of torch_memory_saver import."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from memsaver_core import _native
from memsaver_core.contract.errors import ConfigurationError

PRELOAD = "torch_memory_saver_hook_mode_preload"
_TORCH = "torch_memory_saver_hook_mode_torch"


def is_xpu() -> bool:
    return False


def get_binary_path_from_package(stem: str) -> Path:
    """Return the path of ``torch_memory_saver_hook_mode_preload`` or ``torch_memory_saver_hook_mode_torch``; raise
    ConfigurationError if ``stem`` is neither, or the library is missing from this installation."""
    native = Path(_native.__file__)
    if stem == _TORCH:
        return native
    if stem != PRELOAD:
        raise ConfigurationError(f"there is no library {stem!r}; there are {PRELOAD!r} and {_TORCH!r}")
    folder = native.parent / "compat"
    major = (torch.version.cuda or "").partition(".")[0]
    for suffix in (f"_cu{major}", ""):
        path = folder / f"{stem}{suffix}.abi3.so"
        if path.exists():
            return path
    raise ConfigurationError(f"{folder / stem}.abi3.so is missing; install memsaver again")


def set_variable(name: str, value: str | None) -> None:
    """Set an environment variable, or drop it if ``value`` is None."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        set_variable(key, before)
