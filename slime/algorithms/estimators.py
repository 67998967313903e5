"""The table of advantage estimators: one entry per value of ``--advantage-estimator``.

Flag choices, rules, reward normalization, advantages, policy loss and metrics all read it. Functions are given by
dotted path and loaded when the trainer calls them, so that ``slime.arguments`` can read the table without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from slime.arguments.args import Args

_ADVANTAGES = "slime.algorithms.advantages"


@dataclass(frozen=True)
class Estimator:
    """The definition of an advantage estimator.

    name: the value of the flag. advantages: dotted path of ``fn(args, inputs) -> (advantages, returns)``, where
    ``inputs`` is ``slime.algorithms.advantages.EstimatorInputs``.
    baseline: what is subtracted from a reward: the mean of its group, the mean of the group's other trajectories, or
    nothing. scale_by_std: it is divided by the group's standard deviation after that.
    kl: how ``--kl-coef`` enters: token by token, as the sum over a response, with the same baseline as its reward
    (samples need a ``group_index``), or not at all. discounted: ``--gamma`` enters.
    loss: the clipped ratio of PPO, or CISPO's, which is a weight without gradient. ratio: that of a token, or one for
    all tokens of a response.
    needs_critic: a critic is trained and ``inputs.values`` are its values. needs_whitening: ``--normalize-advantages``
    is required.
    """

    name: str
    advantages: str
    baseline: Literal["group", "leave_one_out"] | None = None
    scale_by_std: bool = False
    kl: Literal["token", "response"] | None = None
    discounted: bool = False
    loss: Literal["ppo", "cispo"] = "ppo"
    ratio: Literal["token", "sequence"] = "token"
    needs_critic: bool = False
    needs_whitening: bool = False


_TABLE = (
    Estimator("grpo", f"{_ADVANTAGES}.grpo", baseline="group", scale_by_std=True),
    Estimator("gspo", f"{_ADVANTAGES}.grpo", baseline="group", scale_by_std=True, ratio="sequence"),
    Estimator("cispo", f"{_ADVANTAGES}.grpo", baseline="group", scale_by_std=True, loss="cispo"),
    Estimator(
        "reinforce_plus_plus", f"{_ADVANTAGES}.reinforce_plus_plus", kl="token", discounted=True, needs_whitening=True
    ),
    Estimator(
        "reinforce_plus_plus_baseline", f"{_ADVANTAGES}.reinforce_plus_plus_baseline",
        baseline="group", kl="token", needs_whitening=True,
    ),
    Estimator("rloo", f"{_ADVANTAGES}.rloo", baseline="leave_one_out", kl="response"),
    Estimator("ppo", f"{_ADVANTAGES}.ppo", kl="token", discounted=True, needs_critic=True),
)  # fmt: skip

ESTIMATORS = {estimator.name: estimator for estimator in _TABLE}


def estimator_of(args: Args) -> Estimator:
    """Return the entry of ``args.advantage_estimator``. Raises ValueError for a name that the table does not have."""
    name = args.advantage_estimator
    if name not in ESTIMATORS:
        raise ValueError(f"--advantage-estimator {name} is unknown; expected one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


def names_where(condition: Callable[[Estimator], object]) -> str:
    """Return the names of the estimators that meet ``condition``, for help texts and messages: "a, b or c"."""
    *others, last = [estimator.name for estimator in ESTIMATORS.values() if condition(estimator)]
    return f"{', '.join(others)} or {last}" if others else last


WITH_CRITIC = names_where(lambda estimator: estimator.needs_critic)
