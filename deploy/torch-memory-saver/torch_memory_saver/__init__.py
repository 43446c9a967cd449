"""memsaver under the name torch_memory_saver."""

MEMSAVER_FORWARDER = True

from memsaver_core.compat import install  # noqa: E402

install()
