"""The public loss functions on made-up logits, in a process that never loads Megatron."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from slime.backends.megatron_utils.state.parallel import Ranks
from slime.backends.megatron_utils.train import loss as loss_module
from slime.backends.megatron_utils.train.cp_utils import get_sum_of_sample_mean
from slime.backends.megatron_utils.train.data import LossBatch, may_overwrite_logits
from slime.backends.megatron_utils.train.loss import (
    get_log_probs_and_entropy,
    get_responses,
    icepop_function,
    loss_function,
    policy_loss_function,
    sft_loss_function,
    vanilla_tis_function,
)
from slime.backends.megatron_utils.train.train_step import _reduce_reports
from tests.support import plain_grpo
from tests.support.arguments import run_args

VOCAB, TEMPERATURE = 17, 0.8
TOTALS, RESPONSES = [7, 5, 9], [3, 4, 1]


def make_args(**overrides: Any) -> SimpleNamespace:
    values = {
        "loss_type": "policy_loss", "advantage_estimator": "grpo", "rollout_temperature": TEMPERATURE, "eps_clip": 0.2,
        "eps_clip_high": 0.3, "eps_clip_c": None, "entropy_coef": 0.0, "use_kl_loss": False, "kl_loss_coef": 0.0,
        "kl_loss_type": "low_var_kl", "use_tis": False, "tis_clip": 2.0, "tis_clip_low": 0.5,
        "calculate_per_token_loss": False,
    }  # fmt: skip
    return run_args(**{**values, **overrides})


def make_batch(seed: int = 0) -> tuple[dict[str, Any], torch.Tensor]:
    """Return a batch of three samples with everything a policy loss reads, and packed logits with padding after."""
    g = torch.Generator().manual_seed(seed)

    def per_token(scale: float, shift: float = 0.0) -> list[torch.Tensor]:
        return [shift + scale * torch.randn(r, generator=g) for r in RESPONSES]

    logits = torch.randn(1, sum(TOTALS) + 4, VOCAB, generator=g, requires_grad=True)
    rewards = [0.7, -1.3, 0.4]
    return {
        "unconcat_tokens": [torch.randint(0, VOCAB, (t,), generator=g) for t in TOTALS],
        "total_lengths": TOTALS,
        "response_lengths": RESPONSES,
        "loss_masks": [torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1, 1]), torch.tensor([1])],
        "rollout_mask_sums": torch.tensor([3.0, 4.0, 3.0]),  # the first and the last are siblings
        "advantages": [torch.full((r,), reward) for r, reward in zip(RESPONSES, rewards, strict=True)],
        "log_probs": per_token(0.4, -2.8),
        "rollout_log_probs": per_token(0.4, -2.8),
        "ref_log_probs": per_token(0.4, -2.8),
        "global_batch_size": 2,
        "rewards": rewards,
    }, logits


def dense(batch: dict[str, Any], logits: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probs and entropies of the responses by indexing one position after the other."""
    found, start = [], 0
    for tokens, total, response in zip(batch["unconcat_tokens"], TOTALS, RESPONSES, strict=True):
        distributions = F.log_softmax(logits[0, start : start + total] / TEMPERATURE, dim=-1)
        positions = range(total - response, total)
        chosen = torch.stack([distributions[p - 1, tokens[p]] for p in positions])
        entropy = torch.stack([-(distributions[p - 1].exp() * distributions[p - 1]).sum() for p in positions])
        found.append((chosen, entropy))
        start += total
    return found


def reducer(args: Any, batch: dict[str, Any]) -> Any:
    return get_sum_of_sample_mean(
        TOTALS,
        RESPONSES,
        batch["loss_masks"],
        args.calculate_per_token_loss,
        sample_denoms=batch["rollout_mask_sums"],
    )


def test_log_probs_and_entropy_of_the_packed_row() -> None:
    batch, logits = make_batch()
    lengths = {"total_lengths": TOTALS, "response_lengths": RESPONSES}
    _, result = get_log_probs_and_entropy(
        logits, args=make_args(), unconcat_tokens=batch["unconcat_tokens"], with_entropy=True, **lengths
    )
    for i, (log_probs, entropy) in enumerate(dense(batch, logits)):
        torch.testing.assert_close(result["log_probs"][i], log_probs)
        torch.testing.assert_close(result["entropy"][i], entropy)
    responses = list(get_responses(logits, args=make_args(), unconcat_tokens=batch["unconcat_tokens"], **lengths))
    for (rows, tokens), (log_probs, _), response in zip(responses, dense(batch, logits), RESPONSES, strict=True):
        assert rows.shape == (response, VOCAB)
        torch.testing.assert_close(F.log_softmax(rows, -1).gather(1, tokens[:, None])[:, 0], log_probs)


@pytest.mark.parametrize("head", ["linear", "fp32"])
def test_logits_are_overwritten_on_request(head: str) -> None:
    batch, leaf = make_batch()
    weight = torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    gradients, overwritten = [], []
    for overwrite in (False, True):
        hidden = leaf.detach().double().requires_grad_()
        logits = F.linear(hidden.transpose(0, 1), weight).transpose(0, 1).contiguous()
        logits = logits.float() if head == "fp32" else logits
        before = logits.detach().clone()
        _, result = get_log_probs_and_entropy(
            logits, args=make_args(), unconcat_tokens=batch["unconcat_tokens"], total_lengths=TOTALS,
            response_lengths=RESPONSES, overwrite_logits=overwrite,
        )  # fmt: skip
        torch.cat(result["log_probs"]).sum().backward()
        gradients.append(hidden.grad)
        overwritten.append(not torch.equal(logits, before))
    assert torch.equal(*gradients)
    assert overwritten == [False, True]


def test_losses_overwrite_logits_only_where_the_batch_allows_it() -> None:
    batch = LossBatch(make_batch()[0])
    assert not may_overwrite_logits(make_args(), batch)
    batch.overwrite_logits = True
    assert may_overwrite_logits(make_args(), batch)
    assert not may_overwrite_logits(make_args(), dict(batch))
    assert not may_overwrite_logits(make_args(loss_type="custom_loss"), batch)


VARIANTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "everything": {"use_tis": True, "use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coef": 0.05},
    "k1": {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k1"},
    "gspo": {"advantage_estimator": "gspo"},
    "cispo": {"advantage_estimator": "cispo"},
    "dual clip": {"eps_clip_c": 1.1},
    "per token": {"calculate_per_token_loss": True, "entropy_coef": 0.05},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_policy_loss_and_its_gradient(name: str) -> None:
    args, (batch, logits) = make_args(**VARIANTS[name]), make_batch()
    loss, metrics = policy_loss_function(args, batch, logits, reducer(args, batch))
    (gradient,) = torch.autograd.grad(loss, logits)

    plain = logits.detach().clone().requires_grad_(True)
    totals: dict[str, torch.Tensor] = {}
    for i, (new, entropy) in enumerate(dense(batch, plain)):
        mask = batch["loss_masks"][i].float()
        old, rollout, ref = (batch[k][i] for k in ("log_probs", "rollout_log_probs", "ref_log_probs"))
        terms = plain_grpo.sample_loss(args, new, entropy, old, ref, rollout, batch["rewards"][i], mask)
        weight = 1.0 if args.calculate_per_token_loss else 1 / float(batch["rollout_mask_sums"][i])
        for key, values in terms.items():
            totals[key] = totals.get(key, torch.zeros(())) + (values * mask).sum() * weight
    (expected,) = torch.autograd.grad(totals["loss"], plain)
    torch.testing.assert_close(loss, totals.pop("loss"))
    torch.testing.assert_close(gradient, expected)
    for key, value in totals.items():
        torch.testing.assert_close(metrics[key], value.detach().float(), msg=key)
    assert all(not value.requires_grad for value in metrics.values())


def test_engine_log_probs_as_old_policy() -> None:
    args, (batch, logits) = make_args(use_rollout_logprobs=True), make_batch()
    _, metrics = policy_loss_function(args, batch, logits, reducer(args, batch))
    other = {**batch, "log_probs": batch["rollout_log_probs"]}
    _, expected = policy_loss_function(make_args(), other, logits, reducer(args, batch))
    assert metrics["pg_loss"] == expected["pg_loss"]
    assert metrics["ppo_kl"] == expected["ppo_kl"]
    missing = {key: value for key, value in batch.items() if key != "rollout_log_probs"}
    with pytest.raises(ValueError, match="rollout_log_probs"):
        policy_loss_function(args, missing, logits, reducer(args, batch))


def test_without_old_log_probs_the_ratio_is_one() -> None:
    args, (batch, logits) = make_args(), make_batch()
    del batch["log_probs"]
    loss, metrics = policy_loss_function(args, batch, logits, reducer(args, batch))
    assert metrics["ppo_kl"] == 0
    means = [m.sum() / s for m, s in zip(batch["loss_masks"], batch["rollout_mask_sums"], strict=True)]
    expected = -sum(r * float(m) for r, m in zip(batch["rewards"], means, strict=True))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_opsm_drops_whole_sequences_that_drifted() -> None:
    args, (batch, logits) = make_args(use_opsm=True, opsm_delta=0.1), make_batch()
    new = [values.detach() for values, _ in dense(batch, logits)]
    batch["log_probs"] = [new[0] + 1.0, new[1] + 1.0, new[2]]  # drifted: 0 (A > 0, stays) and 1 (A < 0, goes)
    loss, metrics = policy_loss_function(args, batch, logits, reducer(args, batch))
    assert metrics["opsm_clipfrac"] == pytest.approx(1.0)
    ratio = math.exp(-1.0)
    kept_0 = -max(min(ratio, 1.3), 0) * 0.7 * 2 / 3  # min over the objective: ratio below the clip range, A > 0
    kept_2 = -0.4 * 1 / 3
    assert loss.item() == pytest.approx(kept_0 + kept_2, rel=1e-5)


def test_unbiased_kl_is_weighted_by_the_ratio() -> None:
    args = make_args(use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k1", use_unbiased_kl=True)
    batch, logits = make_batch()
    _, metrics = policy_loss_function(args, batch, logits, reducer(args, batch))
    expected = 0.0
    for i, (new, _) in enumerate(dense(batch, logits)):
        new = new.detach()
        kl = (new - batch["log_probs"][i]).exp() * (new - batch["ref_log_probs"][i])
        expected += float((kl * batch["loss_masks"][i]).sum() / batch["rollout_mask_sums"][i])
    assert float(metrics["kl_loss"]) == pytest.approx(expected, rel=1e-4)


def test_importance_corrections() -> None:
    args = make_args(tis_clip=1.5, tis_clip_low=0.5)
    ratios = torch.tensor([0.25, 0.5, 1.0, 1.5, 4.0])
    arguments = {
        "pg_loss": torch.ones(5),
        "train_log_probs": [ratios[:2].log(), ratios[2:].log()],
        "rollout_log_probs": [torch.zeros(2), torch.zeros(3)],
        "loss_masks": ["the masks"],
        "total_lengths": None,
        "response_lengths": None,
    }
    loss, masks, metrics = vanilla_tis_function(args=args, **arguments)
    torch.testing.assert_close(loss, torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5]))
    assert masks == ["the masks"]
    torch.testing.assert_close(metrics["tis"], ratios)
    assert metrics["tis_clipfrac"].tolist() == [1, 0, 0, 0, 1]
    torch.testing.assert_close(metrics["tis_abs"], (ratios - 1).abs())
    loss, _, _ = icepop_function(args, **arguments)
    torch.testing.assert_close(loss, torch.tensor([0.0, 0.5, 1.0, 1.5, 0.0]))


def test_constant_length_divides_every_token_alike() -> None:
    """On policy the loss of a token is minus its advantage; entropy and metrics keep the mean over the rollout."""
    batch, logits = make_batch()
    del batch["log_probs"]
    args = make_args(pg_loss_reducer="constant_length", pg_loss_length=50, entropy_coef=0.1)
    loss, metrics = policy_loss_function(args, batch, logits, reducer(args, batch))
    _, usual = policy_loss_function(make_args(), batch, logits, reducer(args, batch))
    trained = [int(mask.sum()) for mask in batch["loss_masks"]]
    expected = -sum(r * n / 50 for r, n in zip(batch["rewards"], trained, strict=True))
    assert metrics["pg_loss"].item() == pytest.approx(expected, rel=1e-5)
    assert metrics["entropy_loss"] == usual["entropy_loss"]
    assert loss.item() == pytest.approx(expected - 0.1 * usual["entropy_loss"].item(), rel=1e-5)
    plain = torch.zeros(())
    for i, (new, entropy) in enumerate(dense(batch, logits)):
        mask, share = batch["loss_masks"][i], batch["rollout_mask_sums"][i]
        ratio = (new - new.detach()).exp()
        plain = plain - (ratio * batch["rewards"][i] * mask).sum() / 50 - 0.1 * (entropy * mask).sum() / share
    found, wanted = (torch.autograd.grad(value, logits)[0] for value in (loss, plain))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("skipped_pass", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_mismatch_meter_needs_no_flag(skipped_pass: bool, recompute: bool) -> None:
    args, (batch, logits) = make_args(recompute_loss_function=recompute), make_batch()
    trainer = [values.detach() for values, _ in dense(batch, logits)] if skipped_pass else batch["log_probs"]
    if skipped_pass:
        del batch["log_probs"]
    _, report = loss_function(args, batch, 1, logits)  # type: ignore[misc]
    for row, train, rollout, mask in zip(
        report["mismatch"], trainer, batch["rollout_log_probs"], batch["loss_masks"], strict=True
    ):
        d = ((train - rollout).double() * mask).abs()
        assert row[0].item() == pytest.approx(d.sum().item(), abs=1e-5)
        assert row[3:].tolist() == pytest.approx([mask.sum().item(), d.max().item()], abs=1e-5)


def test_sft_loss() -> None:
    args, (batch, logits) = make_args(loss_type="sft_loss"), make_batch()
    loss, metrics = sft_loss_function(args, batch, logits, reducer(args, batch))
    parts = zip(dense(batch, logits), batch["loss_masks"], batch["rollout_mask_sums"], strict=True)
    expected = -sum((new * mask).sum() / total for (new, _), mask, total in parts)
    torch.testing.assert_close(loss, expected)
    assert metrics.keys() == {"loss"}


@pytest.mark.parametrize(("dp", "cp", "micro_batches"), [(1, 1, 1), (2, 1, 3), (1, 2, 4), (3, 2, 5)])
def test_scaling_cancels_what_megatron_does(
    monkeypatch: pytest.MonkeyPatch, dp: int, cp: int, micro_batches: int
) -> None:
    """Two values: Megatron multiplies the loss by cp / micro-batches, and averages gradients over dp * cp ranks."""
    args, (batch, logits) = make_args(), make_batch()
    plain, _ = policy_loss_function(args, batch, logits, reducer(args, batch))
    monkeypatch.setattr(loss_module, "data_parallel", lambda: Ranks(0, dp))
    monkeypatch.setattr(loss_module, "context_parallel", lambda: Ranks(0, cp))
    loss, report = loss_function(args, batch, micro_batches, logits)  # type: ignore[misc]
    by_megatron = loss * cp / micro_batches / (dp * cp)
    torch.testing.assert_close(by_megatron, plain / batch["global_batch_size"])
    assert report["keys"][0] == "loss"
    assert report["values"][0] == 2 + 4 + 1
    torch.testing.assert_close(report["values"][1], plain.detach())
    assert report["finite_samples"].tolist() == [True] * 3


@pytest.mark.parametrize("cp", [1, 2])
def test_scaling_per_token(monkeypatch: pytest.MonkeyPatch, cp: int) -> None:
    """Three values: Megatron sums gradients over all ranks and divides by the token counts of all ranks."""
    args, (batch, logits) = make_args(calculate_per_token_loss=True), make_batch()
    plain, _ = policy_loss_function(args, batch, logits, reducer(args, batch))
    monkeypatch.setattr(loss_module, "context_parallel", lambda: Ranks(0, cp))
    loss, num_tokens, _ = loss_function(args, batch, 4, logits)  # type: ignore[misc]
    assert num_tokens == 7
    torch.testing.assert_close(loss / (cp * num_tokens), plain / 7)  # every CP rank counts all tokens


@pytest.mark.parametrize("loss_type", ["policy_loss", "sft_loss"])
def test_per_token_gradients_with_masked_samples_are_those_of_plain_autograd(loss_type: str) -> None:
    """Megatron divides by the token count: samples that are masked whole must not be in it."""
    args, (batch, logits) = make_args(calculate_per_token_loss=True, loss_type=loss_type), make_batch()
    batch["loss_masks"] = [torch.zeros(3), torch.tensor([0, 1, 0, 0]), torch.zeros(1)]
    loss, num_tokens, report = loss_function(args, batch, 1, logits)  # type: ignore[misc]
    (gradient,) = torch.autograd.grad(loss / num_tokens, logits)
    [_, (log_probs, _), _] = dense(batch, logits)
    ratio = (log_probs[1] - batch["log_probs"][1][1]).exp()
    clipped = ratio.clamp(0.8, 1.3)  # the advantage is negative
    expected = -log_probs[1] if loss_type == "sft_loss" else 1.3 * torch.maximum(ratio, clipped)
    torch.testing.assert_close(loss / num_tokens, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
    assert num_tokens == report["weight"] == 1


def test_the_weight_of_a_step_counts_the_trajectories_that_train() -> None:
    """Two siblings and one alone, which is masked: metrics are means over one trajectory, the loss over two."""
    args, (batch, logits) = make_args(), make_batch()
    batch["loss_masks"][1] = torch.zeros(4)
    batch["rollout_mask_sums"] = torch.tensor([3.0, 0.0, 3.0])
    _, report = loss_function(args, batch, 1, logits)  # type: ignore[misc]
    assert float(report["weight"]) == pytest.approx(1)
    found = _reduce_reports(args, [report], 2)
    found_alone = dict(zip(report["keys"], report["values"][1:].tolist(), strict=True))
    assert found["pg_loss"] == pytest.approx(found_alone["pg_loss"] / 2)
    pairs = zip(dense(batch, logits), batch["loss_masks"], strict=True)
    entropies = [(entropy.detach() * mask).sum() for (_, entropy), mask in pairs]
    assert found["entropy_loss"] == pytest.approx(float(sum(entropies)) / 3, rel=1e-5)


@pytest.mark.parametrize("per_token", [False, True])
def test_what_a_correction_rejects_is_in_neither_part_of_a_mean(per_token: bool) -> None:
    """Of the trained tokens two are left, one of each trajectory; the loss is divided as without the rejection."""
    args, (batch, logits) = make_args(use_tis=True, calculate_per_token_loss=per_token), make_batch()
    args.custom_tis_function_path = f"{__name__}.keep_two"
    report = loss_function(args, batch, 1, logits)[-1]
    found = _reduce_reports(args, [report], 2)
    sums = dict(zip(report["keys"], report["values"][1:].tolist(), strict=True))
    entropies = [entropy.detach() for _, entropy in dense(batch, logits)]
    first, second = float(entropies[0][0]), float(entropies[1][2])
    expected = (first + second) / 2 if per_token else (first / 3 + second / 4) / (1 / 3 + 1 / 4)
    assert found["entropy_loss"] == pytest.approx(expected, rel=1e-5)
    assert found["pg_loss"] == pytest.approx(sums["pg_loss"] / (7 if per_token else 2))
    assert found["ones"] == pytest.approx(1)  # the correction's own are of all


def keep_two(args: Any, *, pg_loss: torch.Tensor, loss_masks: Any, **kwargs: Any) -> Any:
    masks = [torch.zeros_like(mask) for mask in loss_masks]
    masks[0][0] = masks[1][2] = 1
    return pg_loss, masks, {"ones": torch.ones_like(pg_loss)}


def test_a_step_that_trains_nothing_reports_zeros() -> None:
    for per_token in (False, True):
        args, (batch, logits) = make_args(calculate_per_token_loss=per_token), make_batch()
        batch["loss_masks"] = [torch.zeros(r) for r in RESPONSES]
        batch["rollout_mask_sums"] = torch.zeros(3)
        report = loss_function(args, batch, 1, logits)[-1]
        assert set(_reduce_reports(args, [report], 2).values()) == {0.0}


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_masked_tokens_may_have_any_advantage(bad: float) -> None:
    args, (batch, logits) = make_args(use_opsm=True, opsm_delta=1e-3), make_batch()
    expected, _ = policy_loss_function(args, batch, logits, reducer(args, batch))
    batch["advantages"][0][1] = bad  # which is masked
    loss, metrics = policy_loss_function(args, batch, logits, reducer(args, batch))
    assert loss.item() == expected.item()
    assert bool(torch.autograd.grad(loss, logits)[0].isfinite().all())
    assert all(bool(value.isfinite()) for value in metrics.values())


def test_opsm_reports_the_share_of_trained_tokens_that_is_masked() -> None:
    """Of two siblings with four trained tokens one has its only one masked; the third sample is kept."""
    args, (batch, logits) = make_args(use_opsm=True, opsm_delta=0.5), make_batch()
    batch["loss_masks"] = [torch.tensor([0, 1, 0]), torch.tensor([1, 1, 1, 1]), torch.tensor([1])]
    batch["rollout_mask_sums"] = torch.tensor([2.0, 4.0, 2.0])
    current = [log_probs.detach() for log_probs, _ in dense(batch, logits)]
    batch["log_probs"] = [current[0] + 1.0, current[1], current[2]]  # the first has drifted
    batch["advantages"] = [torch.full((r,), -1.0) for r in RESPONSES]
    for per_token, share in ((False, (1 / 2 + 0) / 2), (True, 1 / 6)):
        args.calculate_per_token_loss = per_token
        report = loss_function(args, batch, 1, logits)[-1]
        assert _reduce_reports(args, [report], 2)["opsm_clipfrac"] == pytest.approx(share)


def test_samples_that_are_not_finite_are_distinguished() -> None:
    args, (batch, logits) = make_args(), make_batch()
    batch["advantages"][1][2] = math.inf
    _, report = loss_function(args, batch, 1, logits)  # type: ignore[misc]
    assert report["finite_samples"].tolist() == [True, False, True]
    assert not report["finite"]


def test_recomputed_loss_is_the_loss() -> None:
    results = []
    for recompute in (False, True):
        args, (batch, leaf) = make_args(recompute_loss_function=recompute), make_batch()
        batch = LossBatch(batch)
        batch.overwrite_logits = True
        logits = leaf @ torch.eye(VOCAB)
        loss, _ = loss_function(args, batch, 1, logits)  # type: ignore[misc]
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
        assert not torch.equal(logits, leaf)
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def squares_and_policy_loss(*inputs: Any) -> Any:
    squares = inputs[2].square().mean()  # needs the logits after the policy loss is done with them
    loss, metrics = policy_loss_function(*inputs)
    return loss + squares, metrics


def test_a_custom_loss_may_use_the_logits_once_more() -> None:
    args = make_args(loss_type="custom_loss", custom_loss_function_path=f"{__name__}.squares_and_policy_loss")
    batch, leaf = make_batch()
    loss, _ = loss_function(args, batch, 1, leaf @ torch.eye(VOCAB))  # type: ignore[misc]
    (actual,) = torch.autograd.grad(loss, leaf)
    plain = loss_function(make_args(), batch, 1, leaf)[0] + leaf.square().mean() / batch["global_batch_size"]
    torch.testing.assert_close(actual, torch.autograd.grad(plain, leaf)[0])


def test_unknown_loss_type_lists_the_known_ones() -> None:
    batch, logits = make_batch()
    with pytest.raises(ValueError, match="policy_loss, sft_loss or custom_loss"):
        loss_function(make_args(loss_type="dpo"), batch, 1, logits)
    with pytest.raises(ValueError, match="--custom-loss-function-path"):
        loss_function(make_args(loss_type="custom_loss"), batch, 1, logits)


FAR = -200.0
"""A log-prob from which the ratio to a likely token is infinite in float32."""


@pytest.mark.parametrize(
    "flags",
    [
        {"use_rollout_logprobs": True},
        {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.0},
        {"use_rollout_logprobs": True, "use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"},
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "use_unbiased_kl": True},
        {"use_opsm": True, "opsm_delta": 0.1},
    ],
    ids=lambda flags: ", ".join(flags),
)
def test_what_stands_where_nothing_is_trained_changes_nothing(flags: dict[str, Any]) -> None:
    """Token 1 of sample 0 is masked, as a tool's text is: its log-probs may be anything."""
    found = []
    for value in (-2.0, FAR, -FAR):
        args, (batch, logits) = make_args(**flags), make_batch()
        for column in ("log_probs", "rollout_log_probs", "ref_log_probs"):
            batch[column][0][1] = value
        loss, metrics = policy_loss_function(args, batch, logits, reducer(args, batch))
        loss.backward()
        metrics.pop("train_rollout_logprob_abs_diff")
        found.append({"gradient": logits.grad, "loss": loss.detach(), **metrics})
    for other in found[1:]:
        for name, expected in found[0].items():
            assert torch.isfinite(expected).all(), name
            assert torch.equal(other[name], expected), name
