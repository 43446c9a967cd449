"""The reference engine: serves a Hugging Face causal language model, in one process or one for each rank. It does not
use transformers' ``ContinuousBatchingManager``, which allocates its cache in its own thread, where no region applies,
and cannot stop between two steps. The shapes of its prompts depend on other requests, so tokens would not repeat."""

from __future__ import annotations

import sys

#: The beginning of a command that runs a module of this package. ``-P`` keeps Python from importing out of the current
#: folder, which may be a checkout without the compiled core; Python 3.10 has no such option.
PYTHON = (sys.executable, *(("-P",) if sys.version_info >= (3, 11) else ()))
