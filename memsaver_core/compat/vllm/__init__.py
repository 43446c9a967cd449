"""vLLM's sleep mode on memsaver: a plugin that vLLM finds by itself (entry point ``vllm.general_plugins``).

``MEMSAVER_VLLM=1`` turns it on, or ``--sleep-mode-backend memsaver`` where vLLM has that flag; sleep mode itself is
turned on as ever, by ``--enable-sleep-mode``. docs/vllm.md says what it does.
"""
