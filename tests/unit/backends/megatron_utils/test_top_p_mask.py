"""TopPMask travel from samples to the rows of logits that this rank holds."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from slime.backends.megatron_utils.state.parallel import Ranks
from slime.backends.megatron_utils.train import cp_utils, response_logits
from slime.backends.megatron_utils.train.data import check_shard
from slime.backends.megatron_utils.train.loss import get_log_probs_and_entropy
from slime.backends.megatron_utils.train.response_logits import _local_top_p_mask
from slime.batching.columns import RolloutColumns
from tests.support.arguments import run_args

TOTALS, RESPONSES = [9, 4, 12], [5, 1, 11]


def columns() -> tuple[list[torch.Tensor], list[torch.Tensor], list[list[list[int]]]]:
    """Return (ids, offsets) as in a batch, and the same as lists of lists."""
    rng = np.random.default_rng(0)
    kept = [[sorted(rng.choice(7, rng.integers(0, 5), replace=False).tolist()) for _ in range(n)] for n in RESPONSES]
    ids = [torch.tensor([i for kept_ids in row for i in kept_ids], dtype=torch.int32) for row in kept]
    offsets = [torch.tensor([0, *np.cumsum([len(kept_ids) for kept_ids in row])], dtype=torch.int32) for row in kept]
    return ids, offsets, kept


def as_lists(found: Any) -> list[list[int]]:
    cuts = found.offsets.tolist()
    return [found.ids[a:b].tolist() for a, b in itertools.pairwise(cuts)]


@pytest.mark.parametrize("cp", [1, 2, 3])
def test_each_rank_has_the_top_p_masks_of_its_tokens(cp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, offsets, kept = columns()
    for rank in range(cp):
        for module in (response_logits, cp_utils):
            monkeypatch.setattr(module, "context_parallel", lambda rank=rank: Ranks(rank=rank, size=cp))
        found = _local_top_p_mask(ids, offsets, TOTALS, RESPONSES)
        assert found.ids.dtype == found.offsets.dtype == torch.int64
        places = [
            cp_utils.slice_log_prob_with_cp(list(range(n)), total, n)
            for total, n in zip(TOTALS, RESPONSES, strict=True)
        ]
        assert as_lists(found) == [kept[i][t] for i, tokens in enumerate(places) for t in tokens]


def test_log_probs_are_among_top_p_masks_and_the_entropy_is_of_all() -> None:
    ids, offsets, kept = columns()
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(7, (n,), generator=generator) for n in TOTALS]
    logits = torch.randn(1, sum(TOTALS), 7, generator=generator, dtype=torch.float64)
    args = run_args(rollout_temperature=0.5)
    batch = {"unconcat_tokens": tokens, "total_lengths": TOTALS, "response_lengths": RESPONSES}
    _, plain = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **batch)
    _, found = get_log_probs_and_entropy(
        logits, args=args, with_entropy=True, top_p_token_ids=ids, top_p_token_offsets=offsets, **batch
    )
    start = 0
    for i, (total, n) in enumerate(zip(TOTALS, RESPONSES, strict=True)):
        assert torch.equal(found["entropy"][i], plain["entropy"][i])
        for t in range(n):
            row, target = logits[0, start + total - n - 1 + t] / 0.5, int(tokens[i][total - n + t])
            among = sorted({*kept[i][t], target})
            expected = torch.log_softmax(row[among], dim=0)[among.index(target)]
            assert found["log_probs"][i][t].item() == pytest.approx(expected.item(), abs=1e-12)
        start += total
    _, alone = get_log_probs_and_entropy(logits, args=args, top_p_token_ids=ids, top_p_token_offsets=offsets, **batch)
    assert alone.keys() == {"log_probs"}


def test_the_door_names_the_sample() -> None:
    data = {
        "tokens": [[1, 2, 3]], "response_lengths": [2], "rewards": [0.0], "loss_masks": [[1, 1]], "sample_indices": [5],
    }  # fmt: skip
    args = run_args(rollout_top_p=0.9, vocab_size=7)
    without = SimpleNamespace(batch=RolloutColumns.from_train_data(data))
    with pytest.raises(ValueError, match=r"--rollout-top-p 0\.9: the samples have no top-p masks"):
        check_shard(args, without)  # type: ignore[arg-type]
    check_shard(run_args(rollout_top_p=1.0), without)  # type: ignore[arg-type]
    for ids, message in (([2, 7], "holds token id 7, but --vocab-size is 7"), ([2, 3], None)):
        mask_columns = {"rollout_top_p_token_ids": [ids], "rollout_top_p_token_offsets": [[0, 1, 2]]}
        shard: Any = SimpleNamespace(batch=RolloutColumns.from_train_data({**data, **mask_columns}))
        if message is None:
            check_shard(args, shard)
        else:
            with pytest.raises(ValueError, match=rf"sample index=5 .*{message}"):
                check_shard(args, shard)
