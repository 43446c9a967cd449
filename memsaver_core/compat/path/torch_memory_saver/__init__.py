"""With this folder's parent on the path, ``import torch_memory_saver`` is memsaver's."""

MEMSAVER_FORWARDER = True

from memsaver_core.compat import install  # noqa: E402

install()
