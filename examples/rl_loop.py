"""Reinforcement learning with engine and trainer on one device that has not room for both.

    python examples/rl_loop.py                       starts a separate engine
    python examples/rl_loop.py --url URL --model DIR  uses a running `memsaver serve --model DIR`

Each step: rollout, release everything, train in the freed memory in a separate process, resume the weights, overwrite
them, resume the rest. Without a GPU the two compete for one host device (MEMSAVER_HOST_DEVICE), out-of-memory included.
The reward is the share of even token ids: nobody's goal, but it can be learned in a few steps.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memsaver_server.client import Client

MIB = 1 << 20
Rollout = tuple[list[int], list[int]]  # prompt and answer, as token ids


def run(engine: Client, model: Path, work: Path, steps: int) -> list[float]:
    """Run ``steps`` steps; returns the reward of each rollout, one more than there are steps."""
    rollouts = roll_out(engine)
    rewards = [mean_reward(rollouts)]
    for step in range(1, steps + 1):
        # The trainer overwrites all weights, so nobody needs the old ones: no backup, no copy.
        released = engine.release(restore={"weights": "discard"})

        checkpoint = work / f"step-{step}"
        trainer_bytes = in_a_process_of_its_own(train, model, rollouts, checkpoint)

        engine.resume(["weights"], wait_for_memory_s=60)
        engine.update_weights_from_disk(checkpoint)
        engine.resume()

        model, rollouts = checkpoint, roll_out(engine)
        rewards.append(mean_reward(rollouts))
        print(
            f"step {step}: released {released.released_bytes / MIB:.0f} MiB, "
            f"trained with {trainer_bytes / MIB:.0f} MiB, reward {rewards[-2]:.3f} -> {rewards[-1]:.3f}",
            flush=True,
        )
    return rewards


def roll_out(engine: Client, answers: int = 32, tokens: int = 16) -> list[Rollout]:
    """Sample some answers, all at once: the engine batches them."""

    def one(number: int) -> Rollout:
        prompt = [number + 1, number + 2]
        sampled = engine.generate(input_ids=prompt, max_new_tokens=tokens, temperature=1.0, ignore_eos=True)
        return prompt, sampled["output_ids"]

    with ThreadPoolExecutor(answers) as pool:
        return list(pool.map(one, range(answers)))


def mean_reward(rollouts: list[Rollout]) -> float:
    tokens = [token for _, answer in rollouts for token in answer]
    return sum(token % 2 == 0 for token in tokens) / len(tokens)


def train(model_dir: Path, rollouts: list[Rollout], checkpoint: Path) -> int:
    """Take some policy-gradient steps from ``model_dir`` to ``checkpoint``; returns the device memory that it took."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import memsaver_core as ms

    device = ms.torch_device()
    model = AutoModelForCausalLM.from_pretrained(model_dir).to(device)
    # On the host driver this is what makes the trainer a tenant of the shared device; on a GPU it is one anyway.
    ms.adopt(model, "trainer")
    with ms.region("trainer"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, foreach=False)
        improve(model, optimizer, rollouts)
    taken = sum(tag.bytes for tag in ms.status().tags)
    model.save_pretrained(checkpoint)
    if (model_dir / "tokenizer.json").exists():
        AutoTokenizer.from_pretrained(model_dir).save_pretrained(checkpoint)
    return taken


def improve(model: Any, optimizer: Any, rollouts: list[Rollout]) -> None:
    """Take four policy-gradient steps on the model's device."""
    import torch

    start = len(rollouts[0][0])
    ids = torch.tensor([prompt + answer for prompt, answer in rollouts], device=model.device)
    rewards = (ids[:, start:] % 2 == 0).float()
    for _ in range(4):
        optimizer.zero_grad()
        logits = model(ids).logits[:, start - 1 : -1]
        chosen = logits.log_softmax(-1).gather(2, ids[:, start:, None]).squeeze(2)
        (-(rewards - rewards.mean()) * chosen).mean().backward()
        optimizer.step()


def in_a_process_of_its_own(work, *arguments):  # type: ignore[no-untyped-def]
    """Return what ``work(*arguments)`` returns; all memory that it took has gone with its process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        result = pool.apply(work, arguments)
        pool.close()
        pool.join()
    return result


def make_model(folder: Path) -> Path:
    """Write a small Qwen2 with random weights."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """Run ``memsaver serve`` for the length of the block; gives its address."""
    command = [sys.executable, "-m", "memsaver_server.cli", "serve", "--model", str(model), "--port", "0"]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert engine.stdout is not None
        address = re.search(r"http://\S+", engine.stdout.readline())
        if address is None:
            sys.exit("the engine did not start")
        yield address.group()
    finally:
        engine.terminate()
        engine.wait()


def main(description: str, run: Callable[[Client, Path, Path, int], object]) -> None:
    """Call ``run`` with the engine that the command line names, or one that is started, its model's folder, a folder to
    work in and the number of steps."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running engine; without it one is started")
    parser.add_argument("--model", type=Path, help="the folder that the running engine serves")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if bool(options.url) != bool(options.model):
        parser.error("give --url and --model together, or neither")
    with tempfile.TemporaryDirectory(prefix="memsaver-rl-") as folder:
        work = Path(folder)
        if options.url:
            with Client(options.url) as engine:
                run(engine, options.model, work, options.steps)
            return
        # Without a GPU: one host device for both processes, too small to hold both at once.
        os.environ.setdefault("MEMSAVER_HOST_DEVICE", f"rl-{os.getpid()}")
        os.environ.setdefault("MEMSAVER_HOST_CAPACITY", "128MiB")
        model = make_model(work / "model")
        with serving(model) as url, Client(url) as engine:
            run(engine, model, work, options.steps)


if __name__ == "__main__":
    main(__doc__, run)
