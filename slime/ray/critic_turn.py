"""The critic's part of a step, on slots that it shares with the actor: one of the two is awake at a time."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any, Protocol

from slime.observability.timer import timer


class Group(Protocol):
    """What is asked of the critic's ranks (``slime.ray.train_group.RayTrainGroup``)."""

    def async_train(self, rollout_id: int, rollout_data_ref: Any, external_data: Any = None) -> list[Any]: ...
    def wait(self, refs: list[Any], what: str) -> list[Any]: ...
    def save_model(self, rollout_id: int, force_sync: bool = False) -> None: ...
    def offload(self) -> None: ...
    def onload(self) -> None: ...
    def finish_saving(self) -> None: ...
    def finish(self) -> None: ...
    def measured(self, name: str) -> float | None: ...


class CriticTurn:
    """Wakes the critic for its training and its checkpoint, before the actor's.

    ``save_prompts(rollout_id)`` saves the state of the prompts, which must be there before the checkpoint that makes
    it count: that is the critic's while the actor is not trained yet.
    """

    def __init__(self, args: Namespace, critic: Group, save_prompts: Callable[[int], None]) -> None:
        self.args, self.critic, self._save_prompts = args, critic, save_prompts

    def is_all(self, rollout_id: int) -> bool:
        """Whether only the critic is trained on this rollout (``--num-critic-only-steps``)."""
        return bool(rollout_id < self.args.num_critic_only_steps)

    def take(self, rollout_id: int, data: Any, *, save: bool) -> list[Any]:
        """Train on the rollout; return the values for the actor, a reference per rank. The critic sleeps afterwards."""
        if self.args.async_save:
            self.critic.finish_saving()  # the actor publishes its last one when it trains: not before the critic's
        with timer("onload_critic"):
            self.critic.onload()
        with timer("train_critic"):
            values = self.critic.async_train(rollout_id, data)
            self.critic.wait(values, f"training the critic on rollout {rollout_id}")
        if save:
            with timer("save_critic"):
                if self.is_all(rollout_id):
                    self._save_prompts(rollout_id)
                self.critic.save_model(rollout_id, force_sync=rollout_id == self.args.num_rollout - 1)
        with timer("offload_critic"):
            self.critic.offload()
        return values

    def headline(self, rollout_id: int) -> dict[str, float]:
        """Return the few numbers worth a line per rollout, with those of the rollout where only the critic has them."""
        found = {"value loss": self.critic.measured("train/critic-value_loss")}
        if self.is_all(rollout_id):
            found["reward"] = self.critic.measured("rollout/raw_reward")
            found["response length"] = self.critic.measured("rollout/response_lengths")
        return {name: value for name, value in found.items() if value is not None}
