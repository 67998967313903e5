"""``train.py`` on conversations that an agent leads through the gateway.

On every change: such a run and its log-probs in ``test_run_security.py``, samples in ``test_agent_engine.py``.
"""

from __future__ import annotations

import pytest

from slime.rollout.debug_data import load_rollout
from slime.utils.misc import group_by
from tests.support.run_train import rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]


def test_the_trainer_finds_the_log_probs_of_both_turns(tmp_path):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    flags.remove("--apply-chat-template")  # the gateway applies it, turn by turn
    extra = f"""--num-rollout 2 --custom-generate-function-path tests.support.agent_hooks.two_turns
        --save-debug-rollout-data {tmp_path}/dumps/{{rollout_id}}.pt"""
    run = run_train([*flags, *extra.split()], tmp_path / "run")
    assert sorted(run.metric("train/loss")) == [0, 1]
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert all(norm > 0 for norm in run.metric("train/grad_norm").values())
    # nothing is given up: where the template tells an answer otherwise, a sample begins
    assert run.metric("agent/trained_token_share") == {0: 1.0, 1: 1.0}
    assert run.metric("agent/realign_tokens") == {0: 0.0, 1: 0.0}
    assert all(0 <= forks <= 1 for forks in run.metric("agent/forks_per_session").values())
    assert run.metric("rollout/weight_version/min") == {0: 1.0, 1: 2.0}
    for rollout_id in (0, 1):
        samples = load_rollout(tmp_path / "dumps" / f"{rollout_id}.pt")
        sessions = group_by(samples, key=lambda sample: sample.rollout_id)
        assert len(sessions) == 16
        for siblings in sessions.values():
            assert 1 <= len(siblings) <= 2
            assert len({(s.index, s.group_index, s.reward) for s in siblings}) == 1
            # two turns of at most 16 tokens each, in one sample or in two
            assert 2 <= sum(sum(s.loss_mask) for s in siblings) <= 32
            assert sum(len(s.weight_versions) for s in siblings) == 2


def test_experts_of_prefill_and_decode_engines_are_replayed_for_both_turns(tmp_path):
    """On every change: test_turn_experts.py."""
    checkpoint = make_tiny_checkpoint(
        tmp_path / "model", "qwen3_moe", tie_word_embeddings=False, num_hidden_layers=3, num_experts=8,
        num_experts_per_tok=2, initializer_range=0.2,
    )  # fmt: skip
    engines = tmp_path / "engines.yaml"
    engines.write_text("""
sglang:
  - name: actor
    server_groups: [{worker_type: prefill, num_gpus: 1}, {worker_type: decode, num_gpus: 1}]
""")
    flags = rl_flags(checkpoint, sums_file(tmp_path / "sums.jsonl"))
    flags.remove("--apply-chat-template")
    extra = f"""--num-rollout 2 --sglang-config {engines} --rollout-num-gpus 2 --use-rollout-routing-replay
        --custom-generate-function-path tests.support.agent_hooks.two_turns
        --save-debug-rollout-data {tmp_path}/dumps/{{rollout_id}}.pt"""
    run = run_train([*flags, *extra.split()], tmp_path / "run")
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert max(run.values("train/routing_replay_differing")) < 2e-3  # but for near ties
    for rollout_id in (0, 1):
        for sample in load_rollout(tmp_path / "dumps" / f"{rollout_id}.pt"):
            assert sample.rollout_routed_experts.shape == (len(sample.tokens) - 1, 3, 2)
