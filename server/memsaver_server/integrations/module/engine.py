"""Any torch module as an engine: its tensors move into regions, and its calls pass a gate."""

from __future__ import annotations

import gc
import inspect
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import ClassVar

from torch import nn

import memsaver_core as ms
from memsaver_core.errors import ConfigurationError
from memsaver_server.gate import Gate, InFlightRequest
from memsaver_server.integrations.module import module_tensors
from memsaver_server.integrations.module.gated_forward import GatedForward, NestedRequests
from memsaver_server.integrations.module.module_tensors import ModuleTensor


class ModuleEngine(Gate):
    """Makes modules releasable that a program calls by itself: a denoising loop, an embedding model, an encoder.

        engine = ModuleEngine(model)
        server = attach(engine)

    Parameters and persistent buffers move under the tag ``weights``; what no state dict has (other buffers, tensors in
    plain attributes) under ``buffers``, also kept; what ``workspaces`` names, under ``workspace``. The tensor objects
    stay, their addresses change this once: attach before a graph captures them.

    A call of a module is a request of the gate: a release waits for it, and while memory is released it is refused, or
    held if the service is set up so. A call inside a request or another call belongs to that one. All else that touches
    the modules' memory, such as the replay of a graph, belongs inside ``with engine.request():``.
    """

    _attached: ClassVar[weakref.ref[ModuleEngine] | None] = None
    _attaching: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        module: nn.Module,
        *others: nn.Module,
        workspaces: str | Iterable[str] = (),
        workspace_restore: ms.RestorePolicy | str | None = None,
    ) -> None:
        """Move what the modules hold, and gate their calls. Nothing may use them meanwhile.

        Args:
            module: one that the program calls, on its device; what ``torch.compile`` or a wrapper returned, if the
                program calls that.
            others: further ones.
            workspaces: patterns (``*.scratch``) of names of buffers and tensor attributes whose content is not needed
                from one call to the next.
            workspace_restore: their restore policy; ``zero`` by default.

        Raises:
            ConfigurationError: a module has parameters on the meta device or where memsaver manages nothing, a pattern
                matches nothing, a ``forward`` is a coroutine, or this process has another such engine. Nothing has
                changed.
            torch.OutOfMemoryError: the device lacks room to move the next tensors. The modules work as before, some
                tensors in regions; try again.
        """
        patterns = [workspaces] if isinstance(workspaces, str) else list(workspaces)
        modules = tuple({id(each): each for each in (module, *others)}.values())
        super().__init__(", ".join(type(each).__name__ for each in modules))
        self._requests = NestedRequests(super().request)
        self._gated: list[GatedForward] = []
        _check_forwards(modules)
        tensors = module_tensors.tensors_of(modules)
        _check_patterns(patterns, tensors)
        with ModuleEngine._attaching:
            _check_alone()
            if ms.enabled():
                module_tensors.check(tensors)
                module_tensors.move(_under_tags(tensors, patterns, workspace_restore))
            self._devices = sorted({each.tensor.device.index or 0 for each in tensors if each.tensor.is_cuda})
            self._gated = [GatedForward(self._requests, each) for each in modules]
            ModuleEngine._attached = weakref.ref(self)

    @contextmanager
    def request(self, name: str | None = None) -> Iterator[InFlightRequest]:
        """Run the block inside the gate; calls of the modules in it belong to this one request.

        That holds in the block's thread or asyncio task, in tasks made inside it and in ``asyncio.to_thread``, not in
        threads that it starts.

        Raises:
            AdmissionClosedError: the gate is closed; the message says why.
        """
        request, outer = self._requests.begin(name)
        try:
            yield request.in_flight
        finally:
            self._requests.end(request, outer)

    @contextmanager
    def workspace(
        self, *, restore: ms.RestorePolicy | str = ms.RestorePolicy.HOST, device: int | None = None
    ) -> Iterator[None]:
        """Put what the first calls create and keep, inside the block and in this thread, under the tag ``workspace``.

        Everything allocated inside gets the tag, scratch memory of libraries too, and on a GPU memory for intermediate
        results stays with the tag: make the smallest calls that create it all.

        Args:
            restore: its restore policy; kept by default, as first calls may make tables as well as scratch memory.
            device: index of the device; needed if the modules are on several.

        Raises:
            ConfigurationError: ``device`` is missing.
        """
        if device is None and len(self._devices) > 1:
            raise ConfigurationError(f"the modules are on the devices {self._devices}: name one, workspace(device=...)")
        index = device if device is not None or not self._devices else self._devices[0]
        with self.request("workspace"), ms.region("workspace", restore=restore, device=index):
            yield

    def close(self) -> None:
        """Stop gating calls. The memory stays as it is: resume it first. Idempotent."""
        while self._gated:
            self._gated.pop().remove()
        with ModuleEngine._attaching:
            if ModuleEngine._attached is not None and ModuleEngine._attached() is self:
                ModuleEngine._attached = None


def _check_forwards(modules: tuple[nn.Module, ...]) -> None:
    for module in modules:
        if inspect.iscoroutinefunction(module.forward) or inspect.isasyncgenfunction(module.forward):
            raise ConfigurationError(
                f"{type(module).__name__}.forward is asynchronous, and its end cannot be observed: attach the modules "
                "that it awaits, or make it an ordinary function"
            )


def _check_patterns(patterns: list[str], tensors: list[ModuleTensor]) -> None:
    names = [each.name for each in tensors if each.kind != "parameter"]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigurationError(
                f"no buffer or tensor attribute is called {pattern!r}; there are {', '.join(names[:8]) or 'none'}. "
                "What the first call creates comes in by workspace()"
            )


def _check_alone() -> None:
    present = ModuleEngine._attached
    if present is None:
        return
    gc.collect()  # collects an engine that is unreachable with its modules
    other = present()
    if other is not None:
        raise ConfigurationError(
            f"{other.name} is attached in this process already, and a release takes the memory of all regions: give "
            "all modules to one ModuleEngine, or close() the other one"
        )


def _under_tags(
    tensors: list[ModuleTensor], patterns: list[str], workspace_restore: ms.RestorePolicy | str | None
) -> Iterator[tuple[ModuleTensor, str, ms.RestorePolicy | str | None]]:
    """Yield each tensor's tag and policy; of tensors that share memory, the one whose content matters most first."""

    def is_workspace(each: ModuleTensor) -> bool:
        return each.kind != "parameter" and any(fnmatchcase(each.name, pattern) for pattern in patterns)

    kept = [each for each in tensors if not is_workspace(each)]
    saved = ("parameter", "persistent buffer")
    yield from ((each, "weights", None) for each in kept if each.kind in saved)
    yield from ((each, "buffers", ms.RestorePolicy.HOST) for each in kept if each.kind not in saved)
    yield from ((each, "workspace", workspace_restore) for each in tensors if is_workspace(each))
