"""Rollouts read from dumps while the engines stay up (``--load-forge-rollout-data``)."""

from __future__ import annotations

from pathlib import Path

from slime.arguments.args import Args
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.debug_data import load_rollout
from slime.utils.declared import with_defaults
from slime.utils.misc import group_by
from slime.utils.moved import also_named
from slime.utils.types import Sample

__all__ = ["generate_rollout"]

DATASET_NAME = "forge_eval"


@also_named(data_buffer="data_source")
def generate_rollout(
    args: Args, rollout_id: int, data_source: object, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Return the dump at ``args.load_forge_rollout_data``, a path or a template with ``{rollout_id}``.

    Training falls back to the dump of rollout 0. Evaluations need a template: their dumps are ``eval_<rollout_id>``.
    Raises FileNotFoundError, and ValueError without the flag.
    """
    args = with_defaults(args)
    template = args.load_forge_rollout_data
    if not template:
        raise ValueError("slime.rollout.forge_load needs --load-forge-rollout-data")
    if evaluation:
        if "{rollout_id}" not in template:
            raise ValueError("evaluations can only be read from a --load-forge-rollout-data with {rollout_id} in it")
        return _eval_output(args, load_rollout(template.format(rollout_id=f"eval_{rollout_id}")))
    path = Path(template.format(rollout_id=rollout_id))
    if not path.exists():
        path = Path(template.format(rollout_id=0))
    # samples without a group index stay alone: their negative position is no other group's index
    numbered = enumerate(load_rollout(path), 1)
    groups = group_by(numbered, key=lambda item: -item[0] if item[1].group_index is None else item[1].group_index)
    return RolloutFnTrainOutput(samples=[[sample for _, sample in group] for group in groups.values()])


def _eval_output(args: Args, samples: list[Sample]) -> RolloutFnEvalOutput:
    key = args.eval_reward_key or args.reward_key
    return RolloutFnEvalOutput(
        data={
            DATASET_NAME: {
                "rewards": [s.reward[key] if key and isinstance(s.reward, dict) else s.reward for s in samples],
                "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
                "samples": samples,
            }
        }
    )
