"""Flags that have no effect: another one silences them, or the one that they need is absent. Each is warned about.

What cannot be meant at all is refused where it belongs. These come from launch scripts of slime <= 0.3.1, which set
both flags without a word, and from those in which a block was switched off.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from slime.algorithms.estimators import WITH_CRITIC, Estimator, estimator_of
from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.command_line import flags_by_option, flags_where
from slime.arguments.errors import ArgumentError
from slime.arguments.files.eval_config import own_path
from slime.arguments.groups.rollout import DEFAULT_ROLLOUT, FULLY_ASYNC_ROLLOUT, GENERATE_WITH_ENGINES
from slime.arguments.rules.debug import FORGE_ROLLOUT
from slime.arguments.rules.loop import SFT_ROLLOUT
from slime.arguments.rules.rollout import ENVIRONMENT_GENERATE, ROLLOUT_BUFFER_ROLLOUTS
from slime.arguments.traits import Needs, Silencer

SLEEP_ROLLOUT = "slime.rollout.sleep_rollout.sleep"
READS_NO_HOOKS = (SFT_ROLLOUT, FORGE_ROLLOUT, SLEEP_ROLLOUT, *ROLLOUT_BUFFER_ROLLOUTS)
"""Rollout functions of slime's own that read none of the flags about generation and filters."""
ANY_RUN = 1_000_000_000


def _path(option: str, args: Args) -> str:
    return f"{option} {getattr(args, option[2:].replace('-', '_'))}"


def _rollout_without_hooks(args: Args) -> str | None:
    return _path("--rollout-function-path", args) if args.rollout_function_path in READS_NO_HOOKS else None


def _rollout_without_samples(args: Args) -> str | None:
    """Evaluations generate and score for every source of rollouts."""
    return None if args.eval_interval is not None else _rollout_without_hooks(args)


def _own_rollout(args: Args) -> str | None:
    if args.rollout_function_path in (*GENERATE_WITH_ENGINES, *READS_NO_HOOKS):
        return None
    return f"{_path('--rollout-function-path', args)}, unless that function reads it"


def _episodes(args: Args) -> str | None:
    """Every sample is an episode, whose steps give the reward."""
    if args.group_rm:
        return None
    of_run = args.custom_generate_function_path
    own = [own_path(dataset, "custom_generate_function_path") for dataset in args.eval_datasets]
    if not all(path == ENVIRONMENT_GENERATE for path in (of_run, *(of_run if p is None else p for p in own))):
        return None
    return f"{_path('--custom-generate-function-path', args)}, whose environments give the rewards"


def _conversion(args: Args) -> str | None:
    if args.custom_convert_samples_to_train_data_path is None:
        return None
    return f"{_path('--custom-convert-samples-to-train-data-path', args)}, unless that function reads it"


def _post_process(args: Args) -> str | None:
    if args.custom_reward_post_process_path is None:
        return None
    return f"{_path('--custom-reward-post-process-path', args)}, unless that function reads it"


def _custom_advantages(args: Args) -> str | None:
    if args.custom_advantage_function_path is None:
        return None
    return f"{_path('--custom-advantage-function-path', args)}, unless that function reads it"


def _estimator_without(part: Callable[[Estimator], object]) -> Callable[[Args], str | None]:
    def by(args: Args) -> str | None:
        without = not part(estimator_of(args)) and args.custom_advantage_function_path is None
        return _path("--advantage-estimator", args) if without else None

    return by


def _nothing_is_left_over(args: Args) -> str | None:
    """A rollout that submits no more groups than it takes has none to stop."""
    more = args.over_sampling_batch_size > args.rollout_batch_size or args.dynamic_sampling_filter_path is not None
    if args.rollout_function_path != DEFAULT_ROLLOUT or more:
        return None
    return (
        f"--rollout-batch-size {args.rollout_batch_size}: every group that is submitted is waited for, none is left to "
        "be continued; give a larger --over-sampling-batch-size"
    )


def _replay(args: Args) -> str | None:
    if args.load_debug_rollout_data is None:
        return None
    return f"{_path('--load-debug-rollout-data', args)}, whose samples are generated, filtered and scored already"


def _when(present: Callable[[Args], object], words: str) -> Callable[[Args], str | None]:
    return lambda args: words if present(args) else None


SILENCERS: dict[Silencer, Callable[[Args], str | None]] = {
    "rollout without hooks": _rollout_without_hooks,
    "rollout without samples": _rollout_without_samples,
    "own rollout": _own_rollout,
    "fully asynchronous": _when(
        lambda args: args.rollout_function_path == FULLY_ASYNC_ROLLOUT, f"--rollout-function-path {FULLY_ASYNC_ROLLOUT}"
    ),
    "nothing left over": _nothing_is_left_over,
    "episodes": _episodes,
    "replay": _replay,
    "no engines": _when(lambda args: args.debug_train_only, "--debug-train-only, which starts no engines"),
    "no trainer": _when(
        lambda args: args.debug_rollout_only and not args.serve_only, "--debug-rollout-only: nothing is trained"
    ),
    "--eval-config": _when(lambda args: args.eval_config is not None, "--eval-config, which wins"),
    "no data set": _when(lambda args: not args.rollout_global_dataset, "--disable-rollout-global-dataset"),
    "--num-rollout": _when(
        lambda args: args.num_rollout is not None,
        "--num-rollout, which says how long the run is (epochs still end as --num-epoch counts them)",
    ),
    "own conversion": _conversion,
    "own post-processing": _post_process,
    "own advantages": _custom_advantages,
    "no discount": _estimator_without(lambda estimator: estimator.discounted),
    "no baseline": _estimator_without(lambda estimator: estimator.baseline),
    "no scaling": _estimator_without(lambda estimator: estimator.scale_by_std),
    "sft_loss": _when(lambda args: args.loss_type == "sft_loss", "--loss-type sft_loss"),
    "own reward": _when(
        lambda args: args.custom_rm_path is not None and not args.eval_datasets,
        "--custom-rm-path: they concern built-in rewards",
    ),
}
"""By what the traits of flags name: what silences them, as words for the message, or None where nothing does."""


def check(args: Args) -> None:
    """Warn of every flag that is given and silenced; refuse a run of a critic alone that has none."""
    _check_critic_alone(args)
    given: frozenset[str] = args.explicit_flags
    flags = [flag for flag in flags_where(lambda traits: traits.silenced_by) if flag.dest in given]
    flags = [flag for flag in flags if getattr(args, flag.dest) != flag.default]
    said: set[str] = set()
    for silencer, by in SILENCERS.items():
        found = [flag for flag in flags if silencer in flag.traits.silenced_by and flag.dest not in said]
        if found and (words := by(args)) is not None:
            said.update(flag.dest for flag in found)
            options = " and ".join(flag.option for flag in found)
            diagnostics.warn(args, f"{options} {'has' if len(found) == 1 else 'have'} no effect beside {words}")


def _check_critic_alone(args: Args) -> None:
    """``--critic-train-only`` of slime <= 0.3.1 means more critic-only steps than any run has."""
    steps = args.num_critic_only_steps
    if args.use_critic or not args.num_rollout or steps < args.num_rollout:
        return
    given = f"--num-critic-only-steps {steps}" if steps < ANY_RUN else "--critic-train-only"
    diagnostics.not_available(
        args,
        f"{given} trains the critic alone, and with --advantage-estimator {args.advantage_estimator} there is none: "
        f"the actor would be trained instead; give --advantage-estimator {WITH_CRITIC}, or leave it out",
    )


def is_present(args: Args, needed: str | Needs) -> bool:
    """True when ``args`` have what a flag needs: ``--a``, ``--a value`` or several, with ``or`` between them."""
    if isinstance(needed, Needs):  # of a program that is no option, the condition alone
        return bool(needed.or_else(args)) or (needed.option.startswith("--") and is_present(args, needed.option))
    option = ""
    for words in needed.split(" or "):
        option, _, value = words.partition(" ") if words.startswith("--") else (option, "", words)
        found = getattr(args, flags_by_option()[option].dest)
        if str(found) == value if value else found not in (None, False, 0):
            return True
    return False


def check_needs(args: Args) -> None:
    """Warn of flags given without the one they belong to; refuse trackers that have no place to write to."""
    given: frozenset[str] = args.explicit_flags
    alone: dict[str, list[str]] = {}
    for flag in flags_where(lambda traits: traits.needs):
        needed = flag.traits.needs
        if needed and flag.dest in given and getattr(args, flag.dest) != flag.default and not is_present(args, needed):
            alone.setdefault(needed.option if isinstance(needed, Needs) else needed, []).append(flag.option)
    for needed, options in alone.items():
        verb = "has" if len(options) == 1 else "have"
        diagnostics.warn(args, f"{' and '.join(options)} {verb} no effect without {needed}")
    if "micro_batch_size" in given and args.micro_batch_size != 1 and args.use_dynamic_batch_size:
        diagnostics.warn(
            args, f"--micro-batch-size {args.micro_batch_size} has no effect with --use-dynamic-batch-size"
        )
    if args.use_tensorboard and args.tb_project_name is None and not os.environ.get("TENSORBOARD_DIR"):
        raise ArgumentError(
            "--use-tensorboard needs --tb-project-name NAME or the environment variable TENSORBOARD_DIR"
        )
