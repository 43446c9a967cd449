"""SGLang as an engine: the service in the process of its scheduler."""
