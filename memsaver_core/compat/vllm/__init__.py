"""vLLM's sleep mode on memsaver: a plugin that vLLM loads by itself. docs/vllm.md says what turns it on."""
