"""Trainers that give the device back between steps. No code of the framework changes:

    from memsaver_core.training import released

    with released(model, optimizer):
        rollout()  # an engine has the device meanwhile

For torch modules, DDP, FSDP2, Megatron-core's and DeepSpeed's optimizers, each rank in a process of its own. All that a
trainer holds on the device goes: parameters, buffers, optimizer state, masters, gradients, what torch's allocator
caches, and what NCCL's communicators hold. What was not made in a region is adopted, at the first release and where it
is new at later ones; from then on its address stays. What lies in a region of yours is released with all of that
region, and kept.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memsaver_core import communicators, process, release_resume
from memsaver_core.adopting import adopt_shared, parts
from memsaver_core.contract.errors import BackupError, ConfigurationError, UnsupportedError
from memsaver_core.contract.policies import PolicyLike, parse_policy
from memsaver_core.contract.reports import OperationReport
from memsaver_core.device_memory import read_devices
from memsaver_core.phases import PhaseLog
from memsaver_core.storages import is_plain

logger = logging.getLogger("memsaver")

Gradients = Literal["discard", "keep"]
#: Makes parameters again from an optimizer's masters.
Remake = Callable[[], object]

#: Attributes of parameters and optimizers that hold nothing but gradients: of Megatron-core and DeepSpeed.
_GRADIENTS = ("main_grad", "averaged_gradients", "fp32_groups_gradients", "fp32_groups_gradients_flat")
#: Methods that write parameters of 16 bits from fp32 masters: of DeepSpeed and of Megatron-core.
_REMAKES = ("update_lp_params", "_copy_main_params_to_model_params")
_HALVES = (torch.bfloat16, torch.float16)
#: Any key will do: digests are compared within a process.
_DIGEST_KEY = (1, 2, 3, 4)

#: By tag, a parameter of the trainer whose memory it is.
_owners: dict[str, weakref.ref[nn.Parameter]] = {}


class Released:
    """A trainer without memory on the device, until ``resume``. ``report`` says what was released."""

    report: OperationReport

    def __init__(self, policies: Mapping[str, str], copies: _Copies | None) -> None:
        self._policies = dict(policies)
        self._copies = copies
        self._resumed = False

    def resume(self) -> None:
        """Bring everything back, at the same addresses. Does nothing if that was done. Every rank must call it.

        Raises what ``memsaver_core.resume`` and ``communicators.resume`` raise, or BackupError if parameters came out
        different when they were made again. The memory is released then, and the call can be repeated.
        """
        if self._resumed:
            return
        release_resume.resume(list(self._policies))
        try:
            communicators.resume()
            if self._copies is not None:
                self._copies.make_again()
        except BaseException:
            release_resume.release(list(self._policies), restore=self._policies)
            raise
        self._resumed = True

    def _release(self, suspend_communicators: bool) -> None:
        """What is discarded goes last: until then nothing needs to be made again if a step fails."""
        log = PhaseLog(read_devices)
        discarded = {tag: policy for tag, policy in self._policies.items() if policy == "zero"}
        kept = {tag: policy for tag, policy in self._policies.items() if tag not in discarded}
        try:
            tags = release_resume.release(list(kept), restore=kept, log=log).tags
            if suspend_communicators and communicators.can_suspend():
                communicators.suspend()
            if discarded:
                if self._copies is not None:
                    self._copies.gone = True
                tags += release_resume.release(list(discarded), restore=discarded, log=log).tags
            self.report = log.report("release", tags)
        except BaseException:
            self.resume()  # passes over what is resident
            raise


@contextmanager
def released(model: nn.Module | Iterable[nn.Module], optimizer: Any = None, **options: Any) -> Iterator[Released]:
    """Run the block without the trainer's memory. Arguments and errors are those of ``release``, and of
    ``Released.resume``, which can be called again if it fails at the end of the block."""
    memory = release(model, optimizer, **options)
    try:
        yield memory
    finally:
        memory.resume()


def release(
    model: nn.Module | Iterable[nn.Module],
    optimizer: Any = None,
    *,
    gradients: Gradients = "discard",
    parameters: Literal["discard", "keep"] | Remake = "keep",
    restore: PolicyLike = "host",
    suspend_communicators: bool = True,
    name: str = "trainer",
) -> Released:
    """Give back what a trainer holds on the device. Call it between two steps, on every rank.

    Args:
        model: what is trained, as its framework wraps it; several, such as Megatron-core's chunks, in a list.
        optimizer: the one that steps it, or a list of several.
        gradients: ``discard`` leaves each ``grad`` None and fills the gradient buffers of a framework with zeros.
        parameters: ``discard`` keeps no copy of 16-bit parameters that Megatron-core's or DeepSpeed's optimizer has
            made from its fp32 masters, and has it make them again. A function that does so serves for other optimizers;
            give it from the first release on.
        restore: where content is kept, ``host`` or ``file``.
        suspend_communicators: also suspend NCCL's communicators, where NCCL can.
        name: its tags are ``name.model``, ``name.copies`` (what ``parameters`` is about), ``name.optimizer`` and
            ``name.gradients``. Each trainer of a process needs another.

    Raises:
        ConfigurationError: it has nothing on the device, or another trainer has the name.
        UnsupportedError: it is released already; or its parameters cannot be made again, or would not be the same.
            In all these cases nothing was released.
        MemsaverError, torch.OutOfMemoryError: as ``memsaver_core.release``, ``adopt`` and ``communicators.suspend``
            raise them. Everything is resident; ranks that have released theirs must resume.
    """
    if not process.enabled():
        memory = Released({}, None)
        memory.report = release_resume.release()
        return memory
    kept = parse_policy(restore).value
    models = [model] if isinstance(model, nn.Module) else list(model)
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for module in (each for root in models for each in root.modules()):
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()  # FSDP2: parameters that a forward pass without a backward pass has left whole
    held = _held(models, optimizers, name, every_half=callable(parameters))
    owners = [tensor for tensor, _ in held if tensor.is_leaf and tensor.grad is not None]
    if gradients == "keep":
        held += [(each.grad, f"{name}.gradients") for each in owners if each.grad is not None]
    _check(name, models, held)
    left = adopt_shared((each, tag, "zero" if tag == f"{name}.gradients" else kept) for each, tag in held)
    if left:
        kinds = ", ".join(sorted({type(each).__name__ for each in left}))
        logger.warning("%d tensors of the trainer (%s) cannot be moved and stay on the device", len(left), kinds)
    tags = _tags(tensor for tensor, _ in held)
    policies = dict.fromkeys(tags.values(), kept)
    if gradients == "discard" and f"{name}.gradients" in policies:
        policies[f"{name}.gradients"] = "zero"
    copies = None
    if parameters != "keep":
        remake = parameters if callable(parameters) else _remake_of(models, optimizers)
        copies = _Copies([storage for storage, tag in tags.items() if tag == f"{name}.copies"], remake)
        policies[f"{name}.copies"] = "zero"
    memory = Released(policies, copies)
    memory._release(suspend_communicators)
    if gradients == "discard" and owners:
        for owner in owners:
            owner.grad = None
        process.backend().empty_cache()
    return memory


def _held(models: list[nn.Module], optimizers: list[Any], name: str, *, every_half: bool) -> list[tuple[Tensor, str]]:
    """Return what a trainer holds but for each tensor's ``grad``, with its tag. What must be kept comes first, as the
    first of those that share memory decides for all of them."""
    of_optimizers = [each for optimizer in optimizers for each in _tensors_in(optimizer, "", set())]
    remade = {id(tensor) for each in _with_masters(optimizers) for tensor in _remade_by(each)}
    parameters = list({id(each): each for model in models for each in model.parameters()}.values())

    def is_copy(each: nn.Parameter) -> bool:
        return each.requires_grad and each.dtype in _HALVES and (every_half or id(each) in remade)

    found: list[tuple[Tensor, str]] = [(each, f"{name}.model") for each in parameters if not is_copy(each)]
    # By the class: Megatron-core's own wrapper has a list called ``buffers``.
    found += [(each, f"{name}.model") for model in models for each in nn.Module.buffers(model)]
    found += [(each, f"{name}.copies") for each in parameters if is_copy(each)]
    # Frameworks put masters, shards and gradients into attributes of a parameter.
    attributes = [attribute for parameter in parameters for attribute in vars(parameter).items()]
    of_parameters = [each for name, value in attributes for each in _tensors_in(value, name, set())]
    for attribute, tensor in (*of_optimizers, *of_parameters):
        found.append((tensor, f"{name}.gradients" if attribute in _GRADIENTS else f"{name}.optimizer"))
    return found


def _tensors_in(value: Any, attribute: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in containers and optimizers, each with the innermost optimizer's attribute that has it."""
    if isinstance(value, Tensor):
        yield attribute, value
        return
    is_optimizer = hasattr(value, "step") and hasattr(value, "param_groups")
    if id(value) in seen or not (is_optimizer or isinstance(value, (dict, list, tuple, set))):
        return
    seen.add(id(value))
    if is_optimizer:
        for name, entry in vars(value).items():
            yield from _tensors_in(entry, name, seen)
    else:
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(entry, attribute, seen)


def _with_masters(optimizers: list[Any]) -> list[Any]:
    """Return the optimizers, also of those that are chained, that can make parameters again."""
    chained = [each for optimizer in optimizers for each in getattr(optimizer, "chained_optimizers", (optimizer,))]
    return [each for each in chained if any(hasattr(each, name) for name in _REMAKES)]


def _remade_by(optimizer: Any) -> Iterator[Tensor]:
    yield from (tensor for _, tensor in _tensors_in(optimizer, "", set()))
    # Of Megatron-core's distributed optimizer each rank has masters of a part alone, in one buffer with the others.
    yield from (each for buffer in getattr(optimizer, "buffers", ()) for each in buffer.params)


def _remake_of(models: list[nn.Module], optimizers: list[Any]) -> Remake:
    """Return what makes parameters again, on all ranks."""

    def remake() -> None:
        for optimizer in _with_masters(optimizers):
            getattr(optimizer, next(name for name in _REMAKES if hasattr(optimizer, name)))()
        _gather(models)

    _gather(models)  # what another rank has made, and a forward pass would gather
    return remake


def _gather(models: list[nn.Module]) -> None:
    """Megatron-core: have every rank's part of the parameters on all ranks."""
    for model in models:
        if getattr(getattr(model, "ddp_config", None), "use_distributed_optimizer", False):
            model.start_param_sync(force_sync=True)  # type: ignore[operator]


class _Copies:
    """Parameters that are made again instead of kept."""

    def __init__(self, storages: list[torch.UntypedStorage], remake: Remake) -> None:
        """Raises UnsupportedError if there are none, or they would not come out the same."""
        if not storages:
            raise UnsupportedError(
                "no parameters can be made again: no optimizer of Megatron-core or DeepSpeed has masters of 16-bit "
                "parameters. Keep the parameters, or give a function that makes them; nothing was released"
            )
        self._storages, self._remake = storages, remake
        self.gone = False
        self._digest = self._read()
        remake()
        if self._read() != self._digest:
            raise UnsupportedError(
                "the parameters are not what the optimizer makes from its masters: they were written since its last "
                "step. Keep them, or write the masters, too; nothing was released"
            )

    def make_again(self) -> None:
        if not self.gone:
            return
        self._remake()
        if self._read() != self._digest:
            raise BackupError("the parameters that the optimizer has made again differ from those before the release")
        self.gone = False

    def _read(self) -> list[object]:
        saver = process.saver()
        saver.synchronize()
        digests: list[object] = []
        for storage in self._storages:
            whole = storage.nbytes() // 16 * 16
            digests.append(saver.digest(storage.device.index or 0, storage.data_ptr(), whole, _DIGEST_KEY))
            digests.append(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[whole:].tolist())
        return digests


def _tags(tensors: Iterable[Tensor]) -> dict[torch.UntypedStorage, str]:
    """Return the storages of ``tensors`` that are in regions, each once, with their tags."""
    saver, found = process.saver(), {}
    for part in (part for tensor in tensors for part in parts(tensor) if is_plain(part)):
        storage = part.untyped_storage()
        if storage.nbytes() and saver.owns(storage.data_ptr()):
            found[storage.data_ptr()] = storage
    return {storage: str(saver.backup_of(storage.data_ptr(), 1, 0)["tag"]) for storage in found.values()}


def _check(name: str, models: list[nn.Module], held: list[tuple[Tensor, str]]) -> None:
    managed = process.torch_device().type
    if not any(part.device.type == managed for tensor, _ in held for part in parts(tensor)):
        raise ConfigurationError(f"the trainer {name!r} has nothing on {managed}; move it there before its release")
    present = set(_tags(tensor for tensor, _ in held).values())
    if away := [tag.tag for tag in release_resume.status().tags if tag.tag in present and tag.state != "resident"]:
        raise UnsupportedError(f"{away[0]!r} of the trainer {name!r} is released already: resume it first")
    first = next(parameter for model in models for parameter in model.parameters())
    owner = _owners.setdefault(name, weakref.ref(first))()
    if owner is None:
        _owners[name] = weakref.ref(first)
    elif owner is not first:
        raise ConfigurationError(f"another trainer of this process is called {name!r}; give each a name of its own")
