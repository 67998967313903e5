from __future__ import annotations

from slime.observability.tracking import rollout_step
from tests.support.arguments import run_args


def test_the_axis_counts_rollouts_or_the_optimizer_steps_before_them():
    args = run_args(rollout_batch_size=6, n_samples_per_prompt=4, global_batch_size=8)
    assert rollout_step(args, 5) == 5
    args.wandb_always_use_train_step = True
    assert rollout_step(args, 5) == 15  # 3 steps of 8 samples per rollout of 24
