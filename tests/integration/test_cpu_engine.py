"""Attention and sampler of CPU engines, against SGLang's own and against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.support.cpu_engine import Pair, pair_of_engines, run_crowd
from tests.support.engines import Reference, output_log_probs

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    # A small pool: when it is full SGLang retracts requests, and kept copies of all rows would be larger than it.
    with pair_of_engines(tmp_path_factory.mktemp("pair"), {}, sglang_max_total_tokens=4000) as engines:
        yield engines


def test_a_crowd_gets_what_sglang_computes(pair: Pair) -> None:
    """Requests come and go, are aborted and retracted, while caches are flushed and weights are pushed."""
    print(run_crowd(pair, seed=0, requests=48, longest=150, seconds=6.0, events=8))


def test_top_p_masks_are_exact(pair: Pair) -> None:
    pair.tested.update_weights_from_disk(str(pair.checkpoints[0]))
    reference = Reference(pair.checkpoints[0])

    def generate(i: int) -> tuple[list[int], float, dict[str, Any]]:
        prompt, top_p = [3 * i + k for k in range(5 + i)], (1.0, 0.9, 0.5)[i % 3]
        params = {"max_new_tokens": 12, "temperature": 1.0, "top_p": top_p, "top_k": 100, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        return prompt, top_p, pair.tested.generate({**body, "return_sampling_mask": top_p < 1})

    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(generate, range(12)))
    for prompt, top_p, reply in replies:
        output = reply["output_ids"]
        expected = reference.log_probs(prompt, output)
        assert (output_log_probs(reply) - expected).abs().max() <= 1e-5  # of the whole distribution, filtered or not
        if top_p == 1.0:
            continue
        with torch.no_grad():
            logits = reference.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        masks = reply["meta_info"]["output_token_sampling_mask"]
        for probs, token, mask in zip(torch.softmax(logits, dim=-1), output, masks, strict=True):
            ordered, ids = probs.sort(descending=True)
            before = ordered.cumsum(0) - ordered
            surely = set(ids[:100][before[:100] < top_p - 1e-5].tolist())
            perhaps = set(ids[:100][before[:100] <= top_p + 1e-5].tolist())
            assert surely <= set(mask) <= perhaps
            assert token in mask
