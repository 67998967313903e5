"""Rewards."""

from __future__ import annotations

from slime.arguments.group import ArgumentGroup, flag
from slime.arguments.types import DottedPath


class Reward(ArgumentGroup):
    """Rewards and the conversion of samples to train data."""

    title = "reward"

    rm_type: str | None = flag(
        None,
        "built-in reward: remote_rm, deepscaler, dapo, math, f1, gpqa, ifbench or random; with the prefix "
        'boxed_ the answer is taken from \\boxed{} first; metadata["rm_type"] of a sample wins',
    )
    reward_key: str | None = flag(None, "key of the number to train on, when rewards are objects")
    eval_reward_key: str | None = flag(
        None, "key of the number to report in evaluation, when rewards are objects; default: --reward-key"
    )
    group_rm: bool = flag(False, "score all responses to a prompt together instead of one by one")
    rm_url: str | None = flag(None, "address of the reward model of --rm-type remote_rm")
    custom_rm_path: DottedPath | None = flag(None, "dotted path of your own reward function, instead of --rm-type")
    custom_reward_post_process_path: DottedPath | None = flag(
        None, "dotted path of your own normalisation of rewards; default: within the group of a prompt"
    )
    custom_convert_samples_to_train_data_path: DottedPath | None = flag(
        None, "dotted path of your own conversion of samples to train data, rewards included"
    )
