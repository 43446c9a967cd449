"""The API of torch_memory_saver on top of memsaver_core. What ends the process there raises ``MemsaverError``."""

from __future__ import annotations

from memsaver_core.compat.torch_memory_saver import state
from memsaver_core.compat.torch_memory_saver.entrypoint import TorchMemorySaver
from memsaver_core.compat.torch_memory_saver.hooks import configure_subprocess

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

state.attach_library()

torch_memory_saver = TorchMemorySaver()
