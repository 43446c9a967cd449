"""A module's ``forward`` behind a gate."""

from __future__ import annotations

import functools
import operator
import types
from typing import Any

import torch
from torch import nn

from memsaver_server.integrations.module.nested_requests import NestedRequests


class GatedForward:
    """Replaces a module's ``forward``. Copies and pickles of the module have the original.

    Not a pair of hooks: those end nothing at a KeyboardInterrupt, and code that was compiled before does not run them.
    """

    def __init__(self, requests: NestedRequests, module: nn.Module) -> None:
        self._requests = requests
        self._module = module
        self._own = "forward" in vars(module)
        self._forward = module.forward
        self._active = True
        functools.update_wrapper(self, self._forward)
        module.forward = self

    # A compiled caller's graph ends before it, and what it calls is compiled by itself.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator,misc,unused-ignore]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        requests, name = self._requests, type(self._module).__name__
        if not self._active:
            return self._forward(*args, **kwargs)
        request, outer = requests.begin(name)
        try:
            result = self._forward(*args, **kwargs)
        finally:
            requests.end(request, outer)
        return requests.iterate(name, result) if isinstance(result, types.GeneratorType) else result

    def __reduce__(self) -> tuple[Any, ...]:
        # By builtins alone, so that a pickle can be read without memsaver.
        if self._own:
            return operator.getitem, ((self._forward,), 0)
        return getattr, (self._module, "forward")

    def remove(self) -> None:
        """Put the original back, unless other code has wrapped this one; then only pass calls on."""
        self._active = False
        if vars(self._module).get("forward") is not self:
            return
        if self._own:
            self._module.forward = self._forward
        else:
            del self._module.forward
