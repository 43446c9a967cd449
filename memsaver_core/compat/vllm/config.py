"""Whether an engine's workers sleep by memsaver, and which of their memory is tagged."""

from __future__ import annotations

import logging
import os
from typing import Any

import memsaver_core as ms
from memsaver_core.errors import ConfigurationError

logger = logging.getLogger(__name__)

SWITCH = "MEMSAVER_VLLM"
BACKEND = "memsaver"


def switch() -> bool | None:
    """Return what ``MEMSAVER_VLLM`` says; None if it is not set.

    Raises:
        ConfigurationError: it is neither 1 nor 0.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ConfigurationError(f"{SWITCH}={value!r} is invalid; set it to 1 or 0")
    return None if value == "" else value == "1"


def is_wanted(model_config: Any) -> bool:
    """Return whether an engine of this configuration is to sleep by memsaver."""
    if not getattr(model_config, "enable_sleep_mode", False):
        return False
    backend = getattr(model_config, "sleep_mode_backend", "cumem")
    return backend == BACKEND or (backend == "cumem" and switch() is True)


class WorkerConfig:
    """What was decided for the worker of this process.

    Attributes:
        enabled: the worker's memory is memsaver's.
        tags_cache_alone: while the KV cache is made: its tag is for the cache itself, not for all that is made then.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.tags_cache_alone = False

    def decide(self, vllm_config: Any) -> None:
        """Decide for the worker that is being made in this process."""
        model_config = getattr(vllm_config, "model_config", None)
        self.enabled = is_wanted(model_config) and ms.enabled()
        if not self.enabled and switch() and not getattr(model_config, "enable_sleep_mode", False):
            logger.warning("%s=1 has no effect without sleep mode; start the engine with --enable-sleep-mode", SWITCH)


#: Of this process: vLLM has one worker in each.
worker_config = WorkerConfig()
