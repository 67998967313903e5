"""Public names are called as code written for slime <= 0.3.1 calls them: by position and all by keyword."""

from __future__ import annotations

import pytest
import torch

from slime.backends.megatron_utils import cp_utils
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_responses, get_values
from slime.utils.moved import also_named
from slime.utils.ppo_utils import calculate_log_probs_and_entropy
from tests.support.public_surface import read_table
from tests.support.reference_calls import Call, forms, perform
from tests.unit.compat import helpers, losses, rewards, samples, services

CALLS: list[Call] = [*losses.CALLS, *samples.CALLS, *rewards.CALLS, *helpers.CALLS, *services.CALLS]
ROWS = {row.path: row for row in read_table()}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("call", "form"),
    [pytest.param(call, form, id=f"{call.path}-{form}") for call in CALLS for form in forms(ROWS[call.path])],
)
def test_calls_in_the_reference_form(call: Call, form: str) -> None:
    perform(ROWS[call.path], call, form)


PADDED = {"qkv_format": "bshd"}


@pytest.mark.parametrize(
    "call",
    [
        lambda: cp_utils.get_sum_of_sample_mean([3], [2], [torch.ones(2)], max_seq_lens=[8], **PADDED),
        lambda: cp_utils.get_logits_and_tokens_offset_with_cp(3, 2, max_seq_len=8, **PADDED),
        lambda: cp_utils.slice_with_cp(torch.ones(3), 0, max_seq_len=8, **PADDED),
        lambda: cp_utils.slice_log_prob_with_cp([0.5, 0.5], 3, 2, max_token_len=8, **PADDED),
    ],
)
def test_a_row_per_sample_is_refused_by_name(call) -> None:
    with pytest.raises(ValueError, match=r"qkv_format='bshd': expected 'thd'; .* leave both arguments out"):
        call()


@pytest.mark.parametrize(
    "function", [get_log_probs_and_entropy, lambda *a, **k: list(get_responses(*a, **k)), get_values]
)
def test_a_row_per_sample_is_refused_by_shape(function) -> None:
    given = losses.sample(logits=torch.zeros(2, 8, 1), max_seq_lens=[8, 8])
    with pytest.raises(ValueError, match=r"one row of packed samples, \[1, T, ...\], got \(2, 8, 1\)"):
        function(given.pop("logits"), **given)


def test_a_mask_of_another_vocabulary_is_refused() -> None:
    given = losses.two_rows(log_prob_keep_mask=torch.ones(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"log_prob_keep_mask: expected the shape \(2, 2\), got \(2, 3\)"):
        calculate_log_probs_and_entropy(**given)


def test_what_is_not_kept_gets_no_gradient() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    keep = torch.tensor([[True, False, False]])
    log_probs, entropy = calculate_log_probs_and_entropy(logits, torch.tensor([1]), None, log_prob_keep_mask=keep)
    assert entropy is None
    log_probs.sum().backward()
    share = torch.softmax(torch.tensor([1.0, 2.0]), 0)[1]
    torch.testing.assert_close(logits.grad, torch.tensor([[share - 1, 1 - share, 0.0]]))


def test_one_parameter_under_two_names_is_an_error() -> None:
    @also_named(data_buffer="data_source")
    def rollout(args: int, data_source: int) -> int:
        return args + data_source

    assert rollout(1, 2) == rollout(1, data_buffer=2) == rollout(1, data_source=2) == 3
    with pytest.raises(TypeError, match="one parameter under two names: data_source, data_buffer"):
        rollout(1, data_source=2, data_buffer=3)
