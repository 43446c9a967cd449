"""The parts of a model's weights that ranks hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, Qwen2Config

from memsaver_server.reference.weights import WHOLE, Partition, check_divisible, divide

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model_of(config: Any) -> Any:
    """A model without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_linear_layers_are_divided_by_the_plan() -> None:
    """By outputs with their biases, or by inputs; all else is whole."""
    config = Qwen2Config(**SIZES, tie_word_embeddings=False)
    model = model_of(config)
    partition = divide(model, 1, 2)
    found, whole = shapes(model), shapes(model_of(config))
    layer = "model.layers.1"
    assert found[f"{layer}.self_attn.q_proj.weight"] == (16, 32)
    assert found[f"{layer}.self_attn.q_proj.bias"] == (16,)
    assert found[f"{layer}.self_attn.o_proj.weight"] == (32, 16)
    assert found[f"{layer}.mlp.up_proj.weight"] == (24, 32)
    assert found[f"{layer}.mlp.down_proj.weight"] == (32, 24)
    assert found["lm_head.weight"] == (32, 32)
    assert found["model.embed_tokens.weight"] == (64, 32)
    for name, parameter in model.named_parameters():
        assert tuple(partition.whole_shape(name, parameter)) == whole[name]


def test_tied_weights_stay_whole() -> None:
    model = model_of(Qwen2Config(**SIZES, tie_word_embeddings=True))
    model.tie_weights()
    divide(model, 0, 2)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape == (64, 32)


def test_parts_are_the_whole() -> None:
    """Side by side; what is added to a sum over the ranks, on rank 0 alone."""
    whole = torch.arange(24.0).reshape(4, 6)
    parts = [Partition(rank, 2, {"in": 1, "out": 0, "added": -1}) for rank in range(2)]
    assert torch.equal(torch.cat([each.part("in", whole) for each in parts], 1), whole)
    assert torch.equal(torch.cat([each.part("out", whole) for each in parts], 0), whole)
    assert torch.equal(sum(each.part("added", whole) for each in parts), whole)
    assert all(each.part("other", whole) is whole for each in parts)
    with pytest.raises(ValueError, match=r"in of shape \[4, 5\] cannot be divided among 2 ranks"):
        parts[0].part("in", whole[:, :5])


def test_one_rank_holds_everything() -> None:
    model = model_of(Qwen2Config(**SIZES))
    before = shapes(model)
    assert divide(model, 0, 1) is WHOLE
    assert shapes(model) == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64), "has no tensor-parallel plan"),
        (MixtralConfig(**SIZES, num_local_experts=2), "which this engine does not support"),
    ],
)
def test_models_that_cannot_be_divided(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"{message}.*tensor_parallel=1"):
        divide(model_of(config), 0, 2)


def test_heads_limit_the_ranks() -> None:
    config = Qwen2Config(**{**SIZES, "num_attention_heads": 12, "num_key_value_heads": 6})
    check_divisible(config, 3)
    with pytest.raises(ValueError, match=r"4 ranks cannot share .* tensor_parallel can be 1, 2, 3, 6"):
        check_divisible(config, 4)
