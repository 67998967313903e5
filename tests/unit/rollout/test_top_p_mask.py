"""Handling of an engine's reply that has the candidate tokens of each sampled token."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from slime.rollout.requests.generate_request import append_output
from slime.utils.types import Sample
from tests.support.arguments import run_args


def int32(values: list[int]) -> str:
    return base64.b64encode(np.array(values, dtype="<i4").tobytes()).decode()


COMMON: dict[str, Any] = {
    "id": "e3b0c44298fc1c149afbf4c8996fb924", "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 1,
    "completion_tokens": 2, "cached_tokens": 0, "weight_version": "3",
    "output_token_logprobs": [[-0.9, 11, None], [-1.2, 7, None]],
}  # fmt: skip
REPLIES = {
    "SGLang 0.5.20": {
        "output_token_sampling_mask": [[11, 5], [7]], "output_token_sampling_logprobs": [-0.7, 0.0],
        "output_token_sampling_mask_length": 2,
    },
    "slime <= 0.3.1": {"top_p_token_ids": int32([11, 5, 7]), "top_p_token_offsets": int32([0, 2, 3])},
    "slime <= 0.3.1, kept": {"top_p_kept_token_ids": int32([11, 5, 7]), "top_p_kept_token_offsets": int32([0, 2, 3])},
}  # fmt: skip


@pytest.mark.parametrize("engine", REPLIES)
def test_a_reply_of(engine: str) -> None:
    """Engines that tell only one log-prob per token tell what they sampled with; SGLang tells both."""
    sample = Sample(tokens=[3])
    append_output(run_args(), sample, {"text": "ab", "meta_info": COMMON | REPLIES[engine]})
    assert sample.tokens == [3, 11, 7]
    assert sample.rollout_top_p_token_ids.tolist() == [11, 5, 7]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 2, 3]
    assert sample.rollout_log_probs == ([-0.7, 0.0] if engine == "SGLang 0.5.20" else [-0.9, -1.2])
    assert sample.status == Sample.Status.TRUNCATED


def test_a_reply_without_top_p_masks_keeps_the_log_probs_of_the_whole_vocabulary() -> None:
    sample = Sample(tokens=[3])
    append_output(run_args(), sample, {"text": "ab", "meta_info": COMMON})
    assert sample.rollout_log_probs == [-0.9, -1.2]
    assert sample.rollout_top_p_token_ids is None
