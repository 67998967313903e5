"""Hooks, dumps, the skipped log-prob pass and what happens to data and numbers that cannot be right."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import plain_grpo
from tests.support.distributed import run_distributed
from tests.support.trainer import make_train_data, tiny_checkpoint, trainer_args


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("behaviour")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> str:
    return tiny_checkpoint(folder / "model", seed=0)


@pytest.fixture(scope="module")
def ranks(checkpoint: str, folder: Path) -> list[dict[str, Any]]:
    """Return the reports of two data-parallel ranks."""
    arguments = {"checkpoint": checkpoint, "folder": str(folder)}
    return run_distributed("tests.support.trainer_ranks:behaviour_scenarios", 2, arguments, timeout=300)


def test_the_skipped_pass_changes_nothing(ranks: Any) -> None:
    for found in ranks:
        skipped, computed = found["skipped"], found["computed"]
        assert "rollout/log_probs" in computed["rollout"]
        assert "rollout/log_probs" not in skipped["rollout"]
        assert skipped["steps"] == computed["steps"]
        for name, value in computed["parameters"].items():
            assert torch.equal(skipped["parameters"][name], value), name


def test_hooks_are_called_in_their_places(ranks: Any) -> None:
    """Two steps of 4 rollouts: reference and old log-probs before them, in eval mode, gradients zero before a step."""
    expected = []
    for rollout in range(3):
        expected += [("log_prob", "ref_", False), ("log_prob", "", False)]
        expected += [("step", rollout, step, True, 8 * rollout + 4 * step) for step in range(2)]
    for found in ranks:
        assert found["calls"] == expected
        assert found["zero advantages"]["calls"] == [("advantages", ["kl", "log_probs"])]
        assert found["zero advantages"]["steps"][0]["grad_norm"] == 0


def test_reference_is_refreshed_every_second_rollout(ranks: Any) -> None:
    kl = [report["steps"][0]["kl_loss"] for report in ranks[0]["refreshed"]]
    assert abs(kl[0]) < 1e-7  # the first policy is the reference
    assert abs(kl[1]) > 1e-4
    assert abs(kl[2]) < 1e-7  # and so is the third, after the refresh at the end of rollout 1


def test_train_dump_has_every_sample_in_order(ranks: Any, folder: Path, checkpoint: str) -> None:
    del ranks
    dump = torch.load(folder / "dump_0.pt", weights_only=False)
    data = make_train_data(seed=0)
    assert dump["format_version"] == 2
    assert dump["rollout_id"] == 0
    assert [s["sample_index"] for s in dump["samples"]] == data["sample_indices"]
    assert {s["data_parallel_rank"] for s in dump["samples"]} == {0, 1}
    assert [shard["data_parallel_rank"] for shard in dump["dp_shards"]] == [0, 1]
    assert dump["raw_reward"] == pytest.approx(data["raw_reward"])
    model = plain_grpo.load(checkpoint)
    for i, sample in enumerate(dump["samples"]):
        assert sample["tokens"].tolist() == data["tokens"][i]
        with torch.no_grad():
            expected, _ = plain_grpo.token_log_probs(model, data["tokens"][i], data["response_lengths"][i], 0.7)
        torch.testing.assert_close(sample["log_probs"].double(), expected, rtol=1e-5, atol=1e-5)


def test_sft_loss_is_the_mean_negative_log_likelihood(ranks: Any, checkpoint: str) -> None:
    data, model, temperature = (
        make_train_data(seed=0),
        plain_grpo.load(checkpoint),
        trainer_args(checkpoint).rollout_temperature,
    )
    expected = 0.0
    for tokens, response, mask in zip(data["tokens"], data["response_lengths"], data["loss_masks"], strict=True):
        with torch.no_grad():
            log_probs, _ = plain_grpo.token_log_probs(model, tokens, response, temperature)
        expected -= float((log_probs * torch.tensor(mask)).sum()) / sum(mask) / 8
    assert ranks[0]["sft"]["loss"] == pytest.approx(expected, rel=1e-5)
    assert ranks[0]["custom loss"]["loss"] == pytest.approx(2 * expected, rel=1e-5)
    assert ranks[0]["custom loss"]["twice"] == pytest.approx(expected, rel=1e-5)
    assert ranks[0]["custom loss"]["grad_norm"] == pytest.approx(2 * ranks[0]["sft"]["grad_norm"], rel=1e-5)


def test_metrics_of_a_custom_loss_may_differ_between_micro_batches(ranks: Any) -> None:
    """Of 8 samples the first is by itself on one of the ranks: each name has the sum over its own, divided by 8."""
    lengths = make_train_data(seed=0)["response_lengths"]
    short = [length for length in lengths[1:] if length <= 12]
    assert 0 < len(short) < 7
    for found in ranks:
        step = found["names that differ"]
        assert step["loss"] == pytest.approx(ranks[0]["sft"]["loss"], rel=1e-6)
        assert step["first"] == pytest.approx(3 / 8, rel=1e-6)
        assert step["long"] == pytest.approx((7 - len(short)) / 8, rel=1e-6)
        assert step["short"] == pytest.approx(len(short) / 8, rel=1e-6)
        assert step["short_tokens"] == pytest.approx(sum(short) / 8, rel=1e-6)


def test_custom_correction_masks_the_loss_but_not_its_own_metrics(ranks: Any) -> None:
    step = ranks[0]["masked by the correction"]
    assert step["pg_loss"] == step["entropy_loss"] == step["grad_norm"] == 0
    assert step["mine"] == pytest.approx(1, rel=1e-6)
    assert step["ois"] == pytest.approx(1, rel=1e-6)


def test_custom_reducer_reduces_the_policy_loss_alone(ranks: Any) -> None:
    """On-policy each token's loss is minus its advantage: plain sum of -A over all tokens, over 8 rollouts."""
    data = make_train_data(seed=0)
    expected = -sum(r * n for r, n in zip(data["rewards"], data["response_lengths"], strict=True)) / 8
    step = ranks[0]["own reducer"]
    assert step["pg_loss"] == pytest.approx(expected, rel=1e-5)
    assert step["entropy_loss"] == pytest.approx(ranks[0]["skipped"]["steps"][0]["entropy_loss"], rel=1e-6)


def test_rloo_compares_kl_within_groups_whatever_rank_has_the_samples(ranks: Any, folder: Path) -> None:
    del ranks
    first, second = (torch.load(folder / f"rloo_{i}.pt", weights_only=True)["samples"] for i in range(2))
    assert all(float(sample["kl"].abs().max()) < 1e-6 for sample in first)
    sums = [float((sample["kl"] * sample["loss_masks"]).sum()) for sample in second]
    assert max(map(abs, sums)) > 1e-2
    for i, sample in enumerate(second):
        expected = sample["rewards"] - 0.1 * (sums[i] - sums[i ^ 1])  # pairs: the other one is the baseline
        torch.testing.assert_close(sample["advantages"], torch.full_like(sample["advantages"], expected))
    assert {s["data_parallel_rank"] for s in second[:4]} == {0, 1}


def test_infinity_stops_all_ranks_and_names_the_sample(ranks: Any) -> None:
    messages = {found["not finite"]["result"] for found in ranks}
    assert len(messages) == 1
    message = messages.pop()
    assert message.startswith("NonFiniteError: rollout 4, optimizer step 0")
    assert "sample index 103" in message
    assert message.count("sample index") == 1
    assert "pg_loss" in message
    for found in ranks:
        assert found["not finite"]["unchanged"]
        assert found["not finite"]["scheduler"] == 0


def test_the_mismatch_is_measured_without_any_flag_over_all_ranks(ranks: Any, checkpoint: str) -> None:
    data, model = make_train_data(seed=0), plain_grpo.load(checkpoint)
    distances: list[torch.Tensor] = []
    for tokens, response, mask, engine in zip(
        data["tokens"], data["response_lengths"], data["loss_masks"], data["rollout_log_probs"], strict=True
    ):
        with torch.no_grad():
            log_probs, _ = plain_grpo.token_log_probs(model, tokens, response, 0.7)
        distances.append((log_probs - torch.tensor(engine)).abs()[torch.tensor(mask) > 0])
    worst = max(range(8), key=lambda i: float(distances[i].mean()))
    for found in ranks:
        for name in ("skipped", "computed"):
            step = found[name]["steps"][0]
            assert step["mismatch/mean"] == pytest.approx(torch.cat(distances).mean().item(), rel=1e-5)
            assert step["mismatch/max"] == pytest.approx(torch.cat(distances).max().item(), rel=1e-5)
        message, unchanged = found["mismatch"]
        assert message.startswith("MismatchError: rollout 0, optimizer step 0: log-probs of trainer and engine")
        assert f"Worst is sample index {100 + worst}: " in message
        assert unchanged


def test_infinity_can_be_skipped(ranks: Any) -> None:
    for found in ranks:
        skipped = found["not finite, skipped"]
        assert skipped["unchanged"]
        assert skipped["result"][0]["skipped_step"] == 1
        assert not math.isfinite(skipped["result"][0]["grad_norm"])


def test_tokens_of_another_vocabulary_are_refused_at_the_door(ranks: Any) -> None:
    for found in ranks:
        index, message = found["vocabulary"]
        assert f"sample index={index} " in message
        assert "--vocab-size" in message
