"""Other projects' APIs; ``memsaver_core.compat.install()`` makes ``import torch_memory_saver`` import memsaver's."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from memsaver_core.contract.errors import ConfigurationError

__all__ = ["PATH", "install"]

#: On ``PYTHONPATH`` it makes ``import torch_memory_saver`` import memsaver's.
PATH = Path(__file__).with_name("path")
_NAME = "torch_memory_saver"
_OURS = f"{__name__}.{_NAME}"
#: A name with a dot, such as ``hooks.base``, stands for our module before the dot, which has the content of both.
_SUBMODULES = "binary_wrapper entrypoint hooks hooks.base hooks.mode_preload hooks.mode_torch testing_utils utils"


def install(*, subprocesses: bool = False, replace: bool = False) -> None:
    """Have ``import torch_memory_saver`` import ``memsaver_core.compat.torch_memory_saver``. Idempotent. Raises
    ConfigurationError if another one was imported already, or with ``replace`` used.

    Args:
        subprocesses: also in Python processes started from now on, by ``PYTHONPATH``.
        replace: also if another one was imported already, but not used; modules that imported it keep that one.
    """
    ours = importlib.import_module(_OURS)
    present = sys.modules.get(_NAME)
    if replace and getattr(getattr(present, _NAME, None), "_impl", ours) is None:  # it makes its own at its first use
        present = None
    if present is not None and present is not ours and not getattr(present, "MEMSAVER_FORWARDER", False):
        raise ConfigurationError(
            f"another torch_memory_saver is imported already, from {getattr(present, '__file__', 'an unknown place')}; "
            "call memsaver_core.compat.install() before the first import of it"
        )
    sys.modules[_NAME] = ours
    for name in _SUBMODULES.split():
        sys.modules[f"{_NAME}.{name}"] = importlib.import_module(f"{_OURS}.{name.partition('.')[0]}")
    if subprocesses:
        folder = str(PATH)
        others = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each and each != folder]
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, *others])
