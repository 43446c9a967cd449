"""vLLM's sleep mode on memsaver: a plugin that vLLM loads by itself (entry point ``vllm.general_plugins``).

``MEMSAVER_VLLM=1`` turns it on, or ``--sleep-mode-backend memsaver`` if vLLM has that flag; sleep mode itself is turned
on by ``--enable-sleep-mode``. See docs/vllm.md.
"""
