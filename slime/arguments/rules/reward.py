"""Where rewards come from."""

from __future__ import annotations

import importlib.util
from argparse import Namespace

from slime.arguments import unchecked
from slime.arguments.errors import ArgumentError
from slime.arguments.rules.loop import GENERATE_WITH_ENGINES

RM_TYPES = ("remote_rm", "deepscaler", "dapo", "math", "f1", "gpqa", "ifbench", "random")
"""Values of ``--rm-type`` and of a sample's ``metadata["rm_type"]``; each may be prefixed with ``boxed_``."""
IFBENCH_CHECKERS = "evaluation_lib"
DISTILLATION = "slime.rollout.on_policy_distillation"


def check(args: Namespace) -> None:
    """A built-in reward must be known and complete; no reward at all is worth a warning."""
    _check_data_sets(args)
    if args.custom_rm_path is not None:
        _check_distillation(args)
        if args.rm_type is not None:
            unchecked.warn(
                args,
                f"--rm-type {args.rm_type} has no effect beside --custom-rm-path {args.custom_rm_path}, which scores "
                "every sample; leave one of them out, unless that function reads args.rm_type",
            )
        return
    if args.rm_type is None:
        _warn_of_none(args)
        return
    _check_type(args, "--rm-type ", args.rm_type)


def _check_distillation(args: Namespace) -> None:
    """The teacher's reply is no number: something has to make log-probs of it."""
    if args.custom_rm_path != f"{DISTILLATION}.reward_func":
        return
    if args.rm_url is None:
        raise ArgumentError(
            f"--custom-rm-path {args.custom_rm_path} needs --rm-url, the /generate address of the teacher's server"
        )
    if args.custom_reward_post_process_path is None and args.custom_convert_samples_to_train_data_path is None:
        raise ArgumentError(
            f"--custom-rm-path {args.custom_rm_path} needs --custom-reward-post-process-path "
            f"{DISTILLATION}.post_process_rewards, which reads the teacher's replies"
        )


def _check_data_sets(args: Namespace) -> None:
    """The rewards of the built-in evaluation; a custom reward function may read any type."""
    if (args.eval_function_path or args.rollout_function_path) not in GENERATE_WITH_ENGINES:
        return
    for dataset in args.eval_datasets:
        if dataset.rm_type is not None and dataset.custom_rm_path is None:
            said = f"--eval-config {args.eval_config}: data set {dataset.name}: rm_type "
            _check_type(args, said, dataset.rm_type)


def _check_type(args: Namespace, said: str, rm_type: str) -> None:
    kind = rm_type.strip().removeprefix("boxed_")
    if kind not in RM_TYPES:
        raise ArgumentError(f"{said}{rm_type}: expected one of {', '.join(RM_TYPES)}, or boxed_ and one of them")
    if kind == "ifbench" and importlib.util.find_spec(IFBENCH_CHECKERS) is None:
        unchecked.missing(
            args,
            f"{said}{rm_type}: there is no module {IFBENCH_CHECKERS}, the checkers of IFBench; get them from "
            "https://github.com/allenai/IFBench, put their directory on the PYTHONPATH and install their "
            "requirements.txt",
        )
    if kind == "remote_rm" and args.rm_url is None:
        raise ArgumentError(f"{said}remote_rm needs --rm-url, the address that answers with rewards")


def _warn_of_none(args: Namespace) -> None:
    """Samples may bring their own type, and custom functions their own rewards."""
    generates = args.rollout_function_path in GENERATE_WITH_ENGINES and not args.debug_train_only
    if generates and args.custom_generate_function_path is None and args.num_rollout != 0:
        unchecked.warn(
            args,
            'no reward is chosen: unless every sample\'s metadata has "rm_type", the first rollout fails; give '
            "--rm-type or --custom-rm-path",
        )
