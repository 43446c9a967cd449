"""Real vLLM with what is easily lost in a sleep: adapters, calibrated scales, states, experts, cached prefixes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.gpu.vllm_server import QUICK, complete, completions, missing, post, serving

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]

GRAPHS = ("--compilation-config", json.dumps(QUICK))
DUMMY = ("--load-format", "dummy", *GRAPHS)

#: Small shapes of an engine with experts, and of one with Mamba layers beside attention.
EXPERTS = {
    "architectures": ["OlmoeForCausalLM"],
    "model_type": "olmoe",
    "hidden_size": 512,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
HYBRID = {
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def write_adapter(folder: Path, layers: int = 4, hidden: int = 1536, rank: int = 8) -> None:
    """Write a LoRA adapter of seeded random weights, large enough to change tokens."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for layer in range(layers):
        name = f"base_model.model.model.layers.{layer}.self_attn"
        for module in ("q_proj", "o_proj"):
            tensors[f"{name}.{module}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator).bfloat16()
            tensors[f"{name}.{module}.lora_B.weight"] = torch.randn(hidden, rank, generator=generator).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**config, "bias": "none", "task_type": "CAUSAL_LM"}))


@pytest.mark.guards("calibrated FP8 scales or adapters were wrong after a wake-up")
def test_an_adapter_is_the_same_after_a_wake_up(model: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter")
    arguments = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"a={tmp_path / 'adapter'}", *GRAPHS)
    with serving(model, tmp_path / "log", *arguments) as (client, _):
        before = completions(client), completions(client, "a")
        assert before[0] != before[1]
        for _ in range(2):
            post(client, "/release_memory_occupation")
            post(client, "/resume_memory_occupation")
            assert (completions(client), completions(client, "a")) == before


@pytest.mark.guards("calibrated FP8 scales or adapters were wrong after a wake-up")
def test_calibrated_scales_are_the_same_after_a_wake_up(model: Path, tmp_path: Path) -> None:
    arguments = ("--kv-cache-dtype", "fp8", "--calculate-kv-scales", *GRAPHS)
    with serving(model, tmp_path / "log", *arguments) as (client, _):
        complete(client, 2)  # by which vLLM calibrates
        before = completions(client)
        for _ in range(2):
            post(client, "/release_memory_occupation")
            post(client, "/resume_memory_occupation")
            assert completions(client) == before


@pytest.mark.parametrize("shape", [EXPERTS, HYBRID], ids=["experts", "hybrid"])
def test_other_architectures_wake_with_equal_tokens(shape: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    with serving(tmp_path, tmp_path / "log", *DUMMY) as (client, _):
        before = completions(client)
        assert len({token for answer in before for token in answer}) > 5
        for _ in range(2):
            post(client, "/release_memory_occupation")
            post(client, "/resume_memory_occupation")
            assert completions(client) == before


@pytest.mark.guards("the prefix cache pointed to discarded pages")
def test_a_prompt_in_chunks_finds_no_page_from_before(model: Path, tmp_path: Path) -> None:
    """A prompt longer than a chunk, cached before the release, is computed anew after the resume."""
    arguments = ("--max-num-batched-tokens", "64", "--max-num-seqs", "8", "--enable-prefix-caching", *GRAPHS)
    with serving(model, tmp_path / "log", *arguments) as (client, _):
        first = complete(client, 5)
        complete(client, 5)  # from the cached prefix
        for _ in range(2):
            post(client, "/release_memory_occupation")
            post(client, "/resume_memory_occupation")
            assert complete(client, 5) == first
