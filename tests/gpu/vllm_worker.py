"""What tests ask of vLLM's workers. Imports nothing that the workers' process lacks."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

PAGE = resource.getpagesize()


class Extension:
    """vLLM adds these methods to its ``Worker``, as it does for trainers (``--worker-extension-cls``)."""

    model_runner: Any

    def name_runner(self) -> str:
        """Return the module of the model runner."""
        return type(self.model_runner).__module__

    def load_weights_from(self, folder: str) -> None:
        """Write a checkpoint's weights, as trainers do: by the model's own ``load_weights``."""
        self.model_runner.model.load_weights(load_file(Path(folder, "model.safetensors")).items())

    def leave_host_memory(self, mib: str) -> None:
        """Have the system refuse this process more than so many MiB of host memory from now on; "" lifts the limit."""
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (int(mib) << 20) if mib else most, most))
