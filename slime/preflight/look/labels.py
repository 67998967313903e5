"""Labels: one of each kind in a prompt file is graded against itself, as the best answer that a model could give."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.algorithms.reward_types import RewardType, reward_type
from slime.arguments.args import Args
from slime.preflight.look import Findings
from slime.preflight.look.data import PromptFile, first_rows, prompt_files
from slime.preflight.look.hooks import is_filled_in_later
from slime.rollout.rm_hub import rules
from slime.rollout.rm_hub.labels import accepted_answers
from slime.utils.data import read_file
from slime.utils.types import Sample

_LONG_ANSWER = 200
_THINKING_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "added_tokens.json")


def look_at_labels(args: Args, samples: Mapping[str, Sample], found: Findings) -> None:
    """Report labels with which every answer would get reward 0, for each file of ``samples`` that a rule grades."""
    if args.debug_train_only:
        return
    for file in prompt_files(args):
        first = samples.get(file.flag)
        if first is None or (args.custom_rm_path if first.custom_rm_path is None else first.custom_rm_path):
            continue
        if is_filled_in_later(args, first):
            continue
        found.begins(f"the labels of {file}")
        seen: set[tuple[Any, ...]] = set()
        for number, label, metadata in _labels(file):
            rule = reward_type(str(metadata.get("rm_type") or args.rm_type or ""))
            if rule is None or not rule.rule:
                continue
            key = (rule.name, _kind_of_label(label))
            if key in seen:
                continue
            if rule.name not in {name for name, _ in seen}:
                _look_at_rule(args, file, rule, first, found)
            seen.add(key)
            if not _look_at_label(f"{file} row {number}", file, rule, label, metadata, found):
                break


def _labels(file: PromptFile) -> Iterator[tuple[int, Any, dict[str, Any]]]:
    """Number, label and metadata of the first rows."""
    label_key = next(column for name, column in file.columns.items() if "label" in name)
    for number, row in enumerate(read_file(first_rows(file.path))):
        metadata = row.get(file.columns["metadata"] or "")
        metadata = metadata if isinstance(metadata, dict) else {}
        if file.dataset is not None:
            metadata = file.dataset.inject_metadata(metadata)
        yield number, None if label_key is None else row.get(label_key), metadata


def _kind_of_label(label: object) -> tuple[Any, ...]:
    text = str(label).strip()
    return type(label).__name__, text[:1] in "[{\"'", "####" in text, "\\boxed" in text, len(text) > _LONG_ANSWER


def _look_at_rule(args: Args, file: PromptFile, rule: RewardType, first: Sample, found: Findings) -> None:
    """Check the parts that do not depend on the label: a key for rewards that have none, reasoning without an end."""
    key = (args.eval_reward_key or args.reward_key) if file.dataset is not None else args.reward_key
    converted = args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path
    if not rule.numbers and key is not None and not converted:
        found.errors.append(
            f"{file}: --rm-type {rule.name} gives numbers; leave out --reward-key {key}, which names an entry"
        )
    if rule.after_reasoning and not _reasons(args, first):
        found.warnings.append(
            f"{file}: --rm-type {rule.name} grades what follows </think> or ###Response, and gives 0 to a response "
            f"with neither; no file of --hf-checkpoint {args.hf_checkpoint} and no prompt has such a marker. For a "
            "model that does not write one use --rm-type math"
        )


def _reasons(args: Args, first: Sample) -> bool:
    if any(marker in str(first.prompt) for marker in ("think>", "###Response")):
        return True
    files = [Path(args.hf_checkpoint or "") / name for name in _THINKING_FILES]
    there = [file for file in files if file.is_file()]
    return not there or any(b"</think>" in file.read_bytes() for file in there)


def _look_at_label(
    where: str, file: PromptFile, rule: RewardType, label: object, metadata: Mapping[str, Any], found: Findings
) -> bool:
    """Report what is wrong with a label; False for an error, of which one is enough."""
    if rule.labels and label is None:
        option = "--eval-label-key or --label-key" if file.dataset is not None else "--label-key"
        found.errors.append(
            f"{where}: --rm-type {rule.name} compares answers with labels, and this row has none; name their column "
            f"with {option}"
        )
        return False
    said = f"{where}: --rm-type {rule.name} and the label {label!r:.120}, a {type(label).__name__}"
    try:
        answers = rules.best_answers(rule.name, label, metadata)
        right = any(_is_right(rules.grade(rule.name, answer, label, metadata)) for answer in answers)
    except ImportError:
        return True  # refused by the flag's rule, or not on this machine
    except Exception as e:  # noqa: BLE001  (reported)
        found.errors.append(f"{said}: {type(e).__name__}: {e}")
        return False
    if not right and answers:
        found.warnings.append(
            f"{said}: the label itself, given as the answer, gets no full reward, so no answer may. Labels can be a "
            "final answer (42, \\frac{1}{2}, B), a text that ends in '#### 42' or has a \\boxed{}, a list of accepted "
            "answers, or an object with ground_truth"
        )
    elif rule.answer != "text" and all(len(text) > _LONG_ANSWER for text in accepted_answers(label)):
        found.warnings.append(
            f"{said}: it has {len(str(label))} characters, as a solution has; answers are compared with a final "
            "answer, so end it in '#### ANSWER', box the answer, or give the answer alone"
        )
    return True


def _is_right(reward: object) -> bool:
    return bool(reward["acc"] if isinstance(reward, dict) else reward == 1)
