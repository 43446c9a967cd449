"""Trainers that give the device back between steps. No code of the framework changes:

    from memsaver_core.training import released

    with released(model, optimizer):
        rollout()  # an engine has the device meanwhile

For torch modules, DDP, FSDP2, Megatron-core's and DeepSpeed's optimizers, each rank in a separate process. All that a
trainer holds on the device goes: parameters, buffers, optimizer state, masters, gradients, what torch's allocator
caches, and what NCCL's communicators hold. A tensor outside of regions is adopted at the first release that finds it;
from then on its address stays. A tensor in one of your regions is released with that whole region, and kept.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from memsaver_core import communicators, process, release_resume
from memsaver_core.adopting import adopt_shared, parts, tags_of, tensors_in
from memsaver_core.contract.errors import ConfigurationError, UnsupportedError
from memsaver_core.contract.policies import PolicyLike, keeps_all, parse_policy
from memsaver_core.contract.reports import OperationReport
from memsaver_core.device_memory import read_devices
from memsaver_core.master_weights import Copies, Remake, made_from_masters, remake_of
from memsaver_core.phases import PhaseLog

logger = logging.getLogger("memsaver")

#: Attributes of parameters and optimizers that hold nothing but gradients: of Megatron-core and DeepSpeed.
_GRADIENTS = (
    "main_grad", "averaged_gradients", "all_grad_tensors", "fp32_groups_gradients",
    "fp32_groups_gradients_flat",
)  # fmt: skip
_HALVES = (torch.bfloat16, torch.float16)

#: By tag, a parameter of the trainer whose memory it is.
_owners: dict[str, weakref.ref[nn.Parameter]] = {}


class Released:
    """A trainer without memory on the device, until ``resume``. ``report`` says what was released."""

    report: OperationReport

    def __init__(self, policies: Mapping[str, str], copies: Copies | None) -> None:
        self._policies = dict(policies)
        self._copies = copies
        self._resumed = False

    def resume(self) -> None:
        """Bring everything back, at the same addresses. Does nothing if that was done. Every rank must call it.

        Raises what ``memsaver_core.resume`` and ``communicators.resume`` raise, or BackupError if parameters that were
        made again differ. All is released again then, and the call can be repeated.
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
        """Release. Discarded content goes last: if a step before it fails, nothing needs to be made again."""
        log = PhaseLog(read_devices)
        discarded = {tag: policy for tag, policy in self._policies.items() if policy == "zero"}
        kept = {tag: policy for tag, policy in self._policies.items() if tag not in discarded}
        try:
            tags = release_resume.release(list(kept), restore=kept, log=log).tags if kept else ()
            if suspend_communicators and communicators.can_suspend():
                communicators.suspend()
            if discarded:
                if self._copies is not None:
                    self._copies.gone = True
                tags += release_resume.release(list(discarded), restore=discarded, log=log).tags
            self.report = log.report("release", tags)
        except BaseException:
            self.resume()  # of what was released so far
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
    gradients: Literal["discard", "keep"] = "discard",
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
        parameters: ``discard`` keeps no copy of 16-bit parameters that Megatron-core's or DeepSpeed's optimizer makes
            from fp32 masters: a resume has them made again. For another optimizer give a function that makes them, in
            each release from the first on.
        restore: where content is kept, ``host`` or ``file``.
        suspend_communicators: also suspend NCCL's communicators, if NCCL can.
        name: its tags are ``name.model``, ``name.copies`` (what ``parameters`` is about), ``name.optimizer`` and
            ``name.gradients``. Each trainer of a process needs its own.

    Raises:
        ConfigurationError: an argument is invalid; the trainer has nothing on the device; another trainer has the name.
        UnsupportedError: FSDP1 has wrapped the model; the trainer is released already; parameters cannot be made again,
            or differ from what the masters make, which has then replaced them; gradients to be kept are parts of DDP's
            buckets. In all these cases nothing was released.
        MemsaverError, torch.OutOfMemoryError: as ``memsaver_core.release``, ``adopt`` and ``communicators.suspend``
            raise them. Everything is resident; ranks that have released theirs must resume.
    """
    if not process.enabled():
        memory = Released({}, None)
        memory.report = release_resume.release()
        return memory
    kept = parse_policy(restore).value
    _check_arguments(kept, gradients=gradients, parameters=parameters)
    models = [model] if isinstance(model, nn.Module) else list(model)
    optimizers = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    optimizers = [each for each in optimizers if each is not None]
    _reshard(models)
    held = _held(models, optimizers, name, every_half=callable(parameters))
    owners = [tensor for tensor, _ in held if tensor.is_leaf and tensor.grad is not None]
    if gradients == "keep" and owners:
        _check_gradients(models)
        held += [(each.grad, f"{name}.gradients") for each in owners if each.grad is not None]
    _check(name, models, held)
    left = adopt_shared((each, tag, "zero" if tag == f"{name}.gradients" else kept) for each, tag in held)
    if left:
        kinds = ", ".join(sorted({type(each).__name__ for each in left}))
        logger.warning("%d tensors of the trainer (%s) cannot be moved and stay on the device", len(left), kinds)
    tags = tags_of(tensor for tensor, _ in held)
    policies = dict.fromkeys(tags.values(), kept)
    if gradients == "discard" and f"{name}.gradients" in policies:
        policies[f"{name}.gradients"] = "zero"
    copies = None
    if parameters != "keep":
        remake = parameters if callable(parameters) else remake_of(models, optimizers)
        copies = Copies([storage for storage, tag in tags.items() if tag == f"{name}.copies"], remake)
        policies[f"{name}.copies"] = "zero"
    memory = Released(policies, copies)
    memory._release(suspend_communicators)
    if gradients == "discard" and owners:
        for owner in owners:
            owner.grad = None
        process.backend().empty_cache()
    return memory


def _check_arguments(kept: str, **given: object) -> None:
    if not keeps_all(kept):
        raise ConfigurationError(f"content is kept by restore='host' or 'file', not {kept!r}")
    for name, value in given.items():
        if value not in ("discard", "keep") and not (name == "parameters" and callable(value)):
            raise ConfigurationError(f"{name} are to 'discard' or to 'keep', not {value!r}")


def _reshard(models: list[nn.Module]) -> None:
    """Have FSDP2 free parameters that a forward pass without a backward pass has left whole."""
    for module in (each for model in models for each in model.modules()):
        if hasattr(module, "_fsdp_wrapped_module"):
            raise UnsupportedError(
                "FullyShardedDataParallel replaces the memory of its parameters in each step: shard the model by "
                "torch.distributed.fsdp.fully_shard instead; nothing was released"
            )
        if callable(reshard := getattr(module, "reshard", None)):
            reshard()


def _held(models: list[nn.Module], optimizers: list[Any], name: str, *, every_half: bool) -> list[tuple[Tensor, str]]:
    """Return the trainer's tensors, without each ``grad``, and their tags. Those that must be kept come first: of
    tensors that share memory, the first one's tag applies to all."""
    parameters = list({id(each): each for model in models for each in model.parameters()}.values())
    trained = [each for each in parameters if each.requires_grad and each.dtype in _HALVES]
    from_masters = made_from_masters(optimizers)
    copies = {id(each): each for each in trained if every_half or id(each) in from_masters}
    found: list[tuple[Tensor, str]] = [(each, f"{name}.model") for each in parameters if id(each) not in copies]
    # By the class: Megatron-core's own wrapper has a list called ``buffers``.
    found += [(each, f"{name}.model") for model in models for each in nn.Module.buffers(model)]
    found += [(each, f"{name}.copies") for each in copies.values()]
    # Frameworks put masters, shards and gradients into attributes of a parameter.
    others = [each for owner in (*optimizers, *parameters) for each in tensors_in(owner)]
    found += [(tensor, f"{name}.optimizer") for attribute, tensor in others if attribute not in _GRADIENTS]
    return found + [(tensor, f"{name}.gradients") for attribute, tensor in others if attribute in _GRADIENTS]


def _check_gradients(models: list[nn.Module]) -> None:
    for module in (each for model in models for each in model.modules()):
        if getattr(module, "gradient_as_bucket_view", False):
            raise UnsupportedError(
                "gradients that are parts of DDP's buckets cannot move: discard them, or release after zero_grad(), or "
                "make DistributedDataParallel without gradient_as_bucket_view; nothing was released"
            )


def _check(name: str, models: list[nn.Module], held: list[tuple[Tensor, str]]) -> None:
    managed = process.torch_device().type
    if not any(part.device.type == managed for tensor, _ in held for part in parts(tensor)):
        raise ConfigurationError(f"the trainer {name!r} has nothing on {managed}; move it there before its release")
    present = set(tags_of(tensor for tensor, _ in held).values())
    if away := [tag.tag for tag in release_resume.status().tags if tag.tag in present and tag.state != "resident"]:
        raise UnsupportedError(f"{away[0]!r} of the trainer {name!r} is released already: resume it first")
    first = next(parameter for model in models for parameter in model.parameters())
    owner = _owners.setdefault(name, weakref.ref(first))()
    if owner is None:
        _owners[name] = weakref.ref(first)
    elif owner is not first:
        raise ConfigurationError(f"another trainer of this process is called {name!r}; give each another name")
