"""One of two ranks that train with a real framework on the CPU: ``framework_trainer FRAMEWORK RANK FOLDER``.

Trains twice, the second time with a release after each step, and compares the losses. Prints, by tag, how many bytes
were released in all, and how many copied.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from memsaver_core.training import released

RANKS = 2
STEPS = 5


class Trainer:
    """What both frameworks train: 16-bit parameters, of which an optimizer has fp32 masters."""

    model: Any
    optimizer: Any
    parameters: Literal["discard", "keep"] = "discard"
    #: What has the method by which the optimizer makes parameters, and its name.
    makers: Iterable[Any] = ()
    method = ""

    def zero_grad(self) -> None:
        """Before a step."""

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        raise NotImplementedError


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


class DeepSpeed(Trainer):
    method = "update_lp_params"

    def __init__(self, stage: int) -> None:
        import deepspeed
        import deepspeed.comm.torch

        deepspeed.comm.torch.build_shm_op = lambda: None  # it is compiled first, and ranks that wait spin
        model = layers()
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": stage},
        }
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=model, optimizer=adam, config=config, dist_init_required=False
        )
        if stage in (1, 2):
            self.makers = [self.optimizer]
        else:
            self.parameters = "keep"

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss)

    def step(self) -> None:
        self.model.step()


class OnTheCpu(TorchFunctionMode):
    """Megatron-core asks for CUDA by name: what it makes there is made on the CPU, and says that it is there."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(keywords or {})
        if str(keywords.get("device")).startswith("cuda"):
            keywords["device"] = "cpu"
        if function is Tensor.cuda:
            return arguments[0]
        result = function(*arguments, **keywords)
        if function is Tensor.type and len(arguments) == 1:
            return result.replace("torch.", "torch.cuda.")
        return result


class Megatron(Trainer):
    method = "_copy_main_params_to_model_params"

    def __init__(self, *, distributed: bool = False, overlap: bool = False) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        config = TransformerConfig(
            num_layers=1, hidden_size=64, num_attention_heads=1, bf16=True, params_dtype=torch.bfloat16,
            use_cpu_initialization=True, gradient_accumulation_fusion=False,
        )  # fmt: skip
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed, overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        )  # fmt: skip
        adam = OptimizerConfig(
            optimizer="adam", lr=1e-3, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=distributed,
            overlap_param_gather=overlap,
        )  # fmt: skip
        self.model = DistributedDataParallel(config, settings, layers().bfloat16())
        self.optimizer = get_megatron_optimizer(adam, [self.model])
        self.makers = self.optimizer.chained_optimizers

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.model.finish_grad_sync()
        self.optimizer.step()


TRAINERS: dict[str, Callable[[], Trainer]] = {
    "megatron": Megatron,
    "megatron, distributed": lambda: Megatron(distributed=True),
    "megatron, overlapping": lambda: Megatron(distributed=True, overlap=True),
    **{f"deepspeed, ZeRO {stage}": lambda stage=stage: DeepSpeed(stage) for stage in range(4)},  # type: ignore[misc]
}


def losses(trainer: Trainer, rank: int) -> Iterator[float]:
    """The loss of each step."""
    data = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        trainer.zero_grad()
        x = torch.randn(8, 64, generator=data).bfloat16()
        loss = (trainer.model(x) - x).float().square().mean()
        trainer.backward(loss)
        trainer.step()
        yield loss.item()


def empty_when_made(trainer: Trainer) -> list[bool]:
    """Whether all parameters are zeros, each time that the optimizer makes them from now on."""
    times = []

    def watched(made: Callable[[], object]) -> Callable[[], object]:
        def make() -> object:
            times.append(not any(each.any() for each in trainer.model.parameters()))
            return made()

        return make

    for each in trainer.makers:
        setattr(each, trainer.method, watched(getattr(each, trainer.method)))
    return times


def main() -> None:
    kind, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    if kind.startswith("megatron"):
        from megatron.core import parallel_state

        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
        OnTheCpu().__enter__()
        parallel_state.initialize_model_parallel()
    plain = list(losses(TRAINERS[kind](), rank))
    trainer = TRAINERS[kind]()
    copied: Counter[str] = Counter()
    released_bytes: Counter[str] = Counter()
    empty = empty_when_made(trainer)
    for loss, expected in zip(losses(trainer, rank), plain, strict=True):
        assert loss == expected
        empty.clear()
        with released(trainer.model, trainer.optimizer, parameters=trainer.parameters) as memory:
            assert not any(empty)  # they were made, to compare them
            empty.clear()
        assert all(empty)
        assert bool(empty) == (trainer.parameters == "discard")
        for tag in memory.report.tags:
            name = tag.tag.removeprefix("trainer.")
            copied[name] += tag.backed_up_bytes
            released_bytes[name] += tag.released_bytes
    print(json.dumps({name: [released_bytes[name], copied[name]] for name in released_bytes}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
