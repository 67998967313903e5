from __future__ import annotations

from types import SimpleNamespace

from slime.observability.steps import rollout_step


def test_the_axis_counts_rollouts_or_the_optimiser_steps_before_them():
    args = SimpleNamespace(rollout_batch_size=6, n_samples_per_prompt=4, global_batch_size=8)
    assert rollout_step(args, 5) == 5
    args.wandb_always_use_train_step = True
    assert rollout_step(args, 5) == 15  # 3 steps of 8 samples per rollout of 24
