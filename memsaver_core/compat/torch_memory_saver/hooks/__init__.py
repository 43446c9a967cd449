"""Ways to catch allocations. Importing the package registers both with ``base.HookUtilBase.create``."""

from memsaver_core.compat.torch_memory_saver.hooks import mode_preload as mode_preload
from memsaver_core.compat.torch_memory_saver.hooks import mode_torch as mode_torch
