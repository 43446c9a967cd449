"""``import torch_memory_saver`` with this folder on the path: memsaver's."""

MEMSAVER_FORWARDER = True

from memsaver_core.compat import install  # noqa: E402

install()
