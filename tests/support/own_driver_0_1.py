"""A training loop of a user's own, as that of slime 0.1 was written: it starts and connects everything itself."""

import os
import sys

sys.path.insert(0, os.getcwd())

import ray

from slime.ray.placement_group import create_actor_group, create_placement_groups, create_rollout_manager
from slime.utils.arguments import parse_args
from slime.utils.wandb_utils import init_wandb_primary


def train(args):
    pgs = create_placement_groups(args)
    wandb_run_id = init_wandb_primary(args)
    actor_model = create_actor_group(args, pgs["actor"], wandb_run_id=wandb_run_id)
    rollout_manager = create_rollout_manager(args, pgs["rollout"], wandb_run_id=wandb_run_id)

    num_rollout_per_epoch = None
    if args.num_rollout is None:
        num_rollout_per_epoch = ray.get(rollout_manager.controller.get_num_rollout_per_epoch.remote())
        args.num_rollout = num_rollout_per_epoch * args.num_epoch
    assert args.num_rollout > 0

    start_rollout_ids = ray.get(
        actor_model.async_init(args, role="actor", with_ref=args.kl_coef != 0 or args.use_kl_loss)
    )
    assert len(set(start_rollout_ids)) == 1
    if args.start_rollout_id is None:
        args.start_rollout_id = start_rollout_ids[0]
    if args.rollout_global_dataset:
        ray.get(rollout_manager.controller.load.remote(args.start_rollout_id - 1))

    ray.get(actor_model.async_init_weight_update_connections(rollout_manager))
    if args.offload_rollout:
        ray.get(rollout_manager.async_onload())
    ray.get(actor_model.async_update_weights())

    for rollout_id in range(args.start_rollout_id, args.num_rollout):
        if args.eval_interval is not None and rollout_id == 0:
            ray.get(rollout_manager.async_eval(rollout_id))

        rollout_data_ref = ray.get(rollout_manager.async_generate(rollout_id))
        if args.offload_rollout:
            ray.get(rollout_manager.async_offload())
        ray.get(actor_model.async_train(rollout_id, rollout_data_ref))

        at_epoch_end = num_rollout_per_epoch is not None and (rollout_id + 1) % num_rollout_per_epoch == 0
        if args.save_interval is not None and ((rollout_id + 1) % args.save_interval == 0 or at_epoch_end):
            ray.get(actor_model.async_save_model(rollout_id))
            if args.rollout_global_dataset:
                ray.get(rollout_manager.controller.save.remote(rollout_id))

        if args.offload_train:
            ray.get(actor_model.async_offload())
        if args.offload_rollout:
            ray.get(rollout_manager.async_onload())
        ray.get(actor_model.async_update_weights())

        if args.eval_interval is not None and ((rollout_id + 1) % args.eval_interval == 0 or at_epoch_end):
            ray.get(rollout_manager.async_eval(rollout_id))


if __name__ == "__main__":
    train(parse_args())
