"""A trainer with Adam and an engine on one GPU that give the device to each other: ways to do it, side by side.

Trainer and engine are separate processes. The trainer has one rank, a model of 3B shape and Adam, and computes in
bfloat16: FSDP2 (`fully_shard`) with fp32 parameters, or Megatron-core with its distributed optimizer. The engine is a
process with weights of 16 bits and a cache, by memsaver in every mode. A step: the engine releases, the trainer
resumes, trains and releases, the engine resumes. There is room for the engine's weights beside the trainer, so they
come back while it releases, and the cache after that.

    python benchmarks/training.py                        # memsaver and the framework's own offloading; needs a GPU
    python benchmarks/training.py --stock DIR            # torch_memory_saver, too, from a folder that has it
    python benchmarks/training.py --framework megatron   # needs megatron-core
    MEMSAVER_DRIVER=host python benchmarks/training.py --tiny --steps 2 --out /tmp   # on the host driver, as a check

Losses must equal those of a run that never releases, which has the device for itself. For memsaver, the page also has
the speeds over the content that is kept, each hand-over divided by its slower copy, and which state packs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
import torch.distributed as dist
from _machine import about_gpu, touch_host_memory
from _record import failed, new_parser, new_result, write
from torch.nn import functional

MIB = 1 << 20
MODES = ("memsaver", "its own", "torch_memory_saver")
#: Its name on the page, and what its own offloading is.
FRAMEWORKS = {
    "fsdp2": ("FSDP2 with Adam", 'its own: `.to("cpu")`, as verl 0.9.1 does it'),
    "megatron": ("Megatron-core with its distributed optimizer", "its own: `offload_to_cpu` of buffers and optimizer"),
}
#: Of the engine's resume, what the trainer's release does not cover.
REST = "engine resumes the rest"
#: What it does cover.
WEIGHTS = "engine resumes the weights"
#: In each of the four sequences of a step.
TOKENS = 512
PARTS = ("engine releases", "trainer resumes", "training", "trainer releases", REST)
#: How a line of a child begins that answers: torch and torch_memory_saver print, too.
ANSWER = "ANSWER "
ON_GPU = torch.cuda.is_available()
PLACE = torch.device("cuda" if ON_GPU else "cpu")

#: Qwen2.5-3B's shape, and one for a check.
SHAPE = {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
         "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 512, "tie_word_embeddings": True}  # fmt: skip

# -- the children: a command on each line of their input, an answer on each line of their output -----------------------


def answer(value: Any) -> None:
    print(ANSWER + json.dumps(value), flush=True)


def serve(calls: dict[str, Callable[[], Any]]) -> None:
    answer(None)
    for line in sys.stdin:
        begun = time.perf_counter()
        value = calls[line.strip()]()
        if ON_GPU:
            torch.cuda.synchronize()
        answer([time.perf_counter() - begun, value])


def engine(weights_bytes: int, cache_bytes: int) -> None:
    import memsaver_core as ms

    with ms.region("weights"):
        weights = torch.empty(weights_bytes // 2, dtype=torch.bfloat16, device=PLACE).normal_(std=0.02)
    with ms.region("kv_cache"):
        cache = torch.zeros(cache_bytes, dtype=torch.uint8, device=PLACE)
    expected = weights[::4099].float().sum().item()

    def resume() -> bool:
        ms.resume()
        return weights[::4099].float().sum().item() == expected and not cache[::4099].any()

    serve(
        {
            "release": lambda: ms.release().released_bytes / MIB,
            "resume weights": lambda: ms.resume(["weights"]).resumed_bytes / MIB,
            "resume": resume,
        }
    )


class Fsdp2:
    """Parameters of fp32, which are cast as they are gathered."""

    parameters: Literal["discard", "keep"] = "keep"

    def __init__(self, shape: dict[str, Any]) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        from transformers import AutoModelForCausalLM, Qwen2Config

        mesh = dist.init_device_mesh(PLACE.type, (1,))
        with PLACE:
            self.model = AutoModelForCausalLM.from_config(Qwen2Config(**shape), dtype=torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for layer in (*self.model.model.layers, self.model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=ON_GPU)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # it makes its state

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(ids, labels=ids).loss
        return loss

    def step(self) -> None:
        self.optimizer.step()

    def own_release(self) -> None:
        self._move("cpu")

    def own_resume(self) -> None:
        self._move(PLACE)

    def _move(self, place: torch.device | str) -> None:
        self.zero_grad()
        self.model.to(place, non_blocking=True)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                state[key] = value.to(place, non_blocking=True)


class Megatron:
    """Parameters of bfloat16, which the optimizer makes from its masters of fp32; gradients are added up in fp32."""

    parameters: Literal["discard", "keep"] = "discard"

    def __init__(self, shape: dict[str, Any]) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(0)
        config = TransformerConfig(
            num_layers=shape["num_hidden_layers"], hidden_size=shape["hidden_size"],
            ffn_hidden_size=shape["intermediate_size"], num_attention_heads=shape["num_attention_heads"],
            num_query_groups=shape["num_key_value_heads"], gated_linear_unit=True, activation_func=functional.silu,
            normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0, attention_dropout=0,
            bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16, gradient_accumulation_fusion=False,
        )  # fmt: skip
        model = GPTModel(
            config, get_gpt_layer_local_spec(normalization="RMSNorm"), shape["vocab_size"], TOKENS,
            position_embedding_type="rope", share_embeddings_and_output_weights=True,
        )  # fmt: skip
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, settings, model.to(PLACE, torch.bfloat16))
        adam = OptimizerConfig(
            optimizer="adam", lr=1e-5, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
        )
        self.optimizer = get_megatron_optimizer(adam, [self.model])
        self.optimizer.step()  # it makes its state

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=PLACE)[None]
        loss: torch.Tensor = self.model(ids, places, None, labels=ids).float().mean()
        return loss

    def step(self) -> None:
        self.model.finish_grad_sync()
        self.optimizer.step()

    def own_release(self) -> None:
        for buffer in self.model.buffers:
            buffer.offload_to_cpu()
        self.optimizer.offload_to_cpu()

    def own_resume(self) -> None:
        for buffer in self.model.buffers:
            buffer.reload_from_cpu()
        self.optimizer.restore_from_cpu()


def trainer(framework: str, mode: str, shape: dict[str, Any], folder: str, tokens: int) -> None:
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/{mode}", rank=0, world_size=1)
    torch.manual_seed(0)
    with ExitStack() as stack:
        if mode == "torch_memory_saver":
            if framework == "megatron":
                import megatron.core  # noqa: F401  # its import sets another hook mode
            from torch_memory_saver import torch_memory_saver

            torch_memory_saver.hook_mode = "preload"
            stack.enter_context(torch_memory_saver.region("trainer", enable_cpu_backup=True))
        trained: Fsdp2 | Megatron = (Megatron if framework == "megatron" else Fsdp2)(shape)
        trained.zero_grad()
    ids = torch.randint(10, shape["vocab_size"], (4, tokens), device=PLACE)

    def step() -> float:
        trained.zero_grad()
        total = 0.0
        for each in ids:
            loss = trained.loss(each[None])
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        trained.step()
        return total

    serve({"train": step, **_WAYS[mode](trained)})
    dist.destroy_process_group()


def by_memsaver(trained: Fsdp2 | Megatron) -> dict[str, Callable[[], Any]]:
    from memsaver_core import training

    held: list[training.Released] = []

    def release() -> dict[str, dict[str, int]]:
        """By tag, the bytes of content that are kept; those of them that were copied now, and what these take."""
        held.append(training.release(trained.model, trained.optimizer, parameters=trained.parameters))
        kept = [tag for tag in held[-1].report.tags if tag.restore in ("host", "file")]
        return {
            tag.tag: {
                "content": tag.backed_up_bytes + tag.unchanged_bytes + tag.shared_bytes + tag.zero_bytes,
                "copied": tag.backed_up_bytes,
                "stored": tag.kept_bytes,
            }
            for tag in kept
        }

    return {"release": release, "resume": lambda: held.pop().resume()}


def by_itself(trained: Fsdp2 | Megatron) -> dict[str, Callable[[], Any]]:
    def release() -> None:
        trained.own_release()
        if ON_GPU:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    return {"release": release, "resume": trained.own_resume}


def by_torch_memory_saver(trained: Fsdp2 | Megatron) -> dict[str, Callable[[], Any]]:
    from torch_memory_saver import torch_memory_saver

    def release() -> None:
        trained.zero_grad()
        torch.cuda.empty_cache()
        torch_memory_saver.pause("trainer")

    return {"release": release, "resume": lambda: torch_memory_saver.resume("trainer")}


_WAYS: dict[str, Callable[[Any], dict[str, Callable[[], Any]]]] = {
    "never released": lambda trained: {},
    "memsaver": by_memsaver,
    "its own": by_itself,
    "torch_memory_saver": by_torch_memory_saver,
}


class Child:
    def __init__(self, stack: ExitStack, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", json.dumps(arguments)],
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(self.process.wait)
        stack.callback(self.process.kill)
        self.answer()

    def call(self, name: str) -> tuple[float, Any]:
        self.start(name)
        seconds, value = self.answer()
        return seconds, value

    def start(self, name: str) -> None:
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(ANSWER):
                return json.loads(line.removeprefix(ANSWER))
        raise RuntimeError(f"a child has ended: {self.process.args}")


# -- what is measured --------------------------------------------------------------------------------------------------


def start_trainer(stack: ExitStack, mode: str, options: argparse.Namespace) -> Child:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    shape = json.dumps(TINY if options.tiny else SHAPE)
    environment = {}
    if mode == "torch_memory_saver":
        environment["PYTHONPATH"] = os.pathsep.join([str(options.stock), os.environ.get("PYTHONPATH", "")])
        find = "from torch_memory_saver.utils import get_binary_path_from_package as f; "
        find += "print(f('torch_memory_saver_hook_mode_preload'))"
        found = subprocess.run(
            [sys.executable, "-c", find], env={**os.environ, **environment}, capture_output=True, text=True, check=True
        )
        environment["LD_PRELOAD"] = found.stdout.strip()
    tokens = 16 if options.tiny else TOKENS
    return Child(stack, "trainer", options.framework, mode, shape, folder, str(tokens), **environment)


def never_released(options: argparse.Namespace) -> list[float]:
    """Return the losses."""
    with ExitStack() as stack:
        child = start_trainer(stack, "never released", options)
        return [child.call("train")[1] for _ in range(options.steps)]


def measure(mode: str, losses: list[float], options: argparse.Namespace) -> dict[str, Any]:
    unit = MIB if options.tiny else 1 << 30
    free = psutil.virtual_memory().available
    with ExitStack() as stack:
        served = Child(stack, "engine", str(6 * unit), str(options.cache * unit))
        served.call("release")
        learner = start_trainer(stack, mode, options)
        learner.call("release")
        equal, rows, kept, host = served.call("resume")[1], [], [], 0
        for expected in losses:
            row = {"engine releases": served.call("release")[0], "trainer resumes": learner.call("resume")[0]}
            row["training"], loss = learner.call("train")
            begun = time.perf_counter()
            served.start("resume weights")
            row["trainer releases"], tags = learner.call("release")
            row[WEIGHTS], _ = served.answer()
            _, intact = served.call("resume")
            row[REST] = time.perf_counter() - begun - row["trainer releases"]
            host = max(host, free - psutil.virtual_memory().available)
            equal = equal and intact and loss == expected
            kept += [tags] if tags else []  # by memsaver alone
            rows.append(row)
            print(mode, {part: round(seconds, 3) for part, seconds in row.items()}, flush=True)
    return {"steps": rows, "kept": kept, "host_mib": host / MIB, "equal": equal}


def kept_to_markdown(measured: dict[str, Any]) -> list[str]:
    """What memsaver kept in each step, and how fast it was for that."""
    pairs = list(zip(measured["steps"], measured["kept"], strict=True))

    def median(value: Callable[[dict[str, float], dict[str, dict[str, int]]], float]) -> float:
        return statistics.median(value(row, tags) for row, tags in pairs)

    def content(tags: dict[str, dict[str, int]]) -> int:
        return sum(tag["content"] for tag in tags.values())

    def speed(part: str) -> float:
        return median(lambda row, tags: content(tags) / 1e9 / row[part])

    def over_slower_copy(first: str, second: str, *whole: str) -> float:
        return median(lambda row, _: sum(row[part] for part in whole) / max(row[first], row[second]))

    to_engine = over_slower_copy("trainer releases", WEIGHTS, "trainer releases", REST)
    to_trainer = over_slower_copy("engine releases", "trainer resumes", "engine releases", "trainer resumes")
    rows = (
        ("content kept, GB", f"{median(lambda _, tags: content(tags) / 1e9):.3f}", "all but what is discarded"),
        ("release, GB/s", f"{speed('trainer releases'):.1f}", "content kept, by `trainer releases`"),
        ("resume, GB/s", f"{speed('trainer resumes'):.1f}", "content kept, by `trainer resumes`"),
        (
            "hand-over to the engine, by its slower copy",
            f"{to_engine:.2f}",
            f"the slower of `trainer releases` and `{WEIGHTS}`, which run at the same time",
        ),
        (
            "hand-over to the trainer, by its slower copy",
            f"{to_trainer:.2f}",
            "the slower of `engine releases` and `trainer resumes`, one after the other",
        ),
    )
    lines = ["", "| memsaver's trainer | | what it is |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]
    for name in sorted({name for _, tags in pairs for name in tags}):
        copied = sum(tags.get(name, {}).get("copied", 0) for _, tags in pairs)
        stored = sum(tags.get(name, {}).get("stored", 0) for _, tags in pairs)
        share = f"{stored / copied:.3f}" if copied else "nothing copied"
        lines.append(f"| bytes stored over content copied, `{name}` | {share} | 1 if nothing packs |")
    return lines


def to_markdown(record: dict[str, Any]) -> str:
    modes, (name, own) = record["modes"], FRAMEWORKS[record["framework"]]

    def cells(shown: Callable[[dict[str, Any]], str]) -> str:
        return " | ".join(f"FAILED: {each['failed']}" if "failed" in each else shown(each) for each in modes.values())

    def median(*parts: str) -> str:
        return cells(lambda each: f"{statistics.median(sum(row[part] for part in parts) for row in each['steps']):.3f}")

    lines = [
        f"# A trainer and an engine on one device: {record['gpu']}, driver {record['driver']}, torch {record['torch']}",
        "",
        f"{record['date']}, `{record['command']}`. {name} on one rank; {own}. Medians of {record['steps']} steps, "
        "seconds; host memory: what the machine has less of it than before, while the trainer is released.",
        "",
        f"| | {' | '.join(modes)} |",
        f"|---|{'---|' * len(modes)}",
        *(f"| {part} | {median(part)} |" for part in PARTS),
        f"| hand-over to the engine | {median('trainer releases', REST)} |",
        f"| hand-over to the trainer | {median('engine releases', 'trainer resumes')} |",
        f"| the whole step | {median(*PARTS)} |",
        "| host memory, MiB | " + cells(lambda each: f"{each['host_mib']:,.0f}") + " |",
        "| losses and weights equal | " + cells(lambda each: "yes" if each["equal"] else "NO") + " |",
        *(kept_to_markdown(modes["memsaver"]) if modes.get("memsaver", {}).get("kept") else []),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--stock", type=Path, help="a folder with torch_memory_saver")
    parser.add_argument("--framework", choices=list(FRAMEWORKS), default="fsdp2")
    parser.add_argument("--modes", nargs="+", choices=MODES, help="by default all for which there is what they need")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cache", type=int, default=32, help="the engine's cache, GiB")
    parser.add_argument("--tiny", action="store_true", help="a model of 128 KiB, and MiB for GiB: a check")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        kind, *arguments = options.child
        if kind == "engine":
            engine(*map(int, arguments))
        else:
            framework, mode, shape, folder, tokens = arguments
            trainer(framework, mode, json.loads(shape), folder, int(tokens))
        return
    about = about_gpu() if ON_GPU else {"gpu": "the host driver", "driver": "none", "torch": torch.__version__}
    record: dict[str, Any] = {
        **new_result("training.py"),
        **about,
        "framework": options.framework,
        "steps": options.steps,
        "modes": {},
    }
    if ON_GPU:
        touch_host_memory()
    losses = never_released(options)
    page = ""
    for mode in options.modes or [each for each in MODES if each != "torch_memory_saver" or options.stock]:
        try:
            record["modes"][mode] = measure(mode, losses, options)
        except Exception as error:
            record["modes"][mode] = failed(error)
        # What is measured is measured, whatever becomes of the next.
        name = "training" if options.framework == "fsdp2" else f"training-{options.framework}"
        page = write(name, record, to_markdown, options.out)
    print(page)


if __name__ == "__main__":
    main()
