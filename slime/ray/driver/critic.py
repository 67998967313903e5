"""The critic of PPO beside the actor: its part of a step, and the rollout from which both resume.

Both roles share their slots, so one of the two is offloaded at a time. The critic is saved first, after its part of a
rollout, and the actor after its own: a run that is killed in between has the critic ahead. While only the critic is
trained (``--num-critic-only-steps``) the actor is not saved: it resumes from its last checkpoint before these rollouts,
or from the weights it started from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.backends.megatron_utils.checkpoints.directory import find_checkpoint, is_megatron_checkpoint, iteration_dir
from slime.observability.timer import timer

logger = logging.getLogger(__name__)


class CriticGroup(Protocol):
    """The methods of the critic's ranks that the step calls (``slime.ray.driver.train_group.RayTrainGroup``)."""

    def async_train(
        self, rollout_id: int, rollout_data_ref: Sequence[Any], external_data: Sequence[Any] | None = None
    ) -> list[Any]: ...
    def wait(self, refs: list[Any], what: str) -> list[Any]: ...
    def save_model(self, rollout_id: int, force_sync: bool = False) -> None: ...
    def offload(self) -> None: ...
    def onload(self) -> None: ...
    def finish_saving(self) -> None: ...
    def finish(self) -> None: ...
    def measured(self, name: str) -> float | None: ...


class CriticStep:
    """Onloads the critic for its training and its checkpoint, before the actor's.

    ``save_prompts(rollout_id)`` saves the state of the prompts, which must exist before the checkpoint that makes
    it count: that is the critic's while the actor is not trained yet.
    """

    def __init__(self, args: Args, critic: CriticGroup, save_prompts: Callable[[int], None]) -> None:
        self.args, self.critic, self._save_prompts = args, critic, save_prompts

    def critic_only(self, rollout_id: int) -> bool:
        """Return True if only the critic is trained on this rollout (``--num-critic-only-steps``)."""
        return bool(rollout_id < self.args.num_critic_only_steps)

    def run(self, rollout_id: int, data: Sequence[Any], *, save: bool) -> list[Any]:
        """Train on the rollout, then offload the critic; return the values for the actor, a reference per rank."""
        if self.args.async_save:
            self.critic.finish_saving()  # the actor publishes its last one when it trains: not before the critic's
        with timer("onload_critic"):
            self.critic.onload()
        with timer("train_critic"):
            values = self.critic.async_train(rollout_id, data)
            self.critic.wait(values, f"training the critic on rollout {rollout_id}")
        if save:
            with timer("save_critic"):
                if self.critic_only(rollout_id):
                    self._save_prompts(rollout_id)
                self.critic.save_model(rollout_id, force_sync=rollout_id == self.args.num_rollout - 1)
        with timer("offload_critic"):
            self.critic.offload()
        return values

    def headline(self, rollout_id: int) -> dict[str, float]:
        """Return the few numbers worth a line per rollout, with those of the rollout where only the critic has them."""
        found = {"value loss": self.critic.measured("train/critic-value_loss")}
        if self.critic_only(rollout_id):
            found["reward"] = self.critic.measured("rollout/raw_reward")
            found["response length"] = self.critic.measured("rollout/response_lengths")
        return {name: value for name, value in found.items() if value is not None}


def agree_on_resume_step(actor: Args, critic: Args) -> None:
    """Set ``ckpt_step`` (or take ``load`` away from the critic) so that both resume after the same rollout.

    Both are arguments of roles. Raises ArgumentError where there is no such rollout. What was asked for by
    ``--ckpt-step`` is left as it is.
    """
    actor_last, critic_last = _last(actor), _last(critic)
    if actor_last == critic_last or _asks_for_step(actor) or _asks_for_step(critic):
        return
    if critic_last is None:
        raise ArgumentError(
            f"the actor would resume after rollout {actor_last} of --load {actor.load}, but its critic has no "
            f"checkpoint{f' in {critic.save}' if critic.save else ''}. Take the actor's weights for a fresh start with "
            "--finetune, or give the critic's checkpoint as load of role critic in --megatron-config-path"
        )
    last = _last_of_both(actor, critic, actor_last, critic_last)
    if last is None and actor_last is not None:
        raise ArgumentError(
            f"--load {actor.load} ends after rollout {actor_last} and the critic's {critic.load} after rollout "
            f"{critic_last}, and there is no rollout that both have a checkpoint of; are they of one run?"
        )
    if last is None:
        logger.warning("no checkpoint of the actor was completed: the critic starts from scratch too")
        critic.load, critic.ckpt_step = actor.load, actor.ckpt_step
        critic.no_load_optim = critic.no_load_rng = critic.finetune = True
        return
    actor_step, critic_step = last
    if critic_step != critic_last:
        logger.warning(
            "the run ended between the checkpoints of critic and actor: both resume after rollout %d", critic_step
        )
    if actor_step is not None and actor_step != critic_step:
        logger.warning(
            "the critic resumes after rollout %d and the actor with its weights after rollout %d: "
            "--num-critic-only-steps %d leaves them unchanged until then",
            critic_step,
            actor_step,
            actor.num_critic_only_steps,
        )
    critic.ckpt_step = critic_step
    if actor_step is not None:
        actor.ckpt_step = actor_step


def first_rollout(args: Args, actor_start: int, critic_start: int) -> int:
    """Return the first rollout of the run from those that actor and critic loaded; RuntimeError where they disagree."""
    trained_alone = actor_start < critic_start <= args.num_critic_only_steps
    if actor_start != critic_start and not trained_alone:
        raise RuntimeError(
            f"the actor's next rollout is {actor_start} and the critic's is {critic_start}; check load and ckpt_step "
            "of both roles"
        )
    return critic_start


def _asks_for_step(role: Args) -> bool:
    """Return True if ``--ckpt-step`` selects where a role resumes; in a fresh start it selects the first weights."""
    return role.ckpt_step is not None and not role.finetune


def _last(args: Args) -> int | None:
    """The iteration that a role would resume from, None where it starts with rollout 0."""
    if not is_megatron_checkpoint(args.load) or args.finetune:
        return None
    return find_checkpoint(args.load, args.ckpt_step)[1]


def _last_of_both(actor: Args, critic: Args, actor_last: int | None, critic_last: int) -> tuple[int | None, int] | None:
    """The last rollout that the run can resume after, as the checkpoints of actor and critic; None without any.

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
