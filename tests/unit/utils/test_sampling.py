"""Limits of what is left of a response, and seeds."""

from __future__ import annotations

from typing import Any

import pytest

from slime.agent.adapters.generation import Replies, generated, left_of
from slime.rollout.requests.generate_request import generate_payload
from slime.utils.sampling import limited, sampling_seed
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args


@pytest.mark.parametrize(
    ("least", "most", "made", "expected"),
    [(12, 16, 10, (2, 6)), (12, 16, 12, (0, 4)), (12, 16, 15, (0, 1)), (4, 16, 0, (4, 16)), (16, 16, 3, (13, 13))],
)
def test_both_limits_follow_what_is_there_already(least: int, most: int, made: int, expected: tuple[int, int]):
    params = {"min_new_tokens": least, "max_new_tokens": most}
    sample = Sample(prompt="p", tokens=[1] * (1 + made), response_length=made)
    payload = generate_payload(rollout_args(), sample, params, True)
    replies = Replies([1])
    if made:
        entries = [[-0.5, 7, None]] * made
        replies.add(generated({"meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": entries}}))
    for found in (payload["sampling_params"], left_of(params, replies), limited(params, most - made, made)):
        assert (found["min_new_tokens"], found["max_new_tokens"]) == expected
    assert params == {"min_new_tokens": least, "max_new_tokens": most}


def test_the_least_is_not_more_than_the_context_leaves():
    args: Any = rollout_args(eval_max_context_len=8)
    params = {"min_new_tokens": 12, "max_new_tokens": 16}
    payload = generate_payload(args, Sample(prompt="p", tokens=[1] * 3), params, True)
    assert payload["sampling_params"] == {"min_new_tokens": 5, "max_new_tokens": 5}


def test_no_limit_comes_of_none():
    assert limited({"temperature": 1.0}, 5, 2) == {"temperature": 1.0, "max_new_tokens": 5}
    assert limited({"min_new_tokens": None}, 5) == {"min_new_tokens": None, "max_new_tokens": 5}


def test_seeds_are_their_parts_and_fit_every_engine():
    seeds = [sampling_seed(42, group, number) for group in range(300) for number in range(8)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(42, 3, 1) == sampling_seed(42, 3, 1) != sampling_seed(43, 3, 1)
    assert sampling_seed(4, 23) != sampling_seed(42, 3)
