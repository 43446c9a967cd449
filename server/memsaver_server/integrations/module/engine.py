"""Any torch module as an engine: its tensors move into regions, and its calls pass a gate."""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

import memsaver_core as ms
from memsaver_core.adopting import adopt_shared
from memsaver_core.contract.errors import ConfigurationError
from memsaver_server.engine.gate import Gate, InFlightRequest
from memsaver_server.integrations.adapter.calls import NestedRequests

logger = logging.getLogger("memsaver")

_TABLES = ("_parameters", "_buffers", "_modules")

Kind = Literal["parameter", "persistent buffer", "buffer", "attribute"]
#: Kinds that are in a state dict.
_SAVED = ("parameter", "persistent buffer")
Policy = ms.RestorePolicy | str | None


class ModuleEngine(Gate):
    """An engine over modules that a program calls by itself: in a denoising loop, an embedding model, an encoder.
    ``server = attach(ModuleEngine(model))`` serves it.

    Parameters and persistent buffers move under the tag ``weights``. What is in no state dict (other buffers, tensors
    in plain attributes) moves under ``buffers``, whose content is kept, too; what ``workspaces`` names moves under
    ``workspace``. The tensor objects stay, but their addresses change this once: attach before a graph captures them.

    Each call of a module is a request of the gate. A release waits for it; while memory is released it is refused, or
    held if the service is set up for that. A call inside a request or another call belongs to that one. Put all else
    that touches the modules' memory, such as the replay of a graph, inside ``with engine.request():``.
    """

    updates_asleep = True
    _attached: ClassVar[weakref.ref[ModuleEngine] | None] = None
    _attaching: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        module: nn.Module,
        *others: nn.Module,
        workspaces: str | Iterable[str] = (),
        workspace_restore: Policy = None,
        weights: ms.WeightsKey | None = None,
        load: Callable[[], object] | None = None,
    ) -> None:
        """Move what the modules hold, and gate their calls. Nothing may use the modules meanwhile. Give the modules
        that the program calls, on their device; if it calls what ``torch.compile`` or a wrapper returned, give that.
        ``workspaces`` are patterns (``*.scratch``) of names of buffers and tensor attributes whose content is not
        needed from one call to the next. ``workspace_restore`` is their restore policy, by default ``zero``.
        With ``weights``, their key, modules whose parameters are not written yet get them from the shared store, or
        by ``load()``, which writes them in place: see ``memsaver_core.load_weights``.

        Raises ConfigurationError if parameters are on the meta device, or on one that memsaver does not manage.
        Raises it, too, if a pattern matches nothing, a ``forward`` is a coroutine, or this process has another such
        engine. Nothing has changed then. Raises torch.OutOfMemoryError if the device lacks room to move the next
        tensors: the modules work as before, with some tensors in regions; try again.
        """
        patterns = [workspaces] if isinstance(workspaces, str) else list(workspaces)
        modules = tuple({id(each): each for each in (module, *others)}.values())
        super().__init__(", ".join(type(each).__name__ for each in modules))
        self._requests = NestedRequests(super().request)
        self._gated: list[GatedForward] = []
        _check_forwards(modules)
        tensors = tensors_of(modules)
        _check_patterns(patterns, tensors)
        with ModuleEngine._attaching:
            _check_alone()
            if ms.enabled():
                _check_memory(tensors)
                _move(_under_tags(tensors, patterns, workspace_restore))
            if weights is not None and load is not None:
                ms.load_weights(weights, partial(_saved_in, modules), load)
            self._devices = sorted({each.tensor.device.index or 0 for each in tensors if each.tensor.is_cuda})
            self._gated = [GatedForward(self._requests, each) for each in modules]
            ModuleEngine._attached = weakref.ref(self)

    @contextmanager
    def request(self, name: str | None = None) -> Iterator[InFlightRequest]:
        """Run the block inside the gate; calls of the modules in it belong to this one request: those in the block's
        thread or asyncio task, in tasks made inside the block, and in ``asyncio.to_thread``, but not in threads that
        the block starts. Raises AdmissionClosedError if the gate is closed; the message says why."""
        with self._requests.request(name) as request:
            yield request

    @contextmanager
    def workspace(
        self, *, restore: ms.RestorePolicy | str = ms.RestorePolicy.HOST, device: int | None = None
    ) -> Iterator[None]:
        """Put what the first calls create and keep under the tag ``workspace``, inside the block and in this thread:
        all that is allocated there, also scratch memory of libraries and, on a GPU, memory for intermediate results. So
        make the smallest calls that create what is to be kept. ``restore`` is the policy, by default ``host``, as first
        calls may make tables, too. Raises ConfigurationError if ``device`` is missing and the modules are on several.
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


class GatedForward:
    """Replaces a module's ``forward``. Copies and pickles of the module have the original. A pair of hooks would not
    do: after a KeyboardInterrupt the second one is not called, and code that was compiled before does not run them."""

    def __init__(self, requests: NestedRequests, module: nn.Module) -> None:
        self._requests = requests
        self._module = module
        self._own = "forward" in vars(module)
        self._forward = module.forward
        self._active = True
        functools.update_wrapper(self, self._forward)
        module.forward = self

    # The graph of a compiled caller ends before this call, and what this calls is compiled by itself.
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
        """Put the original back, unless other code has wrapped this; then only pass calls on."""
        self._active = False
        if vars(self._module).get("forward") is not self:
            return
        if self._own:
            self._module.forward = self._forward
        else:
            del self._module.forward


def _saved_in(modules: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return what a checkpoint of the modules has, by names that no two of them share."""
    saved = enumerate(each for each in tensors_of(modules) if each.kind in _SAVED)
    return {f"{number} {each.name}": each.tensor for number, each in saved}


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
    tensors: list[ModuleTensor], patterns: list[str], workspace_restore: Policy
) -> Iterator[tuple[ModuleTensor, str, Policy]]:
    """Yield each tensor with its tag and policy; kept ones come first, and so decide for others in the same memory."""

    def is_workspace(each: ModuleTensor) -> bool:
        return each.kind != "parameter" and any(fnmatchcase(each.name, pattern) for pattern in patterns)

    kept = [each for each in tensors if not is_workspace(each)]
    yield from ((each, "weights", None) for each in kept if each.kind in _SAVED)
    yield from ((each, "buffers", ms.RestorePolicy.HOST) for each in kept if each.kind not in _SAVED)
    yield from ((each, "workspace", workspace_restore) for each in tensors if is_workspace(each))


@dataclass(frozen=True)
class ModuleTensor:
    """A tensor that a module holds. ``name`` is as in ``named_parameters`` and ``named_buffers``; entries of containers
    are numbered. A ``buffer`` is in no state dict; an ``attribute`` is not registered with the module."""

    name: str
    tensor: Tensor
    kind: Kind


def tensors_of(modules: Iterable[nn.Module]) -> list[ModuleTensor]:
    """Return the tensors that the modules and their submodules hold, also in lists, tuples and dictionaries."""
    found: list[ModuleTensor] = []
    for root in modules:
        for prefix, module in root.named_modules():
            kinds: dict[str, Kind] = dict.fromkeys(module._parameters, "parameter")
            kinds |= dict.fromkeys(module._buffers, "persistent buffer")
            kinds |= dict.fromkeys(module._non_persistent_buffers_set, "buffer")
            attributes = {name: value for name, value in vars(module).items() if name not in _TABLES}
            for name, value in {**module._parameters, **module._buffers, **attributes}.items():
                held = _tensors_in(value, f"{prefix}.{name}" if prefix else name, set())
                found += (ModuleTensor(where, tensor, kinds.get(name, "attribute")) for where, tensor in held)
    return found


def _check_memory(tensors: list[ModuleTensor]) -> None:
    """Raise ConfigurationError if memsaver cannot manage some of ``tensors``; some in host memory are no error."""
    managed = ms.torch_device().type
    for each in tensors:
        if isinstance(each.tensor, (UninitializedParameter, UninitializedBuffer)):
            raise ConfigurationError(f"{each.name} is not initialized yet: call the module once before it is attached")
    if empty := [each.name for each in tensors if each.tensor.device.type == "meta"]:
        raise ConfigurationError(f"{_listed(empty)} on the meta device: load the weights before the module is attached")
    if foreign := [each for each in tensors if each.tensor.device.type not in (managed, "cpu")]:
        raise ConfigurationError(
            f"{_listed([each.name for each in foreign])} on {foreign[0].tensor.device}, but memsaver's "
            f"{ms.driver_name()} driver manages {managed} memory; move the module there, or set MEMSAVER_DRIVER"
        )
    if tensors and all(each.tensor.device.type != managed for each in tensors):
        raise ConfigurationError(
            f"{_listed([each.name for each in tensors])} in host memory: move the module to the device before it is "
            f"attached, model.to({str(ms.torch_device())!r})"
        )


def _listed(names: list[str]) -> str:
    """Return ``a, b and 3 more are``."""
    if len(names) == 1:
        return f"{names[0]} is"
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"{', '.join(names[:4])}{more} are"


def _tensors_in(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (list, tuple, dict)) and id(value) not in seen:
        seen.add(id(value))
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors_in(entry, f"{name}.{key}", seen)


def _move(tagged: Iterable[tuple[ModuleTensor, str, Policy]]) -> None:
    """Move each tensor, and what shares its memory, under its tag and policy; see ``adopt_shared``."""
    placed = list(tagged)
    left = {id(tensor) for tensor in adopt_shared((each.tensor, tag, restore) for each, tag, restore in placed)}
    if names := [each.name for each, _, _ in placed if id(each.tensor) in left]:
        logger.warning(
            "%s of a kind that cannot be moved: released only if made inside a region. Load the module inside "
            'memsaver_core.region("weights")',
            _listed(names),
        )
