"""The reference engine: serves a Hugging Face causal language model, in one process or one for each rank. It does not
use transformers' ``ContinuousBatchingManager``. That allocates its cache in its own thread, where no region applies,
and cannot stop between two steps. Its prompts have shapes that depend on other requests, so tokens would not repeat."""

from __future__ import annotations

import sys

#: Begins the command of a process of the engine. Its modules are not looked for in the current folder, which may be a
#: checkout, without the compiled core; Python 3.10 cannot leave it out.
PYTHON = (sys.executable, *(("-P",) if sys.version_info >= (3, 11) else ()))
