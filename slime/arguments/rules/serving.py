"""``slime serve``, and ``--debug-rollout-only`` without prompts: engines for whoever asks, and no rollouts."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments import diagnostics
from slime.arguments.files.sglang_config import read
from slime.arguments.rules.data import BUILT_IN_SOURCES
from slime.arguments.rules.loop import GENERATE_WITH_ENGINES


def choose(args: Namespace) -> None:
    """Set ``args.serve_only`` and, where it is true, what the command line may leave out.

    Flags about training, prompts and rollouts have no effect then, so that those of a run may be given as they are.
    """
    args.serve_only = getattr(args, "serve_only", False) or _makes_no_rollouts(args)
    if not args.serve_only:
        return
    args.debug_rollout_only = args.use_fault_tolerance = True
    args.num_rollout = 0
    diagnostics.missing_flags(args).pop("rollout_batch_size", None)
    if args.sglang_config is not None:
        _take_from_file(args)
    elif args.rollout_num_gpus is None and not args.colocate and args.prefill_num_servers is None:
        args.rollout_num_gpus = args.rollout_num_gpus_per_engine


def _makes_no_rollouts(args: Namespace) -> bool:
    """Whether nothing says what would be generated, or how much of it."""
    says_what = args.prompt_data is not None or not args.rollout_global_dataset or args.eval_interval is not None
    says_how_much = args.num_rollout is not None or args.num_epoch is not None
    own_source = not args.data_source_path.startswith(BUILT_IN_SOURCES)
    own_rollout = args.rollout_function_path not in GENERATE_WITH_ENGINES
    return bool(args.debug_rollout_only) and not (says_what or says_how_much or own_source or own_rollout)


def _take_from_file(args: Namespace) -> None:
    """A deployment file says how many slots there are, and may name every checkpoint."""
    config, _ = read(args.sglang_config)
    if args.rollout_num_gpus is None:
        args.rollout_num_gpus = config.total_num_gpus
    if "hf_checkpoint" in diagnostics.missing_flags(args) and all(model.model_path for model in config.models):
        del diagnostics.missing_flags(args)["hf_checkpoint"]
        args.hf_checkpoint = config.models[0].model_path
