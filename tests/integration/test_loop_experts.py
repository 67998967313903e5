"""``train.py`` with a mixture of experts: engines report experts and masks, two trainers that split them replay both.

Expected values are those of transformers on the weights that each rollout was made with.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slime.rollout.debug_data import load_rollout
from slime.utils.types import Sample
from tests.support.run_train import Finished, rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
EXPERTS, TOPK, LAYERS = 8, 2, 3
TOP_P, TOP_K, TEMPERATURE = 0.8, 100, 0.9
ROLLOUTS, STEPS = 2, 2  # the second step of a rollout trains weights that did not generate it


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    root = tmp_path_factory.mktemp("experts")
    checkpoint = make_tiny_checkpoint(
        root / "hf-before", "qwen3_moe", tie_word_embeddings=False, num_hidden_layers=LAYERS, num_experts=EXPERTS,
        num_experts_per_tok=TOPK, initializer_range=0.2,
    )  # fmt: skip
    flags = f"""--num-rollout {ROLLOUTS} --global-batch-size 8 --lr 5e-3 --rollout-shuffle
        --actor-num-gpus-per-node 2 --expert-model-parallel-size 2 --use-rollout-routing-replay
        --rollout-top-p {TOP_P} --rollout-top-k {TOP_K} --rollout-temperature {TEMPERATURE}
        --custom-rm-path tests.support.rollout_hooks.every_other
        --eval-interval {ROLLOUTS} --skip-eval-before-train --eval-top-p 0.5
        --eval-prompt-data sums {sums_file(root / "eval.jsonl", 4)}
        --save {root / "save"} --save-hf {root / "hf-{rollout_id}"} --save-interval 1
        --save-debug-rollout-data {root / "dumps" / "{rollout_id}.pt"}"""
    return run_train([*rl_flags(checkpoint, sums_file(root / "sums.jsonl")), *flags.split()], root / "run"), root


def scored(root: Path) -> list[list[tuple[Sample, torch.Tensor, torch.Tensor]]]:
    """Per rollout, its samples with what transformers makes of their tokens on the weights that the engine had.

    Router scores [tokens - 1, LAYERS, EXPERTS], and probabilities [response_length, vocabulary].
    """
    found = []
    for number in range(ROLLOUTS):
        weights = root / ("hf-before" if number == 0 else f"hf-{number - 1}")
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32, attn_implementation="eager").eval()
        rows = []
        for sample in load_rollout(root / "dumps" / f"{number}.pt"):
            with torch.no_grad():
                out = model(torch.tensor([sample.tokens]), output_router_logits=True)
            logits = out.logits[0, -sample.response_length - 1 : -1].double()
            scores = torch.stack(out.router_logits, dim=1)[:-1]
            rows.append((sample, scores, torch.softmax(logits / TEMPERATURE, dim=-1)))
        found.append(rows)
    return found


def agrees(sample: Sample, scores: torch.Tensor) -> bool:
    return torch.equal(sample.rollout_routed_experts.long().sort().values, scores.topk(TOPK).indices.sort().values)


def test_trainer_and_engine_agree_about_experts_and_log_probs(whole: tuple[Finished, Path]) -> None:
    run, _ = whole
    assert len(run.metric("train/loss")) == ROLLOUTS * STEPS
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    differing = run.values("train/routing_replay_differing")
    assert max(differing[::STEPS]) < 2e-3  # the trainer's own router would have chosen the same, but for near ties
    assert min(differing[1::STEPS]) > 0.01  # and after an update others
    assert len(run.metric("rollout/top_p_kept_vocab_per_token")) == ROLLOUTS


def test_experts_are_those_of_the_weights_that_were_pushed(whole: tuple[Finished, Path]) -> None:
    _, root = whole
    before, after = (
        load_file(path) for path in (root / "hf-before/model.safetensors", *(root / "hf-0").glob("*.safetensors"))
    )
    trained = [name for name in before if ".mlp." in name]
    assert len(trained) == LAYERS * (3 * EXPERTS + 1)
    assert min((after[name] - before[name]).abs().max() for name in trained) > 1e-3
    for samples in scored(root):
        for sample, scores, _ in samples:
            experts = sample.rollout_routed_experts.long()
            assert (experts.sort().values.diff() > 0).all()
            chosen, kth = scores.gather(-1, experts), scores.topk(TOPK).values[..., -1:]
            assert (chosen > kth - 1e-4).all()  # near ties may go either way
        assert sum(agrees(sample, scores) for sample, scores, _ in samples) >= len(samples) - 2


def test_top_p_masks_and_log_probs_are_those_of_transformers(whole: tuple[Finished, Path]) -> None:
    _, root = whole
    sizes = []
    for sample, scores, probs in (row for samples in scored(root) for row in samples):
        if not agrees(sample, scores):  # a near tie, after which transformers' log-probs are of other experts
            continue
        ids, offsets = sample.rollout_top_p_token_ids.long(), sample.rollout_top_p_token_offsets.tolist()
        for t, token in enumerate(sample.tokens[-sample.response_length :]):
            kept_ids = ids[offsets[t] : offsets[t + 1]]
            kept, rest = probs[t][kept_ids], probs[t].clone()
            rest[kept_ids] = 0
            assert token in kept_ids
            assert kept.min() >= rest.max() - 1e-6  # the likeliest tokens,
            assert kept.sum() - kept.min() <= TOP_P + 1e-5  # none more than needed
            assert kept.sum() >= TOP_P - 1e-5 or len(kept_ids) == TOP_K  # and none less
            expected = (probs[t][token] / kept.sum()).log().item()
            assert sample.rollout_log_probs[t] == pytest.approx(expected, abs=1e-5)
            sizes.append(len(kept_ids))
    assert len(sizes) > 100
    assert min(sizes) < TOP_K / 2


def test_evaluation_asks_for_neither(whole: tuple[Finished, Path]) -> None:
    run, root = whole
    (dump,) = (root / "dumps").glob("eval*")
    samples = load_rollout(dump)
    assert len(samples) == 4
    assert all(sample.rollout_routed_experts is None for sample in samples)
    assert all(sample.rollout_top_p_token_ids is None for sample in samples)
    assert len(run.metric("eval/sums")) == 1
