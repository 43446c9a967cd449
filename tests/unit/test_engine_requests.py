"""What a request may ask for, and which slot it gets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memsaver_server.engines._requests import Request, Sampler, Sampling
from memsaver_server.engines._slots import SlotTable


def test_defaults_are_greedy() -> None:
    assert Sampling.parse(None) == Sampling.parse({}) == Sampling()
    assert Sampler(Sampling()).greedy


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"temperature": True},
        {"max_new_tokens": 0},
        {"max_new_tokens": 1.5},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -2},
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
        sampler = Sampler(Sampling.parse({"temperature": 1.0, **given}))
        return [sampler.pick(logits) for _ in range(200)]

    assert draws(seed=5) == draws(seed=5)
    assert draws(seed=5) != draws(seed=6)
    assert draws() != draws()
    assert set(draws(seed=1, top_k=2)) == {1, 2}
    assert set(draws(seed=1, top_p=0.2)) == {1}
    assert set(draws(seed=1, top_k=1)) == {1}
    assert set(draws(seed=1, temperature=1e-3)) == {1}
    assert set(draws(seed=1)) > {1, 2, 4}


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
    table.give_back(slot)
    assert table.take([1, 2, 3, 4, 5, 6, 7, 8]) == (slot, 4)
    table.give_back(slot)
    assert table.take([1, 2, 3, 4, 9, 9, 9, 9, 9]) == (slot, 4)


def test_a_new_prompt_takes_the_slot_that_loses_least() -> None:
    table = SlotTable(3, chunk=1)
    for prompt in ([1, 1], [2, 2]):
        slot, _ = table.take(prompt)
        table.remember(slot, prompt)
    table.give_back(1)
    table.give_back(0)
    assert table.take([9, 9])[0] == 2  # holds nothing
    assert table.take([9, 9])[0] == 1  # given back first
    assert table.free == 1


def test_forgotten_prefixes_are_not_found() -> None:
    table = SlotTable(1, chunk=2)
    slot, _ = table.take([1, 2, 3])
    table.remember(slot, [1, 2, 3])
    table.give_back(slot)
    table.forget()
    assert table.take([1, 2, 3]) == (slot, 0)
