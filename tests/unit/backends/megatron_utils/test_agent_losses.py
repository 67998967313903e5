"""Losses of executions of several samples are those of the papers, written out, however micro-batches divide them.

From samples to the loss of the step: rewards within groups, train data, columns, micro-batches.
"""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slime.algorithms.rewards import post_process_rewards
from slime.backends.megatron_utils.train.loss import get_log_probs_and_entropy
from slime.backends.megatron_utils.train.policy_loss import policy_loss_function
from slime.batching.columns import RolloutColumns
from slime.batching.train_data import build_train_data
from slime.utils.types import Sample
from tests.support.arguments import run_args
from tests.unit.backends.megatron_utils.test_loss import VOCAB, get_sum_of_sample_mean

HERE = f"{__name__}."
KL_COEF, CLIP, CLIP_HIGH = 0.3, 0.2, 0.3
TURNS = [[1, 3, 2], [4, 1, 1]]
"""Turns of the executions of two prompts; each turn is a sample."""
REWARDS = [[1.0, 0.0, 0.25], [0.0, 1.0, 1.0]]


def executions(seed: int = 0, removed: int | None = None) -> list[Sample]:
    """Turns of one to five tokens, some of a tool's (mask 0); sample ``removed`` is one that must not be trained."""
    rng, samples = random.Random(seed), []
    for prompt, (turns, rewards) in enumerate(zip(TURNS, REWARDS, strict=True)):
        for g, (count, reward) in enumerate(zip(turns, rewards, strict=True)):
            for _ in range(count):
                response = rng.randint(1, 5)
                mask = [rng.randint(0, 1) for _ in range(response)]
                mask[rng.randrange(response)] = 1
                samples.append(
                    Sample(
                        index=len(samples), group_index=prompt, rollout_id=10 * prompt + g, reward=reward,
                        tokens=[rng.randrange(VOCAB) for _ in range(response + 2)], response_length=response,
                        loss_mask=mask, rollout_log_probs=[0.0] * response, remove_sample=len(samples) == removed,
                    )
                )  # fmt: skip
    return samples


def make_args(**overrides: Any) -> Any:
    values = {
        "advantage_estimator": "grpo", "eps_clip": CLIP, "eps_clip_high": CLIP_HIGH, "use_kl_loss": True,
        "kl_loss_coef": KL_COEF, "kl_loss_type": "low_var_kl", "rollout_temperature": 1.0,
    }  # fmt: skip
    return run_args(**{**values, **overrides})


def of_the_step(args: Any, samples: list[Sample], micro_batches: list[list[int]]) -> tuple[float, list[torch.Tensor]]:
    """Return the loss of the step (before it is divided by executions or tokens) and its gradient per sample."""
    raw, rewards = post_process_rewards(args, samples)
    columns = RolloutColumns.from_train_data(build_train_data(args, samples, raw, rewards))
    model, old, ref = (logits_of(samples, seed) for seed in (1, 2, 3))
    total, gradients = 0.0, {}
    for indices in micro_batches:
        part = columns.take(indices)
        leaves = [model[i].clone().requires_grad_() for i in indices]
        masks = [torch.tensor(row) for row in part.ragged["loss_masks"]]
        responses, totals = part.numbers["response_lengths"].tolist(), part.total_lengths.tolist()
        batch = {
            "unconcat_tokens": [torch.tensor(samples[i].tokens) for i in indices],
            "total_lengths": totals,
            "response_lengths": responses,
            "loss_masks": masks,
            "advantages": [torch.full((n,), r) for n, r in zip(responses, part.numbers["rewards"], strict=True)],
            "log_probs": [log_probs(old[i], samples[i]) for i in indices],
            "ref_log_probs": [log_probs(ref[i], samples[i]) for i in indices],
            **{name: column.tolist() for name, column in part.numbers.items() if name.startswith("rollout_")},
        }
        reduce = get_sum_of_sample_mean(
            totals, responses, masks, args.calculate_per_token_loss, sample_denoms=batch["rollout_mask_sums"]
        )
        loss, _ = policy_loss_function(args, batch, torch.cat(leaves)[None], reduce)
        total += loss.item()
        gradients |= dict(zip(indices, torch.autograd.grad(loss, leaves), strict=True))
    return total, [gradients[i] for i in range(len(samples))]


def logits_of(samples: list[Sample], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(s.tokens), VOCAB, generator=generator, dtype=torch.float64) for s in samples]


def log_probs(logits: torch.Tensor, sample: Sample) -> torch.Tensor:
    first = len(sample.tokens) - sample.response_length
    rows = F.log_softmax(logits, dim=-1)
    return torch.stack([rows[t - 1, sample.tokens[t]] for t in range(first, len(sample.tokens))])


def token_losses(sample: Sample, advantage: float, new: Any, old: Any, ref: Any) -> list[torch.Tensor]:
    """-min(rho A, clip(rho) A) + beta KL of each trained token, in the order of the response."""
    found = []
    for n, o, r, m in zip(*(log_probs(x, sample) for x in (new, old, ref)), sample.loss_mask, strict=True):
        if not m:
            continue
        ratio = (n - o).exp()
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP_HIGH)
        kl = (r - n).exp() - 1 - (r - n)
        found.append(-torch.minimum(ratio * advantage, clipped * advantage) + KL_COEF * kl)
    return found


def by_the_paper(samples: list[Sample], combine: Any, *, std: bool) -> tuple[float, list[torch.Tensor]]:
    """``combine`` makes one number of {execution: [[loss of each token] of each turn]}."""
    leaves = [x.clone().requires_grad_() for x in logits_of(samples, 1)]
    old, ref = logits_of(samples, 2), logits_of(samples, 3)
    losses: dict[int, list[list[torch.Tensor]]] = {}
    for i, sample in enumerate(samples):
        rewards = REWARDS[sample.group_index]
        advantage = sample.reward - statistics.fmean(rewards)
        advantage /= statistics.stdev(rewards) + 1e-6 if std else 1.0
        if not sample.remove_sample:
            turn = token_losses(sample, advantage, leaves[i], old[i], ref[i])
            losses.setdefault(sample.rollout_id, []).append(turn)
    total = combine(losses)
    gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    return total.item(), [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, leaves, strict=True)]


def flow_grpo(losses: dict[int, list[list[torch.Tensor]]]) -> torch.Tensor:
    """1/B sum_i 1/T_i sum_t 1/|a_t| sum_j (arXiv:2510.05592); B the executions of the step."""
    total = torch.zeros((), dtype=torch.float64)
    for turns in losses.values():
        for turn in turns:
            for value in turn:
                total = total + value / len(losses) / len(turns) / len(turn)
    return total


def multi_conversation_dapo(losses: dict[int, list[list[torch.Tensor]]]) -> torch.Tensor:
    """Sum over all tokens of all conversations over their number (arXiv:2507.02259)."""
    tokens = [value for turns in losses.values() for turn in turns for value in turn]
    return torch.stack(tokens).sum() / len(tokens)


def divisions(count: int) -> dict[str, list[list[int]]]:
    order = random.Random(4).sample(range(count), count)
    return {
        "one": [list(range(count))],
        "one sample each": [[i] for i in range(count)],
        "shuffled": [order[:5], order[5:6], order[6:]],
    }


@pytest.mark.parametrize("removed", [None, 2])
@pytest.mark.parametrize("division", ["one", "one sample each", "shuffled"])
@pytest.mark.parametrize("algorithm", ["Flow-GRPO", "Flow-GRPO, own reducer", "multi-conversation DAPO"])
def test_loss_and_gradient(algorithm: str, division: str, removed: int | None) -> None:
    samples = executions(removed=removed)
    micro_batches = divisions(len(samples))[division]
    if algorithm == "multi-conversation DAPO":
        args = make_args(calculate_per_token_loss=True, grpo_std_normalization=False)
        combine, divisor = multi_conversation_dapo, sum(sum(s.loss_mask) for s in samples if not s.remove_sample)
    else:
        args, combine, divisor = make_args(pg_loss_reducer="turn_mean"), flow_grpo, sum(map(len, TURNS))
        if "own" in algorithm:  # of the policy loss alone: the KL is left out on both sides
            name = "custom_pg_loss_reducer_function_path"
            args = make_args(use_kl_loss=False, kl_loss_coef=0.0, **{name: f"{HERE}own_turn_mean"})
    loss, gradients = of_the_step(args, samples, micro_batches)
    if "own" in algorithm:
        full = of_the_step(make_args(pg_loss_reducer="turn_mean", kl_loss_coef=0.0), samples, micro_batches)
        expected, wanted = full[0] / divisor, [g / divisor for g in full[1]]
    else:
        expected, wanted = by_the_paper(samples, combine, std=args.grpo_std_normalization)
    assert loss / divisor == pytest.approx(expected, abs=1e-6)
    for found, right in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(found / divisor, right, rtol=0, atol=1e-6)
    assert abs(expected) > 1e-2


def own_turn_mean(
    total_lengths, response_lengths, loss_masks, calculate_per_token_loss, *, rollout_ids, rollout_turn_counts
):
    """A user's reducer: it takes the keywords that it names."""
    assert len(rollout_ids) == len(loss_masks)
    weights = [mask / max(mask.sum(), 1) / n for mask, n in zip(loss_masks, rollout_turn_counts, strict=True)]
    return lambda values: (values * torch.cat(weights)).sum()


def test_turns_added_to_an_execution_leave_the_advantages_of_the_others() -> None:
    args, samples = make_args(), executions()
    before = {s.rollout_id: r for s, r in zip(samples, post_process_rewards(args, samples)[1], strict=True)}
    more = [*samples, *(Sample(index=90 + i, group_index=0, rollout_id=0, reward=1.0) for i in range(5))]
    for sample, reward in zip(more, post_process_rewards(args, more)[1], strict=True):
        assert math.isclose(reward, before[sample.rollout_id], abs_tol=1e-12)


def test_equal_rewards_train_nothing() -> None:
    samples = executions()
    for sample in samples:
        sample.reward = 1.0
    args = make_args(pg_loss_reducer="turn_mean", use_kl_loss=False, kl_loss_coef=0.0)
    loss, gradients = of_the_step(args, samples, [list(range(len(samples)))])
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients)


def test_log_probs_here_are_those_of_the_loss() -> None:
    samples = executions()[:3]
    logits = logits_of(samples, 1)
    _, result = get_log_probs_and_entropy(
        torch.cat(logits)[None], args=make_args(), unconcat_tokens=[torch.tensor(s.tokens) for s in samples],
        total_lengths=[len(s.tokens) for s in samples], response_lengths=[s.response_length for s in samples],
    )  # fmt: skip
    for found, x, sample in zip(result["log_probs"], logits, samples, strict=True):
        torch.testing.assert_close(found.double(), log_probs(x, sample), rtol=1e-5, atol=1e-6)
