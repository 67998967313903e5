"""Generation and rewards: sampling, lengths, the length of the run, environments, where rewards come from."""

from __future__ import annotations

import importlib.util

from slime.algorithms.reward_types import BOXED, REWARD_TYPES, reward_type
from slime.arguments import diagnostics
from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.files.environments import environments_of
from slime.arguments.groups.rollout import GENERATE_WITH_ENGINES
from slime.arguments.rules.data import check_file
from slime.arguments.rules.loop import ENVIRONMENT_GENERATE, SFT_ROLLOUT

ROLLOUT_BUFFER_ROLLOUTS = (
    "slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout",
    "slime.rollout.agent_rollout.generate_rollout",
)
NONZERO_STD_FILTER = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
ENVIRONMENT_DATA_SOURCE = "slime.rollout.environments.EnvironmentDataSource"


def check(args: Args) -> None:
    """Over-sampling, lengths, length of the run, and rollout functions that need certain flags."""
    _check_sampling(args)
    _check_lengths(args)
    _check_run_length(args)
    _check_buffer(args)
    if args.rollout_function_path == SFT_ROLLOUT:
        _check_sft(args)
    if args.rollout_function_path in ROLLOUT_BUFFER_ROLLOUTS:
        _check_rollout_buffer(args)


def _check_rollout_buffer(args: Args) -> None:
    path = args.rollout_function_path
    if args.rollout_buffer_url is None:
        raise ArgumentError(
            f"--rollout-function-path {path} needs --rollout-buffer-url, the address of the rollout buffer, "
            "for example http://127.0.0.1:8889"
        )
    if args.eval_interval is not None and args.eval_function_path in (None, path):
        raise ArgumentError(
            f"--rollout-function-path {path} makes no evaluations; give --eval-function-path "
            "slime.rollout.sglang_rollout.generate_rollout, or leave out --eval-interval"
        )


def _check_sampling(args: Args) -> None:
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    if args.over_sampling_batch_size < args.rollout_batch_size:
        raise ArgumentError(
            f"--over-sampling-batch-size {args.over_sampling_batch_size} is below "
            f"--rollout-batch-size {args.rollout_batch_size}; raise it or leave it out"
        )
    if args.rollout_top_k != -1 and args.rollout_top_k < 1:
        raise ArgumentError(f"--rollout-top-k {args.rollout_top_k}: give a number of tokens, or -1 for all")
    if args.dynamic_sampling_filter_path == NONZERO_STD_FILTER and args.n_samples_per_prompt == 1:
        raise ArgumentError(
            f"--dynamic-sampling-filter-path {NONZERO_STD_FILTER} drops groups whose rewards are all equal, which "
            "holds for every group of --n-samples-per-prompt 1; generate more samples per prompt or leave it out"
        )


def _check_lengths(args: Args) -> None:
    context, engine = args.rollout_max_context_len, args.sglang_context_length
    if context is not None:
        if args.rollout_max_prompt_len is None:
            args.rollout_max_prompt_len = context - 1
        if args.rollout_max_prompt_len > context - 1:
            raise ArgumentError(
                f"--rollout-max-prompt-len {args.rollout_max_prompt_len} leaves no token to generate within "
                f"--rollout-max-context-len {context}; at most {context - 1}"
            )
        if engine is not None and context > engine and not args.debug_train_only:
            raise ArgumentError(
                f"--rollout-max-context-len {context} is above --sglang-context-length {engine}, the longest sequence "
                "an engine takes; lower the one or raise the other"
            )
    response = args.rollout_max_response_len
    generates = args.rollout_function_path in GENERATE_WITH_ENGINES and args.custom_generate_function_path is None
    if response is None and context is None and generates and not args.debug_train_only and args.num_rollout != 0:
        diagnostics.missing_flag(
            args,
            "rollout_max_response_len",
            "how long may a response get? Give --rollout-max-response-len, or --rollout-max-context-len for prompt and "
            "response together",
        )
    if response is not None and engine is not None and response >= engine and not args.debug_train_only:
        raise ArgumentError(
            f"--rollout-max-response-len {response} leaves no room for a prompt within --sglang-context-length "
            f"{engine}; lower the one or raise the other"
        )


def _check_run_length(args: Args) -> None:
    if args.num_rollout is None and args.num_epoch is None:
        diagnostics.missing_flag(
            args, "num_rollout", "how long is the run? Give --num-rollout or --num-epoch", stand_in=1
        )
    if args.num_rollout is None and not args.rollout_global_dataset:
        raise ArgumentError(
            "--num-epoch counts passes over the prompts, of which --disable-rollout-global-dataset has none; "
            "give --num-rollout"
        )
    if args.num_rollout == 0 and args.eval_interval is None and not (args.serve_only or args.log_probs_only):
        diagnostics.warn(args, "--num-rollout 0 without --eval-interval: nothing is trained and nothing evaluated")
    start = args.start_rollout_id
    if start and args.num_rollout and start >= args.num_rollout:
        raise ArgumentError(
            f"--start-rollout-id {start} is not below --num-rollout {args.num_rollout}: nothing would be left to do "
            f"(rollouts are numbered 0 to {args.num_rollout - 1}); raise --num-rollout or leave it out"
        )


def _check_buffer(args: Args) -> None:
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        raise ArgumentError("--mask-offpolicy-in-partial-rollout needs --partial-rollout; add it")
    if args.data_source_path != "slime.rollout.data_source.RolloutDataSource":
        return
    for name in ("partial_rollout", "buffer_filter_path"):
        if getattr(args, name):
            raise ArgumentError(
                f"--{name.replace('_', '-')} puts groups back into a buffer, which --data-source-path "
                f"{args.data_source_path} has not; use slime.rollout.data_source.RolloutDataSourceWithBuffer"
            )


def _check_sft(args: Args) -> None:
    if args.n_samples_per_prompt != 1:
        raise ArgumentError(
            f"--rollout-function-path {SFT_ROLLOUT} takes every conversation once and needs --n-samples-per-prompt 1, "
            f"not {args.n_samples_per_prompt}"
        )
    if args.apply_chat_template:
        raise ArgumentError(
            f"--apply-chat-template turns messages into text, but --rollout-function-path {SFT_ROLLOUT} builds its "
            "loss mask from messages; leave --apply-chat-template out"
        )
    if not args.debug_train_only:
        diagnostics.warn(
            args, f"--rollout-function-path {SFT_ROLLOUT} needs no engines: with --debug-train-only none is started"
        )


FEWEST_MASK_TOKENS = 4
"""Half of it is the least top-k under which anything is sampled."""


def check_top_p(args: Args) -> None:
    """Refuse with ``--rollout-top-p`` below 1 what SGLang reports no top-p masks with: it would refuse every request.

    Of engines that run elsewhere only they know.
    """
    if args.rollout_top_p == 1.0:
        return
    option = f"--rollout-top-p {args.rollout_top_p}"
    if args.rollout_function_path == SFT_ROLLOUT:
        raise ArgumentError(f"{option} has no meaning for {SFT_ROLLOUT}, which samples nothing; leave it out")
    if args.debug_train_only or args.rollout_external:
        return
    largest = args.sglang_sampling_mask_max_tokens
    if largest is None:
        raise ArgumentError(
            f"{option}: the trainer must know which tokens each one was sampled among, and the installed SGLang does "
            "not report that (it has no --sampling-mask-max-tokens); install 0.5.20, or leave --rollout-top-p out"
        )
    if args.rollout_top_k == -1 and largest < FEWEST_MASK_TOKENS:
        raise ArgumentError(
            f"--sglang-sampling-mask-max-tokens {largest}: with {option} training requests sample among at most half "
            f"as many tokens, which leaves no choice; give at least {FEWEST_MASK_TOKENS} (SGLang's own is 4096), or a "
            "--rollout-top-k"
        )
    if args.rollout_top_k > largest:
        raise ArgumentError(
            f"--rollout-top-k {args.rollout_top_k}: with {option} engines report the tokens that each one was sampled "
            f"among, at most --sglang-sampling-mask-max-tokens {largest}; lower the one or raise the other"
        )
    for name, value in (("speculative_algorithm", None), ("sampling_backend", "ascend")):
        given = getattr(args, f"sglang_{name}", None)
        if given is not None and value in (None, given):
            raise ArgumentError(
                f"{option}: SGLang answers no request for the tokens that each one was sampled among with "
                f"--sglang-{name.replace('_', '-')} {given}, whatever its other flags; leave one of them out"
            )


DISTILLATION = "slime.rollout.on_policy_distillation"


def check_reward(args: Args) -> None:
    """A built-in reward must be known and complete; no reward at all is worth a warning."""
    _check_data_sets(args)
    if args.custom_rm_path is not None:
        _check_distillation(args)
        if args.rm_type is not None:
            diagnostics.warn(
                args,
                f"--rm-type {args.rm_type} has no effect beside --custom-rm-path {args.custom_rm_path}, which scores "
                "every sample; leave one of them out, unless that function reads args.rm_type",
            )
        return
    if args.rm_type is None:
        _warn_of_none(args)
        return
    _check_type(args, "--rm-type ", args.rm_type)
    if args.custom_reward_post_process_path is None and args.custom_convert_samples_to_train_data_path is None:
        _check_key("--rm-type ", args.rm_type, "--reward-key", args.reward_key)


def _check_distillation(args: Args) -> None:
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


def _check_data_sets(args: Args) -> None:
    """The rewards of the built-in evaluation; a custom reward function may read any type."""
    if (args.eval_function_path or args.rollout_function_path) not in GENERATE_WITH_ENGINES:
        return
    for dataset in args.eval_datasets:
        if dataset.rm_type is not None and dataset.custom_rm_path is None:
            said = f"--eval-config {args.eval_config}: data set {dataset.name}: rm_type "
            _check_type(args, said, dataset.rm_type)
            _check_key(said, dataset.rm_type, "--eval-reward-key", args.eval_reward_key or args.reward_key)
            if args.custom_rm_path is not None:
                diagnostics.warn(
                    args,
                    f"{said}{dataset.rm_type} scores it, and not --custom-rm-path {args.custom_rm_path}: what a data "
                    "set says holds; give it this custom_rm_path where it is meant to be scored by that function",
                )


def _check_key(said: str, rm_type: str, flag: str, key: str | None) -> None:
    """Of a reward that is an object, a key has to say which number counts."""
    entry = reward_type(rm_type)
    numbers = () if entry is None else entry.numbers
    if numbers and key not in numbers:
        seen = "there is none" if key is None else f"{flag} is {key}"
        raise ArgumentError(
            f"{said}{rm_type} gives objects, and {flag} has to name the entry that is the reward, one of "
            f"{', '.join(numbers)}; {seen}. Give {flag} {numbers[0]}"
        )


def _check_type(args: Args, said: str, rm_type: str) -> None:
    entry = reward_type(rm_type)
    if entry is None:
        raise ArgumentError(f"{said}{rm_type}: expected one of {', '.join(REWARD_TYPES)}, or {BOXED} and one of them")
    if entry.module is not None and importlib.util.find_spec(entry.module) is None:
        diagnostics.unavailable(args, f"{said}{rm_type}: {entry.missing}")
    if entry.needs_url and args.rm_url is None:
        raise ArgumentError(f"{said}{entry.name} needs --rm-url, the address that answers with rewards")


def _warn_of_none(args: Args) -> None:
    """Samples may bring their own type, and custom functions their own rewards."""
    generates = args.rollout_function_path in GENERATE_WITH_ENGINES and not args.debug_train_only
    if generates and args.custom_generate_function_path is None and args.num_rollout != 0:
        diagnostics.warn(
            args,
            'no reward is chosen: unless every sample\'s metadata has "rm_type", the first rollout fails; give '
            "--rm-type or --custom-rm-path",
        )


def check_environments(args: Args) -> None:
    """Environments need the function that runs them, and it needs environments; both flags at once are ambiguous."""
    if args.environment_config is not None and args.environment_path:
        raise ArgumentError(
            f"--environment-config {args.environment_config} and --environment-path both name environments; list "
            "them in the file"
        )
    entries, paths = environments_of(args), args.environment_path or []
    if len(entries) < len(paths):
        raise ArgumentError(
            f"--environment-path {' '.join(paths)}: two classes have the same name; give them names "
            "in a file for --environment-config"
        )
    of_data_sets = [dataset.custom_generate_function_path for dataset in args.eval_datasets]
    runs = ENVIRONMENT_GENERATE in (args.custom_generate_function_path, *of_data_sets)
    if runs and not entries:
        raise ArgumentError(
            f"{ENVIRONMENT_GENERATE} needs environments; give --environment-path or --environment-config"
        )
    if args.data_source_path == ENVIRONMENT_DATA_SOURCE:
        if not entries:
            raise ArgumentError(
                f"--data-source-path {ENVIRONMENT_DATA_SOURCE} needs environments; give --environment-path or "
                "--environment-config"
            )
        if args.prompt_data is not None and args.rollout_global_dataset:
            check_file(args, f"--prompt-data {args.prompt_data}", args.prompt_data)
    if entries and not runs:
        option = "--environment-config" if args.environment_config is not None else "--environment-path"
        diagnostics.warn(args, f"{option} has no effect without --custom-generate-function-path {ENVIRONMENT_GENERATE}")
