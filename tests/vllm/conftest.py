"""Real vLLM without a GPU: its scheduler, its block pool, its front end. `make test-vllm` sets up its environment."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; run make test-vllm", allow_module_level=True)
