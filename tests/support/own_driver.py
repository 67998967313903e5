"""A training loop of a user's own, as the synchronous one of slime <= 0.3.1 was written.

It imports nothing of ``slime.driver``, waits with ``ray.get``, and leaves it to the trainers who is awake.
"""

import os
import sys

sys.path.insert(0, os.getcwd())

import ray

from slime.observability.logging_utils import configure_logger, finish_tracking, init_tracking
from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models
from slime.utils.arguments import parse_args
from slime.utils.misc import should_run_periodic_action


def train(args):
    configure_logger()
    pgs = create_placement_groups(args)
    init_tracking(args)
    rollout_manager, num_rollout_per_epoch = create_rollout_manager(args, pgs["rollout"])
    actor_model, critic_model = create_training_models(args, pgs, rollout_manager)
    print(f"rollouts per epoch: {num_rollout_per_epoch}, start: {args.start_rollout_id}, critic: {bool(critic_model)}")

    if args.offload_rollout and not args.release_train:
        ray.get(rollout_manager.onload_weights.remote())
    actor_model.update_weights()
    if args.check_weight_update_equal:
        ray.get(rollout_manager.check_weights.remote(action="compare"))
    if args.offload_rollout:
        ray.get(rollout_manager.onload_kv.remote())

    if args.num_rollout == 0 and args.eval_interval is not None:
        ray.get(rollout_manager.eval.remote(rollout_id=0))

    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        if args.eval_interval is not None and rollout_id == 0 and not args.skip_eval_before_train:
            ray.get(rollout_manager.eval.remote(rollout_id))

        rollout_data_ref = ray.get(rollout_manager.generate.remote(rollout_id))

        if args.offload_rollout:
            ray.get(rollout_manager.offload.remote())
        if args.release_train:
            actor_model.create(rollout_manager)

        trains_actor = not args.use_critic or rollout_id >= args.num_critic_only_steps
        if args.use_critic:
            values = critic_model.async_train(rollout_id, rollout_data_ref)
            if trains_actor:
                ray.get(actor_model.async_train(rollout_id, rollout_data_ref, external_data=values))
            ray.get(values)
        else:
            ray.get(actor_model.async_train(rollout_id, rollout_data_ref))

        if args.release_train or should_run_periodic_action(
            rollout_id, args.save_interval, num_rollout_per_epoch, args.num_rollout
        ):
            force_sync = args.release_train or rollout_id == args.num_rollout - 1
            if trains_actor:
                actor_model.save_model(rollout_id, force_sync=force_sync)
            if args.use_critic:
                critic_model.save_model(rollout_id, force_sync=force_sync)
            if args.rollout_global_dataset:
                ray.get(rollout_manager.save.remote(rollout_id))

        if not args.offload_train:
            actor_model.clear_memory()
        # By tags, as loops of slime 0.2 do, which import these from sglang.srt.constants.
        if args.offload_rollout and not args.release_train:
            ray.get(rollout_manager.onload.remote(tags=["weights"]))
        actor_model.update_weights()
        if args.offload_rollout:
            ray.get(rollout_manager.onload.remote(tags=["cuda_graph"]))
            ray.get(rollout_manager.onload.remote(tags=["kv_cache"]))

        if should_run_periodic_action(rollout_id, args.eval_interval, num_rollout_per_epoch):
            ray.get(rollout_manager.eval.remote(rollout_id))

    ray.get(rollout_manager.dispose.remote())
    finish_tracking(args)


if __name__ == "__main__":
    train(parse_args())
