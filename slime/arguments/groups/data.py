"""Prompts, batches and how they are cut into micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.arguments.group import ArgumentGroup, DottedPath, flag
from slime.arguments.groups.rollout import GENERATE_WITH_ENGINES
from slime.arguments.traits import Contract, Needs

if TYPE_CHECKING:
    from slime.arguments.args import Args


def _renders_otherwise(args: Args) -> bool:
    """True when a data set, the user's generate function or their rollout may render prompts."""
    own = args.custom_generate_function_path is not None or args.rollout_function_path not in GENERATE_WITH_ENGINES
    return own or any(dataset.apply_chat_template for dataset in args.eval_datasets)


class Data(ArgumentGroup):
    """Prompt data."""

    title = "data"
    read_by = "run"

    num_rollout: int | None = flag(
        None,
        "rollouts of the whole run (or give --num-epoch); 0 with --eval-interval evaluates once and ends",
        ge=0,
        same_for_roles="batches",
    )
    num_epoch: int | None = flag(
        None,
        "passes over the prompts (or give --num-rollout). With both, --num-rollout says how long the run is "
        "and this only where epochs end",
        ge=1,
        silenced_by=("--num-rollout",),
    )
    rollout_global_dataset: bool = flag(
        True,
        "do not read --prompt-data: the rollout function finds its own prompts, and their state is not saved",
        option="--disable-rollout-global-dataset",
    )
    data_source_path: DottedPath = flag(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        "dotted path of the data-source class",
        hook=Contract(
            "a class C(args) with get_samples(n), add_samples(groups), save(rollout_id), load(rollout_id=None) and "
            "__len__",
            1,
            methods=("get_samples",),
            what="a class",
        ),
        decides_generation=True,
    )
    prompt_data: str | None = flag(
        None,
        "file of prompts, .jsonl, .json or .parquet; FILE@[a:b] takes rows a to b",
        path="file",
        decides_generation=True,
    )
    apply_chat_template: bool = flag(
        False, "render the prompt, a list of messages, with the tokenizer's chat template", decides_generation=True
    )
    apply_chat_template_kwargs: dict[str, Any] = flag(
        {},
        'JSON object of extra arguments of --apply-chat-template, e.g. {"enable_thinking": false}',
        needs=Needs("--apply-chat-template", _renders_otherwise),
        silenced_by=("rollout without samples",),
        decides_generation=True,
    )
    input_key: str = flag(
        "input", "column of --prompt-data that holds the prompt: text, or a list of messages", decides_generation=True
    )
    label_key: str | None = flag(
        None, "column of --prompt-data that holds the label, for the reward; default: none", decides_generation=True
    )
    multimodal_keys: dict[str, str] | None = flag(
        None,
        'JSON object of media type -> column of --prompt-data, {"image": "images"}: the pictures of the <image>s in '
        "the prompt, in order; parts of messages may hold theirs. Images alone are available",
        decides_generation=True,
    )
    metadata_key: str = flag(
        "metadata", "column of --prompt-data that holds an object for sample.metadata", decides_generation=True
    )
    tool_key: str = flag(
        "tools", "column of --prompt-data that holds the list of tools for the chat template", decides_generation=True
    )
    start_rollout_id: int | None = flag(None, "first rollout id; default: the checkpoint's, else 0", ge=0)


class Batch(ArgumentGroup):
    """Batch sizes and micro-batches."""

    title = "batches"

    rollout_batch_size: int = flag(None, "prompts per rollout", required=True, ge=1, same_for_roles="batches")
    n_samples_per_prompt: int = flag(
        1,
        "responses to each of the --rollout-batch-size prompts (the size of a group)",
        ge=1,
        decides_generation=True,
        same_for_roles="batches",
    )
    global_batch_size: int | None = flag(
        None,
        "samples per optimizer step (or give --num-steps-per-rollout): --rollout-batch-size x "
        "--n-samples-per-prompt = this x steps",
        ge=1,
        same_for_roles="batches",
        resolved_by="parallelism",
    )
    num_steps_per_rollout: int | None = flag(
        None, "optimizer steps per rollout, from which --global-batch-size follows", ge=1, same_for_roles="batches"
    )
    micro_batch_size: int = flag(
        1,
        "samples per micro-batch on a data-parallel rank; without effect with --use-dynamic-batch-size",
        ge=1,
        same_for_roles="batches",
    )
    balance_data: bool = flag(
        False, "give data-parallel ranks micro-batches of about equal FLOPs; default: in turn", same_for_roles="batches"
    )
    balance_by_flops: bool = flag(
        False,
        "with --use-dynamic-batch-size, form micro-batches of about equal FLOPs too (the token limit may be exceeded)",
        same_for_roles="batches",
    )
    use_dynamic_batch_size: bool = flag(
        False,
        "pack micro-batches by tokens, up to --max-tokens-per-gpu, instead of by --micro-batch-size samples",
        same_for_roles="batches",
    )
    max_tokens_per_gpu: int | None = flag(
        None,
        "most tokens of a micro-batch per slot (a micro-batch has --context-parallel-size times as many), "
        "with --use-dynamic-batch-size",
        ge=1,
        needs="--use-dynamic-batch-size",
        same_for_roles="batches",
    )
    log_probs_max_tokens_per_gpu: int | None = flag(
        None,
        "the same for the log-prob pass, which uses the micro-batches of training: anything but "
        "--max-tokens-per-gpu has no effect",
        ge=1,
    )
