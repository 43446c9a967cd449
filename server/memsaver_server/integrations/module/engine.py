"""Any torch module as an engine: what it holds moves into regions, and its calls pass a gate."""

from __future__ import annotations

import functools
import gc
import inspect
import operator
import threading
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

import memsaver_core as ms
from memsaver_core.errors import ConfigurationError
from memsaver_server.gate import Gate, InFlightRequest
from memsaver_server.integrations.module import held_tensors
from memsaver_server.integrations.module.held_tensors import Held

_Method = TypeVar("_Method", bound=Callable[..., Any])
_not_compiled: Callable[[_Method], _Method] = torch.compiler.disable


class ModuleEngine(Gate):
    """Makes modules releasable that a program calls by itself: a denoising loop, an embedding model, an encoder.

        engine = ModuleEngine(model)
        server = attach(engine)

    Parameters and persistent buffers move under the tag ``weights``; what no state dict brings back, other buffers and
    tensors in plain attributes, under ``buffers``, whose content is kept too; what ``workspaces`` names, under
    ``workspace``. Every tensor object stays, its address changes this once: attach before a graph captures it.

    A call of a module is a request of the gate: a release waits for it, and while memory is away it is refused, or
    held where the service is set up so. A call inside a request, or inside another call, belongs to that one. All else
    that touches the modules' memory belongs into ``with engine.request():``, a graph's replay for one.
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
            module: one that the program calls, on the device already; give what ``torch.compile`` or a wrapper
                returned, if that is what it calls.
            others: all further ones.
            workspaces: patterns (``*.scratch``) of the names of buffers and tensor attributes whose content is not
                needed from one call to the next.
            workspace_restore: what a resume owes to them; ``zero`` by default.

        Raises:
            ConfigurationError: a module has parameters on the meta device or where memsaver manages nothing, a pattern
                fits nothing, a ``forward`` is a coroutine, or this process has another such engine. Nothing has
                changed.
            torch.OutOfMemoryError: the device lacks room to move the next tensors. The modules work as before, part of
                them in regions; try again.
        """
        patterns = [workspaces] if isinstance(workspaces, str) else list(workspaces)
        modules = tuple({id(each): each for each in (module, *others)}.values())
        super().__init__(", ".join(type(each).__name__ for each in modules))
        self._visit: ContextVar[_Visit | None] = ContextVar("memsaver_visit", default=None)
        self._gated: list[_GatedForward] = []
        self._active = True
        _check_forwards(modules)
        held = held_tensors.held_by(modules)
        _check_patterns(patterns, held)
        with ModuleEngine._attaching:
            _check_alone()
            if ms.enabled():
                held_tensors.check(held)
                held_tensors.move(_under_tags(held, patterns, workspace_restore))
            self._devices = sorted({each.tensor.device.index or 0 for each in held if each.tensor.is_cuda})
            self._gated = [_GatedForward(self, each) for each in modules]
            ModuleEngine._attached = weakref.ref(self)

    @contextmanager
    def request(self, name: str | None = None) -> Iterator[InFlightRequest]:
        """Be inside the gate for the length of the block; calls of the modules in it belong to this one request.

        That holds in the thread or asyncio task of the block, in tasks made inside it and in ``asyncio.to_thread``, not
        in threads of its own.

        Raises:
            AdmissionClosedError: the gate is closed; the message says why.
        """
        visit, outer = self._begin(name)
        try:
            yield visit.turn
        finally:
            self._end(visit, outer)

    @contextmanager
    def workspace(
        self, *, restore: ms.RestorePolicy | str = ms.RestorePolicy.HOST, device: int | None = None
    ) -> Iterator[None]:
        """Put what the first calls create and keep, inside the block and in this thread, under the tag ``workspace``.

        Everything allocated inside comes from there, a library's scratch memory too, and on a GPU room for what the
        calls only used meanwhile stays with the tag: make calls of the smallest size that creates it all.

        Args:
            restore: what a resume owes to it. Kept by default: a first call may make tables as well as scratch memory.
            device: index of the device; needed where the modules are on several.

        Raises:
            ConfigurationError: ``device`` is missing.
        """
        if device is None and len(self._devices) > 1:
            raise ConfigurationError(f"the modules are on the devices {self._devices}: name one, workspace(device=...)")
        index = device if device is not None or not self._devices else self._devices[0]
        with self.request("workspace"), ms.region("workspace", restore=restore, device=index):
            yield

    def close(self) -> None:
        """Stop gating calls. The memory stays where it is, as it is: resume it first. Idempotent."""
        self._active = False
        while self._gated:
            self._gated.pop().remove()
        with ModuleEngine._attaching:
            if ModuleEngine._attached is not None and ModuleEngine._attached() is self:
                ModuleEngine._attached = None

    def _iterate(self, name: str, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """``steps``, as one request from the first step to the last; between them its consumer is not inside."""
        visit = self._enter_visit(name)
        try:
            step: Callable[[Any], Any] = steps.send
            value: Any = None
            while True:
                outer = self._visit.get()
                self._visit.set(visit)
                try:
                    item = step(value)
                except StopIteration as end:
                    return end.value
                finally:
                    self._visit.set(outer)
                try:
                    step, value = steps.send, (yield item)
                except BaseException as error:
                    step, value = steps.throw, error
        finally:
            visit.leave()

    @_not_compiled
    def _begin(self, name: str | None) -> tuple[_Visit, _Visit | None]:
        visit = self._enter_visit(name)
        outer = self._visit.get()
        self._visit.set(visit)
        return visit, outer

    @_not_compiled
    def _end(self, visit: _Visit, outer: _Visit | None) -> None:
        self._visit.set(outer)
        visit.leave()

    def _enter_visit(self, name: str | None) -> _Visit:
        outer = self._visit.get()
        return outer if outer is not None and outer.join() else _Visit(super().request(name))


class _Visit:
    """One request inside the gate, and the blocks that belong to it; it ends with the last of them."""

    def __init__(self, request: AbstractContextManager[InFlightRequest]) -> None:
        self.turn = request.__enter__()
        self._request = request
        self._blocks = 1
        self._lock = threading.Lock()

    def join(self) -> bool:
        """Begin one more block; False where the request has ended already."""
        with self._lock:
            self._blocks += self._blocks > 0
            return self._blocks > 0

    def leave(self) -> None:
        with self._lock:
            self._blocks -= 1
            ended = self._blocks == 0
        if ended:
            self._request.__exit__(None, None, None)


class _GatedForward:
    """Stands in for a module's ``forward``. Copies and pickles of the module have the plain one.

    In the place of ``forward`` rather than in hooks, which end nothing at a KeyboardInterrupt, and which code that was
    compiled before does not run.
    """

    def __init__(self, engine: ModuleEngine, module: nn.Module) -> None:
        self._engine = engine
        self._module = module
        self._own = "forward" in vars(module)
        self._forward = module.forward
        functools.update_wrapper(self, self._forward)
        module.forward = self

    # A compiled caller's graph ends before it, and what it calls is compiled by itself.
    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator,misc,unused-ignore]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine, name = self._engine, type(self._module).__name__
        if not engine._active:
            return self._forward(*args, **kwargs)
        visit, outer = engine._begin(name)
        try:
            result = self._forward(*args, **kwargs)
        finally:
            engine._end(visit, outer)
        return engine._iterate(name, result) if isinstance(result, types.GeneratorType) else result

    def __reduce__(self) -> tuple[Any, ...]:
        # By what every Python has, so that a pickle can be read without memsaver.
        if self._own:
            return operator.getitem, ((self._forward,), 0)
        return getattr, (self._module, "forward")

    def remove(self) -> None:
        """Put the plain one back, unless somebody has wrapped this one since."""
        if vars(self._module).get("forward") is not self:
            return
        if self._own:
            self._module.forward = self._forward
        else:
            del self._module.forward


def _check_forwards(modules: tuple[nn.Module, ...]) -> None:
    for module in modules:
        if inspect.iscoroutinefunction(module.forward) or inspect.isasyncgenfunction(module.forward):
            raise ConfigurationError(
                f"{type(module).__name__}.forward is asynchronous, so its end cannot be seen: attach the modules that "
                "it awaits, or make it an ordinary function"
            )


def _check_patterns(patterns: list[str], held: list[Held]) -> None:
    names = [each.name for each in held if each.kind != "parameter"]
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
    gc.collect()  # an engine that is gone with its modules may still be waiting for this
    other = present()
    if other is not None:
        raise ConfigurationError(
            f"{other.name} is attached in this process already, and a release takes the memory of all regions: give "
            "all modules to one ModuleEngine, or close() the other one"
        )


def _under_tags(
    held: list[Held], patterns: list[str], workspace_restore: ms.RestorePolicy | str | None
) -> Iterator[tuple[Held, str, ms.RestorePolicy | str | None]]:
    """Name each one's tag and policy; of tensors that share memory, the one whose content matters most comes first."""

    def is_workspace(each: Held) -> bool:
        return each.kind != "parameter" and any(fnmatchcase(each.name, pattern) for pattern in patterns)

    kept = [each for each in held if not is_workspace(each)]
    saved = ("parameter", "persistent buffer")
    yield from ((each, "weights", None) for each in kept if each.kind in saved)
    yield from ((each, "buffers", ms.RestorePolicy.HOST) for each in kept if each.kind not in saved)
    yield from ((each, "workspace", workspace_restore) for each in held if is_workspace(each))
