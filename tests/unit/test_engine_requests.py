"""Parameters that a request may have, and the slot that it gets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from memsaver_server.reference.requests import Request, Sampling
from memsaver_server.reference.scheduler import SlotTable


def asking(given: dict[str, Any]) -> Request:
    return Request(prompt=[1], sampling=Sampling.parse(given))


def test_defaults_are_greedy() -> None:
    assert Sampling.parse(None) == Sampling.parse({}) == Sampling()
    assert asking({}).greedy


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1e400},
        {"temperature": 10**400},
        {"temperature": True},
        {"max_new_tokens": 0},
        {"max_new_tokens": 1.5},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_p": 1e-300},
        {"top_k": -2},
        {"top_k": float("nan")},
        {"min_p": float("nan")},
        {"min_p": 1e-300},
        {"repetition_penalty": 0},
        {"repetition_penalty": float("inf")},
        {"frequency_penalty": -1e308},
        {"presence_penalty": float("nan")},
        {"logit_bias": {"3": float("nan")}},
        {"seed": -1},
        {"stop_token_ids": 3},
        {"stop_token_ids": ["x"]},
        {"stop": ["\n"]},
        {"n": 2},
        {"regex": "a+"},
        "greedy",
    ],
)
def test_what_cannot_be_done_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ValueError, match="sampling_params"):
        Sampling.parse(given)


def test_values_that_ask_for_nothing_are_taken() -> None:
    given = {
        "n": 1,
        "min_p": 0,
        "stop": [],
        "repetition_penalty": 1.0,
        "regex": None,
        "no_stop_trim": True,
        "top_k": -1,
    }
    assert Sampling.parse(given) == Sampling()


def test_draws_follow_the_seed_and_the_bounds() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9, -1.0, 2.8])

    def draws(**given: Any) -> list[int]:
        request = asking({"temperature": 1.0, **given})
        return [request.pick(logits) for _ in range(200)]

    assert draws(seed=5) == draws(seed=5)
    assert draws(seed=5) != draws(seed=6)
    assert draws() != draws()
    assert set(draws(seed=1, top_k=2)) == {1, 2}
    assert set(draws(seed=1, top_p=0.2)) == {1}
    assert set(draws(seed=1, top_k=1)) == {1}
    assert set(draws(seed=1, temperature=1e-3)) == {1}
    assert set(draws(seed=1)) > {1, 2, 4}


@pytest.mark.parametrize("temperature", [0, -0.0, 5e-324, 1e-45, 1e-38, 9e-6])
def test_a_temperature_too_small_to_matter_is_greedy(temperature: float) -> None:
    """As in vLLM and SGLang: scores divided by it would overflow to NaN."""
    request = asking({"temperature": temperature})
    assert request.greedy
    assert request.pick(torch.tensor([0.0, 3.0, 2.9])) == 1


#: Possible scores of a model, also of a broken one, and the tokens that may be sampled from them.
SCORES = [
    ([0.0, 3.0, 2.9, -1.0], {0, 1, 2, 3}),
    ([3e38, 1.0, -3e38, 0.0], {0}),
    ([1.0, float("-inf"), 2.0, float("-inf")], {0, 2}),
    ([1.0, float("inf"), 2.0, float("inf")], {1, 3}),
    ([1.0, float("nan"), 2.0, float("-inf")], {0, 2}),
    ([float("nan")] * 4, {0, 1, 2, 3}),
    ([float("-inf")] * 4, {0, 1, 2, 3}),
    ([float("inf")] * 4, {0, 1, 2, 3}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scores", "allowed"), SCORES)
def test_whatever_is_asked_for_can_be_drawn(scores: list[float], allowed: set[int], dtype: torch.dtype) -> None:
    """Sampling from NaN is an error on the host, and destroys the context on a GPU."""
    logits = torch.tensor(scores, dtype=dtype)
    before = logits.clone()
    for temperature, top_p, top_k in itertools.product(
        (1e-5, 1e-3, 1.0, 100.0), (1e-6, 0.5, 1.0), (-1, 0, 2, 4, 5, 10**30)
    ):
        given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": 10**40}
        request = asking(given)
        assert not request.greedy
        assert {request.pick(logits) for _ in range(5)} <= allowed, given
    assert torch.equal(
        logits.nan_to_num(), before.nan_to_num()
    )  # the engine's own scores, which the next token may read


def test_an_answer_ends_at_its_stop_tokens() -> None:
    for sampling, token, finish in [
        (Sampling(), 7, {"type": "stop", "matched": 7}),
        (Sampling(ignore_eos=True), 7, None),
        (Sampling(ignore_eos=True, stop_token_ids=frozenset({8})), 8, {"type": "stop", "matched": 8}),
        (Sampling(max_new_tokens=1), 9, {"type": "length", "length": 1}),
    ]:
        request = Request(prompt=[1], sampling=sampling)
        request.accept(token, frozenset({7}), 100)
        assert request.finish == finish


def test_slots_reuse_whole_chunks_and_leave_one_to_compute() -> None:
    table = SlotTable(2, chunk=4)
    slot, reused = table.take([1, 2, 3, 4, 5, 6, 7, 8])
    assert reused == 0
    table.remember(slot, [1, 2, 3, 4, 5, 6, 7, 8])
    table.free.append(slot)
    assert table.take([1, 2, 3, 4, 5, 6, 7, 8]) == (slot, 4)
    table.free.append(slot)
    assert table.take([1, 2, 3, 4, 9, 9, 9, 9, 9]) == (slot, 4)


def test_a_new_prompt_takes_the_slot_that_loses_least() -> None:
    table = SlotTable(3, chunk=1)
    for prompt in ([1, 1], [2, 2]):
        slot, _ = table.take(prompt)
        table.remember(slot, prompt)
    table.free.append(1)
    table.free.append(0)
    assert table.take([9, 9])[0] == 2  # holds nothing
    assert table.take([9, 9])[0] == 1  # freed first
    assert len(table.free) == 1


def test_forgotten_prefixes_are_not_found() -> None:
    table = SlotTable(1, chunk=2)
    slot, _ = table.take([1, 2, 3])
    table.remember(slot, [1, 2, 3])
    table.free.append(slot)
    table.forget()
    assert table.take([1, 2, 3]) == (slot, 0)
