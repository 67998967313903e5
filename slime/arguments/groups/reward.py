"""Rewards."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, flag
from slime.arguments.types import DottedPath


class Reward(ArgumentGroup):
    """Rewards and the conversion of samples to train data."""

    title = "reward"

    rm_type: str | None = flag(
        None,
        "remote_rm, deepscaler, dapo, math, f1, gpqa, ifbench or random; with the prefix boxed_ the answer is "
        'taken from \\boxed{} first; metadata["rm_type"] of a sample wins',
    )
    reward_key: str | None = flag(None, "key of the reward when the reward is an object")
    eval_reward_key: str | None = flag(None, "the same in evaluation; default: --reward-key")
    group_rm: bool = flag(False, "score whole groups instead of single samples")
    rm_url: str | None = flag(None, "address of the remote reward model")
    custom_rm_path: DottedPath | None = flag(None, "dotted path of your own reward function")
    custom_reward_post_process_path: DottedPath | None = flag(None, "dotted path of your own reward normalisation")
    custom_convert_samples_to_train_data_path: DottedPath | None = flag(
        None, "dotted path of your own conversion of samples to train data"
    )
