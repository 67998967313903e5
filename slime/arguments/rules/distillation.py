"""On-policy distillation."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError
from slime.arguments.rules import hf_config
from slime.arguments.rules.loop import GENERATE_WITH_ENGINES
from slime.arguments.rules.reward import DISTILLATION

_HOOKS_OF_SAMPLES = (
    "custom_rm_path", "custom_reward_post_process_path", "custom_generate_function_path", "rollout_sample_hook_path",
    "rollout_sample_filter_path", "rollout_all_samples_process_path", "custom_convert_samples_to_train_data_path",
)  # fmt: skip
"""Functions of the user that may set the teacher's log-probs."""


def check(args: Namespace) -> None:
    """A teacher needs a place to run."""
    if args.use_opd:
        _check_teacher(args)
    elif args.opd_teacher_load is not None:
        raise ArgumentError(
            f"--opd-teacher-load {args.opd_teacher_load} is not read without --use-opd; add it or leave this out"
        )


def _check_teacher(args: Namespace) -> None:
    if args.opd_type is None:
        raise ArgumentError(
            "--use-opd needs --opd-type: sglang (a teacher behind --rm-url) or megatron (--opd-teacher-load)"
        )
    if args.loss_type == "sft_loss":
        raise ArgumentError("--use-opd changes advantages, which --loss-type sft_loss does not have; leave one out")
    if not args.compute_advantages_and_returns:
        raise ArgumentError(
            "--use-opd changes advantages, which --disable-compute-advantages-and-returns leaves out; leave one out"
        )
    if args.opd_type == "sglang":
        _check_server(args)
    else:
        _check_checkpoint(args)


def _check_server(args: Namespace) -> None:
    if args.opd_teacher_load is not None:
        raise ArgumentError(
            f"--opd-teacher-load {args.opd_teacher_load} is for --opd-type megatron; with --opd-type sglang the "
            "teacher answers at --rm-url, so leave it out"
        )
    generates = args.rollout_function_path in GENERATE_WITH_ENGINES and args.load_debug_rollout_data is None
    if generates and not any(getattr(args, name) for name in _HOOKS_OF_SAMPLES):
        raise ArgumentError(
            f"--use-opd --opd-type sglang: nothing asks a teacher for log-probs; give --custom-rm-path "
            f"{DISTILLATION}.reward_func with --rm-url, and --custom-reward-post-process-path "
            f"{DISTILLATION}.post_process_rewards"
        )


def _check_checkpoint(args: Namespace) -> None:
    load = args.opd_teacher_load
    if load is None:
        raise ArgumentError("--opd-type megatron needs --opd-teacher-load, the teacher's checkpoint")
    if args.custom_rm_path == f"{DISTILLATION}.reward_func":
        raise ArgumentError(
            f"--custom-rm-path {args.custom_rm_path} asks a teacher's server, but with --opd-type megatron the teacher "
            "is in the trainer; use --opd-type sglang, or another reward such as --rm-type math"
        )
    if args.debug_rollout_only:
        return
    if not Path(load).is_dir():
        unchecked.missing(args, f"--opd-teacher-load {load}: there is no such directory")
        return
    if args.opd_teacher_ckpt_step is not None and (Path(load) / "config.json").is_file():
        raise ArgumentError(
            f"--opd-teacher-ckpt-step {args.opd_teacher_ckpt_step}: --opd-teacher-load {load} is a Hugging Face "
            "checkpoint, which has no steps; leave it out"
        )


def check_architecture(args: Namespace) -> None:
    """A teacher in the trainer takes turns with the student in one model: the model flags must describe it too."""
    if not args.use_opd or args.opd_type != "megatron" or args.debug_rollout_only:
        return
    if not (Path(args.opd_teacher_load) / "config.json").is_file():
        return  # a Megatron checkpoint: its shapes are compared when it is loaded
    wrong = hf_config.differences(args, hf_config.read_config(args.opd_teacher_load, "--opd-teacher-load"))
    if wrong:
        raise ArgumentError(
            f"--opd-teacher-load {args.opd_teacher_load}: with --opd-type megatron the teacher must have the student's "
            f"architecture, but {'; '.join(wrong)}. A teacher of another one can answer from a server: --opd-type "
            "sglang"
        )
