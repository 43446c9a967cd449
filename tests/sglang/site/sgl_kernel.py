"""In the place of SGLang's kernels for CPUs, which are in no package. SGLang imports some names at its start;
without AMX it computes with torch, and calls none of them."""

from typing import NoReturn


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_arguments: object, **_named: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}")

    return missing
