"""Partial loops, engines alone, dumps, profiles, and the path templates of what a run writes."""

from __future__ import annotations

import copy
import itertools
import string
from pathlib import Path

from slime.algorithms.estimators import estimator_of
from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.errors import ArgumentError
from slime.arguments.files.sglang_config import read
from slime.arguments.group import flags_of
from slime.arguments.groups.algorithm import Algorithm, Distillation, OffPolicy
from slime.arguments.groups.cluster import ElasticEngines, ExternalEngines, FaultTolerance
from slime.arguments.groups.data import Data
from slime.arguments.groups.debug import ContinuousIntegration, Profiling
from slime.arguments.groups.reward import Reward
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT, GENERATE_WITH_ENGINES, Environments, Eval, Rollout
from slime.arguments.groups.weight_sync import WeightSync
from slime.arguments.rules.data import BUILT_IN_SOURCES

FORGE_ROLLOUT = "slime.rollout.forge_load.generate_rollout"


def expand_dumps(args: Args) -> None:
    """``--dump-details DIR`` sets dump paths that are not given; both must differ; what concerns a replay needs one."""
    if args.dump_details is not None:
        for name in ("rollout_data", "train_data"):
            if getattr(args, f"save_debug_{name}") is None:
                setattr(args, f"save_debug_{name}", f"{args.dump_details}/{name}/{{rollout_id}}.pt")
    if args.save_debug_rollout_data is not None and args.save_debug_rollout_data == args.save_debug_train_data:
        raise ArgumentError(
            f"--save-debug-rollout-data and --save-debug-train-data are both {args.save_debug_rollout_data}: "
            "one would overwrite the other; give them different paths"
        )
    if args.load_debug_rollout_data_subsample is not None and args.load_debug_rollout_data is None:
        raise ArgumentError(
            "--load-debug-rollout-data-subsample takes a part of the dumps of --load-debug-rollout-data; add that one"
        )
    if args.load_forge_rollout_data is not None and args.rollout_function_path == DEFAULT_ROLLOUT:
        raise ArgumentError(
            f"--load-forge-rollout-data {args.load_forge_rollout_data} is not read by {DEFAULT_ROLLOUT}; "
            f"add --rollout-function-path {FORGE_ROLLOUT}"
        )
    if args.rollout_function_path == FORGE_ROLLOUT and args.load_forge_rollout_data is None:
        raise ArgumentError(f"--rollout-function-path {FORGE_ROLLOUT} reads dumps and needs --load-forge-rollout-data")


def choose_loop(args: Args) -> None:
    """Dumps are trained on without engines; generation alone and training alone exclude each other."""
    if args.load_debug_rollout_data is not None and args.debug_rollout_only:
        raise ArgumentError(
            "--load-debug-rollout-data trains on dumps and --debug-rollout-only starts no trainer; leave one out"
        )
    if args.load_debug_rollout_data is not None:
        args.debug_train_only = True
    if args.debug_rollout_only and args.debug_train_only:
        raise ArgumentError(
            "--debug-rollout-only and --debug-train-only exclude each other; leave both out for the whole loop"
        )
    if args.debug_rollout_only and args.check_weight_update_equal:
        raise ArgumentError(
            "--check-weight-update-equal overwrites the engines' weights before the first sync, and with "
            "--debug-rollout-only there is none; leave one out"
        )
    generates = args.rollout_function_path in GENERATE_WITH_ENGINES and not args.log_probs_only
    if args.debug_train_only and args.load_debug_rollout_data is None and generates:
        diagnostics.warn(
            args,
            f"--debug-train-only starts no engines, with which {args.rollout_function_path} generates: give "
            "--load-debug-rollout-data, or a --rollout-function-path that needs none",
        )


def check_replay(args: Args) -> None:
    """The first dump must be there, and should not be the only one."""
    template = args.load_debug_rollout_data
    if template is None:
        return
    if "{rollout_id}" not in template and args.num_rollout != 1:
        diagnostics.warn(
            args, f"--load-debug-rollout-data {template} has no {{rollout_id}} in it: every rollout trains on that dump"
        )
    if args.start_rollout_id is None:
        return  # the checkpoint says where to start
    first = template.format(rollout_id=args.start_rollout_id)
    if args.num_rollout != 0 and not Path(first).is_file():
        diagnostics.unavailable(
            args, f"--load-debug-rollout-data {template}: the first dump would be {first}, and there is no such file"
        )


def check_templates(args: Args) -> None:
    """Refuse templates that cannot be filled in, and those whose files would overwrite each other."""
    for flag in flags_where(lambda traits: traits.template):
        attribute, form = flag.dest, flag.traits.template
        template = getattr(args, attribute)
        if template is None or form is None:
            continue
        known, needed, example = form.names, form.needed, form.example
        given = f"{flag.option} {template}"
        try:
            found = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        except ValueError as error:
            raise ArgumentError(f"{given}: {error}; write for example {example}") from error
        unknown = [name for name in found if name not in known]
        if unknown:
            raise ArgumentError(
                f"{given}: {{{unknown[0]}}} is nothing that can be filled in; there is "
                f"{' and '.join(f'{{{name}}}' for name in known)}, for example {example}"
            )
        if attribute == "ci_save_grad_norm" and estimator_of(args).needs_critic:
            needed = (*needed, "role")
        if _makes_one_step(args):
            needed = tuple(name for name in needed if name != "step_id")
        # One rollout overwrites nothing, but evaluations are dumped to the path of rollouts too.
        if args.num_rollout == 1 and (attribute != "save_debug_rollout_data" or args.eval_interval is None):
            needed = tuple(name for name in needed if name != "rollout_id")
        absent = [name for name in needed if name not in found]
        if absent:
            every = {"rollout_id": "rollout", "step_id": "step", "role": "role"}[absent[0]]
            raise ArgumentError(
                f"{given} has no {{{absent[0]}}} in it, so every {every} would overwrite the last one; "
                f"write for example {example}"
            )


def _makes_one_step(args: Args) -> bool:
    """True when every rollout makes one optimizer step."""
    if args.num_steps_per_rollout is not None:
        return bool(args.num_steps_per_rollout == 1)
    return bool(args.global_batch_size == args.rollout_batch_size * args.n_samples_per_prompt)


def check_profiling(args: Args) -> None:
    """Refuse windows that hold nothing and records that never end."""
    start, end = args.profile_step_start, args.profile_step_end
    if args.use_pytorch_profiler and end <= start:
        raise ArgumentError(
            f"--profile-step-start {start} and --profile-step-end {end}: expected an end above the start; rollouts "
            "from the first to before the second are profiled"
        )
    if args.use_pytorch_profiler and args.num_rollout is not None and start >= args.num_rollout:
        diagnostics.warn(
            args,
            f"--profile-step-start {start} is not reached by --num-rollout {args.num_rollout}: nothing is profiled",
        )
    if args.record_memory_history and args.memory_recorder == "memray" and args.memory_snapshot_num_steps is None:
        raise ArgumentError(
            "--memory-recorder memray writes until it is stopped, many times the size of the run's memory; say after "
            "how many rollouts with --memory-snapshot-num-steps"
        )


OF_THE_LOOP = (
    Environments, Data, Eval, Reward, Algorithm, OffPolicy, WeightSync, FaultTolerance, ElasticEngines,
    ExternalEngines, Distillation, Profiling, ContinuousIntegration,
)  # fmt: skip
"""The flags that the log-prob server does not read, and of ``Rollout`` those that trainers do not."""


def choose_serving(args: Args) -> None:
    """Set ``args.serve_only`` and, where it is true, what the command line may leave out.

    It is true for ``slime serve``, and ``--debug-rollout-only`` without prompts: engines for whoever asks, no rollouts.

    Flags about training, prompts and rollouts have no effect then, so that those of a run may be given as they are.
    """
    args.serve_only = getattr(args, "serve_only", False) or _makes_no_rollouts(args)
    if not args.serve_only:
        return
    args.debug_rollout_only = args.use_fault_tolerance = True
    args.num_rollout = 0
    diagnostics.missing_flags(args).pop("rollout_batch_size", None)
    if args.sglang_config is not None:
        # A deployment file says how many slots there are, and may name every checkpoint.
        config, _ = read(args.sglang_config)
        if args.rollout_num_gpus is None:
            args.rollout_num_gpus = config.total_num_gpus
        paths = [model.model_path for model in config.models if model.model_path]
        if "hf_checkpoint" in diagnostics.missing_flags(args) and len(paths) == len(config.models):
            del diagnostics.missing_flags(args)["hf_checkpoint"]
            args.hf_checkpoint = paths[0]
    elif args.rollout_num_gpus is None and not args.colocate and args.prefill_num_servers is None:
        args.rollout_num_gpus = args.rollout_num_gpus_per_engine


def choose_log_probs(args: Args) -> None:
    """Set what the log-prob server needs: ranks with weights alone, and no loop.

    Flags about training, prompts and rollouts have no effect then, so that those of a run may be given as they are.
    """
    if not args.log_probs_only:
        return
    of_sampling = [flag for flag in flags_of(Rollout) if flag.traits.read_by != "trainers"]
    for flag in itertools.chain(of_sampling, *map(flags_of, OF_THE_LOOP)):
        setattr(args, flag.dest, copy.copy(flag.default))
    args.debug_train_only = args.no_load_optim = args.no_load_rng = True
    args.debug_rollout_only = args.colocate = args.offload_train = args.offload = args.release_train = False
    args.use_wandb = args.use_tensorboard = args.enable_mtp_training = False
    args.save = args.save_interval = args.save_hf = args.load_debug_rollout_data = args.sglang_config = None
    args.num_rollout, args.n_samples_per_prompt = 0, 1
    args.rollout_batch_size = args.global_batch_size = (
        args.actor_num_nodes * args.actor_num_gpus_per_node * (args.micro_batch_size or 1)
    )
    diagnostics.missing_flags(args).pop("rollout_batch_size", None)
    if "teacher_warmup_port" not in args.explicit_flags:
        args.teacher_warmup_port = args.teacher_port


def _makes_no_rollouts(args: Args) -> bool:
    """Return True for ``--debug-rollout-only`` where no flag says what would be generated, or how much of it."""
    says_what = args.prompt_data is not None or not args.rollout_global_dataset or args.eval_interval is not None
    says_how_much = args.num_rollout is not None or args.num_epoch is not None
    own_source = not args.data_source_path.startswith(BUILT_IN_SOURCES)
    own_rollout = args.rollout_function_path not in GENERATE_WITH_ENGINES
    return bool(args.debug_rollout_only) and not (says_what or says_how_much or own_source or own_rollout)
