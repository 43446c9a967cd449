"""Reinforcement learning with a trainer that stays alive: engine and trainer give the device to each other in turns.

    python examples/trainer_in_turns.py                       starts a separate engine
    python examples/trainer_in_turns.py --url URL --model DIR  uses a running `memsaver serve --model DIR`

The engine is released and resumed over HTTP, as in rl_loop.py. The trainer pauses its parameters and optimizer state by
torch_memory_saver's calls, as slime does, which memsaver provides: they are kept in host memory while the engine
serves, and nothing is loaded or initialized again. Without a GPU the two compete for one host device that has not room
for both.
"""

from __future__ import annotations

from pathlib import Path

import memsaver_core.compat

memsaver_core.compat.install()  # or install the distribution memsaver-torch-memory-saver

import torch  # noqa: E402
from rl_loop import Rollout, improve, main, mean_reward, roll_out  # noqa: E402
from torch_memory_saver import torch_memory_saver  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

import memsaver_core as ms  # noqa: E402
from memsaver_server.client import Client  # noqa: E402

MIB = 1 << 20
TAG = "trainer"


class Trainer:
    """A policy that is trained, with its optimizer state. Its memory is on the device between `resume` and `pause`."""

    def __init__(self, model: Path) -> None:
        device = ms.torch_device()
        content = AutoModelForCausalLM.from_pretrained(model).state_dict()
        with torch_memory_saver.region(TAG, enable_cpu_backup=True):
            with device:
                self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
            self.model.load_state_dict(content)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, foreach=False)
            # AdamW allocates its state at the first step, which therefore belongs in the region; of zeros it changes
            # nothing but weight decay, which is none here.
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.0
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def resume(self) -> None:
        torch_memory_saver.resume(TAG)

    def pause(self) -> None:
        """Give everything back to the driver: gradients and activations too, which are in no region."""
        self.optimizer.zero_grad()
        torch_memory_saver.pause(TAG)

    def train(self, rollouts: list[Rollout]) -> None:
        improve(self.model, self.optimizer, rollouts)

    def bytes(self) -> int:
        return sum(tag.bytes for tag in ms.status().tags if tag.tag == TAG)


def run(engine: Client, model: Path, work: Path, steps: int) -> list[float]:
    """Run ``steps`` steps; returns the reward of each rollout, one more than there are steps."""
    rollouts = roll_out(engine)
    rewards = [mean_reward(rollouts)]
    engine.release(restore={"weights": "discard"})
    trainer = Trainer(model)
    for step in range(1, steps + 1):
        trainer.train(rollouts)
        checkpoint = work / f"step-{step}"
        trainer.model.save_pretrained(checkpoint)
        trainer.pause()

        engine.resume(["weights"], wait_for_memory_s=60)
        engine.update_weights_from_disk(checkpoint)
        engine.resume()
        rollouts = roll_out(engine)
        rewards.append(mean_reward(rollouts))
        released = engine.release(restore={"weights": "discard"})

        trainer.resume()
        print(
            f"step {step}: engine released {released.released_bytes / MIB:.0f} MiB, "
            f"trainer resumed {trainer.bytes() / MIB:.0f} MiB, reward {rewards[-2]:.3f} -> {rewards[-1]:.3f}",
            flush=True,
        )
    return rewards


if __name__ == "__main__":
    main(__doc__, run)
