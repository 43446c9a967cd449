"""vLLM as an engine: the service in its API server, or beside an ``LLM``."""
