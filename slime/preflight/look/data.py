"""Looking at the first rows of every prompt file, and at some of the others."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.arguments.args import Args
from slime.arguments.files.eval_config import own_path
from slime.arguments.groups.rollout import GENERATE_WITH_ENGINES
from slime.arguments.rules.data import BUILT_IN_SOURCES
from slime.arguments.rules.loop import ENVIRONMENT_GENERATE, SFT_ROLLOUT
from slime.preflight.look import Findings
from slime.preflight.look.checkpoint import look_at_tokenizer_files, look_at_vocabulary
from slime.utils.chat_messages import check_messages
from slime.utils.data import Dataset
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.prompt_files import parse_line, read_file, split_slice
from slime.utils.types import Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FIRST_ROWS = 64
OTHER_ROWS = 64
_CHUNK = 1 << 20


@dataclass(frozen=True)
class PromptFile:
    """A file and how the run reads it. ``flag`` names it in messages; ``rendered``: its prompts become text;
    ``optional``: environments make prompts where rows have none; ``dataset``: of an evaluation."""

    flag: str
    path: str
    columns: dict[str, str | None]
    apply_chat_template: bool
    template_kwargs: Mapping[str, Any] | None
    multimodal_keys: Mapping[str, str] | None
    max_prompt_len: int | None
    generated: bool
    optional: bool
    dataset: Any = None

    def __str__(self) -> str:
        return f"{self.flag} {self.path}"


def look_at_data(args: Args, dry_run: bool, found: Findings) -> dict[str, Sample]:
    """Report what is wrong with the prompts; return the first sample of each good file, by its flag."""
    files = [file for file in prompt_files(args) if os.path.exists(split_slice(file.path)[0])]
    good = [file for file in files if _look_at_rows(file, found)]
    if not good:
        return {}
    found.begins(f"the tokenizer of --hf-checkpoint {args.hf_checkpoint}")
    if not look_at_tokenizer_files(args, found):
        return {}
    trust = {"trust_remote_code": args.trust_remote_code}
    # A dry run needs no network: of a model that is named by its repository it reads what was fetched before.
    local = {"local_files_only": True} if dry_run else {}
    try:
        tokenizer = load_tokenizer(args.hf_checkpoint, **trust, **local)
    except (ValueError, ImportError) as e:
        if dry_run:
            found.unchecked.append(f"chat template and lengths of prompts: {str(e).partition(': ')[0]}")
        else:
            found.errors.append(str(e))
        return {}
    look_at_vocabulary(args, tokenizer, found)
    samples = {}
    for file in good:
        if file.dataset is None:
            _look_at_variety(args, file, found)
        found.begins(f"the chat template on {file}")
        if first := _look_at_prompts(args, file, tokenizer, trust, found):
            samples[file.flag] = first
    return samples


def prompt_files(args: Args) -> Iterator[PromptFile]:
    """Yield the files that the built-in data sources and the built-in evaluation are going to read."""
    replays = args.load_debug_rollout_data is not None
    draws = args.rollout_global_dataset and args.num_rollout != 0 and not replays
    generated = args.custom_generate_function_path is None and args.rollout_function_path in GENERATE_WITH_ENGINES
    multimodal = args.multimodal_keys
    if draws and args.prompt_data and args.data_source_path.startswith(BUILT_IN_SOURCES):
        columns = {f"--{name}-key": getattr(args, f"{name}_key") for name in ("input", "label", "tool")}
        yield PromptFile(
            "--prompt-data", args.prompt_data, {**columns, "metadata": args.metadata_key}, args.apply_chat_template,
            args.apply_chat_template_kwargs, multimodal, args.rollout_max_prompt_len, generated,
            args.custom_generate_function_path == ENVIRONMENT_GENERATE,
        )  # fmt: skip
    evaluates = args.eval_interval is not None and not args.debug_train_only and not replays
    if not evaluates or args.eval_function_path not in GENERATE_WITH_ENGINES:
        return
    for one in args.eval_datasets:
        keys = {"input": one.input_key, "label": one.label_key, "tool": one.tool_key}
        columns = {f"--eval-{name}-key": key for name, key in keys.items()}
        template, kwargs = one.apply_chat_template, one.apply_chat_template_kwargs
        own = own_path(one, "custom_generate_function_path")
        generate = (args.custom_generate_function_path if own is None else own) or None
        yield PromptFile(
            f"--eval-prompt-data {one.name}", one.path, {**columns, "metadata": one.metadata_key},
            args.apply_chat_template if template is None else template,
            args.apply_chat_template_kwargs if kwargs is None else kwargs,
            one.multimodal_keys or multimodal, args.eval_max_prompt_len, generate is None,
            generate == ENVIRONMENT_GENERATE, one,
        )  # fmt: skip


def _look_at_rows(file: PromptFile, found: Findings) -> bool:
    """Columns and types of the first rows and of some others; False, and an error, for the first that is wrong."""
    found.begins(f"the rows of {file}")
    number = 0
    try:
        for number, row in enumerate(read_file(first_rows(file.path)), 1):
            if problem := _row_problem(file, row):
                found.errors.append(f"{file} row {number - 1}: {problem}")
                return False
    except Exception as e:  # noqa: BLE001  (a file can be broken in every way)
        found.errors.append(f"{file}: after {number} good rows: {type(e).__name__}: {e}")
        return False
    if number == 0:
        found.errors.append(f"{file} holds no row")
        return False
    path = split_slice(file.path)[0]
    if path.endswith(".jsonl") and (bad := _skipped_line(path)):
        found.warnings.append(f"{file} line {bad[0]} is no JSON and is skipped: {bad[1]}")
    if number == FIRST_ROWS and file.path.endswith(".jsonl"):
        return _look_at_other_rows(file, found)
    return True


def _look_at_other_rows(file: PromptFile, found: Findings) -> bool:
    """Rows at even distances through a JSON-lines file, without reading what lies between."""
    size = os.path.getsize(file.path)
    with open(file.path, "rb") as lines:
        for part in range(1, OTHER_ROWS + 1):
            lines.seek(size * part // (OTHER_ROWS + 1))
            lines.readline()  # the rest of a row
            place = lines.tell()
            if not (line := lines.readline().strip()):
                continue
            try:
                row = parse_line(line, 2)
            except ValueError as e:
                found.warnings.append(f"{file} line {_line_number(file.path, place)} is no JSON and is skipped: {e}")
                continue
            if problem := _row_problem(file, row):
                found.errors.append(f"{file} line {_line_number(file.path, place)}: {problem}")
                return False
    return True


def _row_problem(file: PromptFile, row: Mapping[str, Any]) -> str | None:
    for flag, key in file.columns.items():
        if key and flag.endswith(("label-key",) if file.optional else ("input-key", "label-key")) and key not in row:
            return f"there is no column {flag} {key}; the row has {', '.join(sorted(row))}"
    option, key = next(iter(file.columns.items()))
    prompt: Any = row.get(key or "")
    if hasattr(prompt, "tolist"):
        prompt = prompt.tolist()
    if isinstance(prompt, str) or (prompt is None and file.optional):
        return None
    if not isinstance(prompt, list) or not all(isinstance(m, Mapping) and "role" in m for m in prompt):
        return (
            f"column {option} {key} holds {type(prompt).__name__} {prompt!r:.60}; expected a string or a list of chat "
            "messages, each with role and content"
        )
    if file.generated and not file.apply_chat_template:
        return f"column {option} {key} holds chat messages, which engines do not take; add --apply-chat-template"
    return None


def _look_at_prompts(
    args: Args, file: PromptFile, tokenizer: PreTrainedTokenizerBase, trust: dict[str, Any], found: Findings
) -> Sample | None:
    """Render the first rows as the run does and look at their lengths; return the first sample."""
    keys: list[Any] = [*file.columns.values()]
    prompt_key, label_key, tool_key, metadata_key = keys
    try:
        pixels = {"backend": args.sglang_image_processor_backend}
        media = bool(file.multimodal_keys)
        samples = Dataset(
            first_rows(file.path), tokenizer, load_processor(args.hf_checkpoint, **pixels, **trust) if media else None,
            None, multimodal_keys=file.multimodal_keys, apply_chat_template=file.apply_chat_template,
            apply_chat_template_kwargs=file.template_kwargs, prompts_are_optional=file.optional,
            prompt_key=prompt_key, label_key=label_key, tool_key=tool_key, metadata_key=metadata_key,
        ).samples  # fmt: skip
    except Exception as e:  # noqa: BLE001  (templates raise what they like)
        found.errors.append(f"{file}: {type(e).__name__}: {e}")
        return None
    if file.dataset is None and args.rollout_function_path == SFT_ROLLOUT:
        _look_at_conversations(args, file, tokenizer, samples, found)
    elif not file.multimodal_keys:
        _look_at_lengths(args, file, tokenizer, [s.prompt for s in samples if isinstance(s.prompt, str)], found)
    first = samples[0]
    if file.dataset is not None:
        first.metadata = file.dataset.inject_metadata(first.metadata)
        first.custom_rm_path = own_path(file.dataset, "custom_rm_path")
        first.generate_function_path = own_path(file.dataset, "custom_generate_function_path")
    return first


def _look_at_variety(args: Args, file: PromptFile, found: Findings) -> None:
    """Warn of prompts that a rollout meets twice, and of those that hold their answer."""
    if not file.generated:
        return
    rows = itertools.islice(read_file(file.path), args.rollout_batch_size)
    prompts: list[Any] = [row.get(args.input_key) for row in rows]
    texts = [json.dumps(prompt.tolist() if hasattr(prompt, "tolist") else prompt, default=str) for prompt in prompts]
    if len(prompts) < args.rollout_batch_size:
        found.warnings.append(
            f"{file} has {len(prompts)} prompts and --rollout-batch-size is {args.rollout_batch_size}: a rollout has "
            "the same prompt in several groups"
        )
    elif (several := len(texts) - len(set(texts))) > len(texts) // 2:
        found.warnings.append(f"{file}: of the first {len(texts)} prompts {several} repeat an earlier one")
    ends = [text for text, prompt in zip(texts, prompts, strict=True) if _ends_with_an_answer(prompt)]
    if ends:
        found.warnings.append(
            f"{file}: {len(ends)} of the first {len(texts)} prompts end with a message of the assistant: the model "
            "sees the answer; leave that message out of the prompt, or use the SFT rollout to train on it"
        )


def _ends_with_an_answer(prompt: object) -> bool:
    last = prompt[-1] if isinstance(prompt, (list, tuple)) and len(prompt) else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def _look_at_lengths(
    args: Args, file: PromptFile, tokenizer: PreTrainedTokenizerBase, texts: list[str], found: Findings
) -> None:
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []
    if 0 in lengths and not file.optional:
        found.warnings.append(f"{file} row {lengths.index(0)}: the prompt is empty")
    limit = file.max_prompt_len
    dropped = [length for length in lengths if limit is not None and length > limit]
    if dropped:
        option = "--eval-max-prompt-len" if file.dataset is not None else "--rollout-max-prompt-len"
        found.warnings.append(
            f"{file}: of the first {len(lengths)} prompts {len(dropped)} are longer than {option} {limit} and are "
            f"dropped; the longest has {max(dropped)} tokens"
        )
    room = longest_sequence(args)
    too_long = [row for row, n in enumerate(lengths) if room is not None and n >= room and (not limit or n <= limit)]
    if too_long and file.generated:
        found.warnings.append(
            f"{file} row {too_long[0]}: the prompt has {lengths[too_long[0]]} tokens, and prompt and response together "
            f"may have {room}; {len(too_long)} of the first {len(lengths)} prompts leave no room for a response"
        )


def _look_at_conversations(
    args: Args, file: PromptFile, tokenizer: PreTrainedTokenizerBase, samples: list[Sample], found: Findings
) -> None:
    """Make the loss masks of the first rows; report the first that cannot be made."""
    from slime.utils.mask_utils import MultiTurnLossMaskGenerator

    generator = MultiTurnLossMaskGenerator(tokenizer, args.loss_mask_type)
    for row, sample in enumerate(samples):
        prompt: Any = sample.prompt
        if isinstance(prompt, str):
            found.errors.append(f"{file} row {row}: supervised fine-tuning needs chat messages as prompt, got a string")
            return
        try:
            check_messages(prompt, f"column {args.input_key!r}")
            tools, images = (sample.metadata or {}).get("tools"), (sample.multimodal_inputs or {}).get("images")
            _, mask = generator.get_loss_mask(prompt, tools=tools, with_images=bool(images))
        except Exception as e:  # noqa: BLE001  (templates raise what they like)
            found.errors.append(f"{file} row {row}: {type(e).__name__}: {e}")
            return
        if not any(mask):
            found.errors.append(f"{file} row {row} trains no token: it has no assistant message, or all are masked")
            return


def longest_sequence(args: Args) -> int | None:
    """Return how many tokens prompt and response may have together, as far as flags or the checkpoint limit it."""
    given = [n for n in (args.rollout_max_context_len, args.sglang_context_length) if n]
    if given:
        return int(min(given))
    try:
        config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    config = config.get("text_config", config)
    positions, scaling = config.get("max_position_embeddings"), config.get("rope_scaling") or {}
    return positions if isinstance(positions, int) and "factor" not in scaling else None


def first_rows(path: str) -> str:
    """Return ``path`` with a slice of its first rows; one that counts from the end is taken as it is."""
    file, rows = split_slice(path)
    start, stop = (0, None) if rows is None else (rows.start or 0, rows.stop)
    if start < 0 or (stop is not None and stop < 0):
        return path
    return f"{file}@[{start}:{start + FIRST_ROWS if stop is None else min(start + FIRST_ROWS, stop)}]"


def _skipped_line(path: str) -> tuple[int, ValueError] | None:
    """The first of the first lines that the reader leaves out, and why."""
    with open(path, "rb") as lines:
        for number, line in enumerate(itertools.islice(lines, FIRST_ROWS), 1):
            try:
                parse_line(line if line.strip() else b"{}", number)
            except ValueError as e:
                return number, e
    return None


def _line_number(path: str, place: int) -> int:
    """The number, from 1, of the line that begins at byte ``place``."""
    number, left = 1, place
    with open(path, "rb") as file:
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            number += chunk.count(b"\n")
            left -= len(chunk)
    return number
