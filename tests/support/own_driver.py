"""A training loop of a user's own, from the public functions of ``slime.ray.placement_group``."""

import os
import sys

sys.path.insert(0, os.getcwd())

import ray

from slime.arguments import parse_args
from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking
from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models


def main(args):
    configure_logger()
    groups = create_placement_groups(args)
    init_tracking(args)
    rollout_manager, rollouts_per_epoch = create_rollout_manager(args, groups["rollout"])
    actor_model, critic_model = create_training_models(args, groups, rollout_manager)
    print(f"rollouts per epoch: {rollouts_per_epoch}, start: {args.start_rollout_id}, critic: {critic_model}")
    actor_model.update_weights()
    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        data = ray.get(rollout_manager.generate.remote(rollout_id))
        ray.get(actor_model.async_train(rollout_id, data))
        actor_model.clear_memory()
        actor_model.update_weights()
    actor_model.finish()
    ray.get(rollout_manager.dispose.remote())
    finish_tracking()


if __name__ == "__main__":
    main(parse_args())
