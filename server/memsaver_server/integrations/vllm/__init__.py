"""vLLM as an engine: the service in its API server, or beside an ``LLM``."""

from memsaver_server.integrations.vllm.plugin import attach_to

__all__ = ["attach_to"]
