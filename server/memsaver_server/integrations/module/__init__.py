"""Any torch module as an engine."""

from memsaver_server.integrations.module.engine import ModuleEngine

__all__ = ["ModuleEngine"]
