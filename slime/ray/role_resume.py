"""Where actor and critic go on from: the last rollout that both have a checkpoint of.

The critic is saved first, after its part of a rollout, and the actor after its own: a run that is killed in between has
the critic ahead. While only the critic is trained (``--num-critic-only-steps``) the actor is not saved: it goes on from
its last checkpoint before these rollouts, or from the weights it started from.
"""

from __future__ import annotations

import logging
from argparse import Namespace

from slime.arguments.errors import ArgumentError
from slime.backends.megatron_utils.checkpoint_dir import find_checkpoint, is_megatron_checkpoint, iteration_dir

logger = logging.getLogger(__name__)


def agree(actor: Namespace, critic: Namespace) -> None:
    """Set ``ckpt_step`` (or take ``load`` away from the critic) so that both go on after the same rollout.

    Both are arguments of roles. Raises ArgumentError where there is no such rollout. What was asked for by
    ``--ckpt-step`` is left as it is.
    """
    actor_last, critic_last = _last(actor), _last(critic)
    if actor_last == critic_last or _asks_for_step(actor) or _asks_for_step(critic):
        return
    if critic_last is None:
        raise ArgumentError(
            f"the actor would go on after rollout {actor_last} of --load {actor.load}, but its critic has no checkpoint"
            f"{f' in {critic.save}' if critic.save else ''}. Take the actor's weights for a fresh start with "
            "--finetune, or give the critic's checkpoint as load of role critic in --megatron-config-path"
        )
    last = _last_of_both(actor, critic, actor_last, critic_last)
    if last is None and actor_last is not None:
        raise ArgumentError(
            f"--load {actor.load} ends after rollout {actor_last} and the critic's {critic.load} after rollout "
            f"{critic_last}, and there is no rollout that both have a checkpoint of; are they of one run?"
        )
    if last is None:
        logger.warning("no checkpoint of the actor was completed: the critic starts afresh too")
        critic.load, critic.ckpt_step = actor.load, actor.ckpt_step
        critic.no_load_optim = critic.no_load_rng = critic.finetune = True
        return
    actor_step, critic_step = last
    if critic_step != critic_last:
        logger.warning(
            "the run ended between the checkpoints of critic and actor: both go on after rollout %d", critic_step
        )
    if actor_step is not None and actor_step != critic_step:
        logger.warning(
            "the critic goes on after rollout %d and the actor with its weights after rollout %d: "
            "--num-critic-only-steps %d leaves them as they are till then",
            critic_step,
            actor_step,
            actor.num_critic_only_steps,
        )
    critic.ckpt_step = critic_step
    if actor_step is not None:
        actor.ckpt_step = actor_step


def check_starts(args: Namespace, actor_start: int, critic_start: int) -> int:
    """Return the first rollout of the run from those that actor and critic loaded; RuntimeError where they disagree."""
    trained_alone = actor_start < critic_start <= args.num_critic_only_steps
    if actor_start != critic_start and not trained_alone:
        raise RuntimeError(
            f"the actor's next rollout is {actor_start} and the critic's is {critic_start}; look at load and ckpt_step "
            "of both roles"
        )
    return critic_start


def _asks_for_step(role: Namespace) -> bool:
    """Whether ``--ckpt-step`` says where a role goes on; in a fresh start it is where its first weights come from."""
    return role.ckpt_step is not None and not role.finetune


def _last(args: Namespace) -> int | None:
    """The iteration that a role would go on from, None where it starts with rollout 0."""
    if not is_megatron_checkpoint(args.load) or args.finetune:
        return None
    return find_checkpoint(args.load, args.ckpt_step)[1]


def _last_of_both(
    actor: Namespace, critic: Namespace, actor_last: int | None, critic_last: int
) -> tuple[int | None, int] | None:
    """The last rollout that the run can go on after, as the checkpoints of actor and critic; None without any.

    The actor's is of the same rollout, or of an earlier one when the critic alone is trained on the critic's; None
    where the actor was never trained.
    """
    for step in range(critic_last, -1, -1):
        if not iteration_dir(critic.load, step).is_dir():
            continue
        alone = step < actor.num_critic_only_steps
        if actor_last is None:
            if alone:
                return None, step
            continue
        of_actor = (i for i in range(min(actor_last, step), -1, -1) if iteration_dir(actor.load, i).is_dir())
        found = next(of_actor, None)
        if found is not None and (found == step or alone):
            return found, step
    return None
