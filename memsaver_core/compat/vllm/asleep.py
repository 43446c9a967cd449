"""vLLM's own updates of weights, and those of trainers, while the weights are released: they write host memory, and the
next wake-up brings that in. Workers are asked twice, so that all take an update or none."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

from memsaver_core.compat.patching import Function
from memsaver_core.compat.vllm.allocator import WEIGHTS
from memsaver_core.compat.vllm.tier import writes_weights
from memsaver_core.contract.errors import MemsaverError, UnsupportedError
from memsaver_core.lending import Lending
from memsaver_core.ranks.protocol import Failure
from memsaver_core.release_resume import status

#: Methods that are added to ``Worker``: CALL calls another method and returns its error, WRITE runs one that writes
#: weights, END ends what WRITE began.
CALL, WRITE, END = "memsaver_call", "memsaver_write", "memsaver_end_write"

LAYERWISE = "vllm.model_executor.model_loader.reload.layerwise"


def weights_are_released() -> bool:
    return any(tag.tag == WEIGHTS and tag.released_bytes for tag in status().tags)


class ModelLending(Lending):
    """As ``Lending``, for the model of a worker. Its end restores a module that an update has left half done."""

    def __init__(self, worker: Any) -> None:
        """Raises UnsupportedError, too, if the weights have a format that only the device can make."""
        model, config = worker.model_runner.get_model(), worker.vllm_config.model_config
        made = config.quantization or ("MLA" if getattr(config, "use_mla", False) else "")
        if made:
            raise UnsupportedError(
                f"weights of the format {made} are computed on the device, so they cannot be written while they are "
                "released; wake them up first, and update then"
            )
        if any(each.device.type == "meta" for each in model.parameters()):
            raise UnsupportedError("an update in chunks has begun; it cannot write weights that are released")
        self._modules = list(model.modules())
        tables = (each for module in self._modules for each in (module._parameters, module._buffers))
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = [(table, dict(table)) for table in tables]
        self._host_before = {name for name, _ in self._on_host()}
        known = getattr(sys.modules.get(LAYERWISE), "LAYERWISE_INFO", {})
        self._reloads = [(info, info.restore_device) for each in self._modules if (info := known.get(each)) is not None]
        super().__init__(WEIGHTS, getattr(worker.vllm_config.parallel_config, "local_world_size", 1))
        for info, _ in self._reloads:
            info.restore_device = torch.device("cpu")

    def keep(self) -> None:
        replaced = {name for table, before in self._tables for name in before if table.get(name) is not before[name]}
        replaced |= {name for name, tensor in self._on_host() if not self.has_lent(tensor)} - self._host_before
        if replaced:
            raise UnsupportedError(
                f"the loader has made tensors anew ({', '.join(sorted(replaced)[:8])}), so weights of this model "
                "cannot be written while they are released; wake them up first, and update then"
            )
        super().keep()

    def end(self, commit: bool) -> None:
        for table, before in self._tables:
            table.clear()
            table.update(before)
        for info, device in self._reloads:
            info.reset()
            info.restore_device = device
        super().end(commit)

    def _on_host(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the attributes of modules that are tensors in host memory."""
        for module in self._modules:
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.device.type == "cpu":
                    yield f"{type(module).__name__}.{name}", value


def call_worker(worker: Any, name: str, /, *args: Any, **kwargs: Any) -> tuple[Failure | None, Any, bool]:
    """``Worker.memsaver_call``: return the error of a method, if any, its result, and whether weights are released."""
    failure = result = None
    try:
        result = getattr(worker, name)(*args, **kwargs)
    except Exception as error:
        failure = Failure.of(error)
    return failure, result, weights_are_released()


def write_worker(worker: Any, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """``Worker.memsaver_write``: run a method that writes weights."""
    worker._memsaver_lending = None
    if weights_are_released():
        worker._memsaver_lending = ModelLending(worker)
    result = getattr(worker, method)(*args, **kwargs)
    if worker._memsaver_lending is not None:
        worker._memsaver_lending.keep()
    return result


def end_worker(worker: Any, commit: bool) -> None:
    """``Worker.memsaver_end_write``: have the next wake-up bring in what was written, if all workers have written."""
    lending, worker._memsaver_lending = worker._memsaver_lending, None
    if lending is not None:
        lending.end(commit)


#: What is added to ``Worker``.
METHODS = {CALL: call_worker, WRITE: write_worker, END: end_worker}


def write(call: Function, core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
    """``EngineCore.collective_rpc``. If ``method`` names what writes weights while they sleep, all workers take the
    update, or none: then it raises MemsaverError. Ignores ``timeout``, which would leave workers apart."""
    asleep = WEIGHTS in getattr(core.model_executor, "sleeping_tags", ())
    if not (asleep and isinstance(method, str) and writes_weights(method)):
        return call(core, method, timeout, args, kwargs)
    answers = call(core, CALL, None, (WRITE, method, *args), kwargs)
    failures = [failure for failure, *_ in answers if failure is not None]
    ends = call(core, CALL, None, (END, not failures))
    if failures:
        raise failures[0].to_error()
    if apart := [failure for failure, *_ in ends if failure is not None]:
        raise MemsaverError(f"workers may have different weights, so load them again: {apart[0].message}")
    return [result for _, result, _ in answers]
