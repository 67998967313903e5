"""Prompt files and the data set made of them."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import os
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from slime.utils.types import MultimodalTypes, Sample

logger = logging.getLogger(__name__)

_SLICED_PATH = re.compile(r"^(?P<path>.*)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]$")
_BAD_LINES_SHOWN = 5
_TOKENIZE_AT_ONCE = 1024


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a ``.jsonl``, ``.json`` or ``.parquet`` file; ``@[a:b]`` behind it selects rows as slices do.

    A ``.json`` file is a list of objects, or one object per line like ``.jsonl``.

    Blank lines are ignored. Lines that are not JSON objects are logged with their number and skipped, and a file in
    which no line is good raises ValueError. Raises FileNotFoundError, and ValueError for any other kind of file.
    """
    for _, row in read_rows(path):
        yield row


def read_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield ``(where, row)`` for the rows of ``read_file``: ``where`` names the file and the line, or the row."""
    path, rows = split_slice(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"prompt file {path!r} does not exist (current directory {os.getcwd()})")
    if path.endswith(".jsonl"):
        reader = _read_jsonl(path)
    elif path.endswith(".json"):
        reader = _read_json(path)
    elif path.endswith(".parquet"):
        reader = _read_parquet(path)
    else:
        raise ValueError(f"prompt file {path!r} must end in .jsonl, .json or .parquet")
    if rows is None:
        yield from reader
    elif any(bound is not None and bound < 0 for bound in (rows.start, rows.stop)):
        yield from list(reader)[rows]
    else:
        yield from itertools.islice(reader, rows.start, rows.stop)


def split_slice(path: str) -> tuple[str, slice | None]:
    """Return the file of ``path@[a:b]`` and its slice, None of a path without one."""
    match = _SLICED_PATH.match(path)
    if match is None:
        return path, None
    start, stop = (int(match[name]) if match[name] not in ("", "-") else None for name in ("start", "stop"))
    return match["path"], slice(start, stop)


def _read_jsonl(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    good, bad = 0, 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                if not isinstance(row, dict):
                    raise ValueError(f"expected a JSON object, got {type(row).__name__}")
            except ValueError as e:
                bad += 1
                if bad <= _BAD_LINES_SHOWN:
                    shown = line.decode("utf-8", "backslashreplace").strip()
                    logger.error("%s line %d is skipped: %s: %.80r", path, number, e, shown)
                continue
            good += 1
            yield f"{path} line {number}", row
    if bad:
        logger.error("%s: %d of %d lines are not JSON objects in UTF-8 and were skipped", path, bad, good + bad)
        if not good:
            raise ValueError(f"{path}: none of its {bad} lines is a JSON object in UTF-8")


def _read_json(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        is_list = file.read(4096).lstrip().startswith("[")
    if not is_list:
        yield from _read_jsonl(path)
        return
    try:
        with open(path, encoding="utf-8-sig") as file:
            rows = json.load(file)
    except ValueError as e:
        raise ValueError(f"{path} begins with [ but is no JSON list in UTF-8: {e}") from e
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: entry {number} of its list is {type(row).__name__}, expected a JSON object")
        yield f"{path} entry {number}", row


def _read_parquet(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as table:
            for batch in table.iter_batches():
                for row in batch.to_pylist():
                    yield f"{path} row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as e:
        raise ValueError(f"{path} cannot be read as a parquet file behind row {number}: {e}") from e


def _column(row: Mapping[str, Any], key: str, what: str, where: str) -> Any:
    if key not in row:
        raise KeyError(f"{where} has no column {key!r} for the {what}; it has {sorted(row)}")
    return row[key]


def build_messages(
    row: Mapping[str, Any],
    prompt_key: str,
    as_conversation: bool,
    multimodal_keys: Mapping[str, str] | None = None,
    where: str = "row",
) -> str | list[dict[str, Any]]:
    """Return the row's prompt: as it is, or as chat messages when ``as_conversation``.

    With ``multimodal_keys`` (media type -> column) the placeholders ``<image>``, ``<video>``, ``<audio>`` in string
    contents are replaced, in order, by the items of those columns. Raises AssertionError for surplus ones.
    """
    prompt = _column(row, prompt_key, "prompt", where)
    if isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    _check_prompt(prompt, as_conversation, f"{where}: column {prompt_key!r}")
    if not as_conversation:
        return prompt
    messages: list[dict[str, Any]] = (
        [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    )
    if not multimodal_keys:
        return messages
    items: dict[str, Iterator[Any]] = {}
    for name, column in multimodal_keys.items():
        kind = MultimodalTypes.get(name)
        if kind is None:
            known = [k.name for k in MultimodalTypes.all()]
            raise ValueError(f"--multimodal-keys: unknown media type {name!r}, expected one of {known}")
        value = row.get(column)
        items[kind.placeholder] = iter([] if value is None else value if isinstance(value, list) else list(value))
    pattern = re.compile("(" + "|".join(re.escape(p) for p in items) + ")")
    for message in messages:
        if isinstance(message["content"], str):
            message["content"] = _split_content(message["content"], pattern, items, where)
    for placeholder, left in items.items():
        surplus = len(list(left))
        assert surplus == 0, f"{where}: {surplus} more media items than {placeholder} placeholders in the prompt"
    return messages


def _check_prompt(prompt: Any, as_conversation: bool, where: str) -> None:
    """Refuse what no template and no tokenizer takes. Without either a list may be anything that a plug-in reads."""
    if not isinstance(prompt, str | list):
        raise ValueError(f"{where} must hold text or a list of chat messages, got {type(prompt).__name__}")
    if not as_conversation or isinstance(prompt, str):
        return
    for number, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not {"role", "content"}.issubset(message):
            raise ValueError(f"{where}: message {number} must have a role and a content, got {message!r:.80}")


def _split_content(
    text: str, pattern: re.Pattern[str], items: Mapping[str, Iterator[Any]], where: str
) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for piece in pattern.split(text):
        if piece in items:
            item = next(items[piece], None)
            assert item is not None, f"{where}: more {piece} placeholders in the prompt than media items"
            kind = piece.strip("<>")
            parts.append(item if isinstance(item, dict) and "type" in item else {"type": kind, kind: item})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return parts


def _parse_tools(value: Any, where: str) -> list[Any]:
    if isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list):
        raise ValueError(f"{where}: tools must be a list (or a JSON text of one), got {type(value).__name__}")
    return value


def filter_long_prompt(
    origin_samples: list[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """Return the origin_samples, in order, whose prompt has at most ``max_length`` tokens.

    All are kept, with a warning, when prompts are message lists: their length depends on a chat template.
    """
    if max_length is None or not origin_samples:
        return origin_samples
    if not isinstance(origin_samples[0].prompt, str):
        logger.warning("prompts are message lists: the limit of %d prompt tokens is not applied to them", max_length)
        return origin_samples
    kept: list[Sample] = []
    if processor is not None:
        from slime.utils.processing_utils import build_processor_kwargs

        for sample in origin_samples:
            kwargs = build_processor_kwargs(sample.multimodal_inputs)
            if len(processor(text=sample.prompt, **kwargs)["input_ids"][0]) <= max_length:
                kept.append(sample)
    else:
        for start in range(0, len(origin_samples), _TOKENIZE_AT_ONCE):
            chunk = origin_samples[start : start + _TOKENIZE_AT_ONCE]
            # A token stands for one byte at least: what is short enough in bytes need not be counted in tokens.
            prompts = cast("list[str]", [sample.prompt for sample in chunk])
            lengths = [len(prompt.encode("utf-8", "surrogatepass")) for prompt in prompts]
            long = [i for i, length in enumerate(lengths) if length > max_length]
            if long:
                counted = tokenizer([prompts[i] for i in long], add_special_tokens=False)["input_ids"]
                for i, ids in zip(long, counted, strict=True):
                    lengths[i] = len(ids)
            kept += [sample for sample, length in zip(chunk, lengths, strict=True) if length <= max_length]
    if dropped := len(origin_samples) - len(kept):
        logger.warning(
            "%d of %d prompts have more than %d tokens and are dropped", dropped, len(origin_samples), max_length
        )
    return kept


def _rendered(tokenizer: Any, messages: Any, tools: list[Any] | None, keywords: Mapping[str, Any], where: str) -> Any:
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **keywords
        )
    except Exception as e:
        raise ValueError(f"{where}: the chat template cannot render it: {type(e).__name__}: {e}") from e


class Dataset:
    """The prompts of one file as Samples (prompt, label, metadata, multimodal inputs).

    With ``apply_chat_template`` a prompt becomes the rendered template, else it stays what the file holds. ``shuffle``
    puts ``samples`` in the order of an epoch, which depends on ``seed + epoch`` only. Raises KeyError for a missing
    column and ValueError when no prompt is left or a row is not what it should be.

    Prompts of more than ``max_length`` tokens are dropped; when it is None, rendered ones of more than
    ``engine_max_length``, which an engine would refuse.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any,
        max_length: int | None,
        *,
        engine_max_length: int | None = None,
        prompt_key: str = "text",
        multimodal_keys: Mapping[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.seed = seed
        self.epoch_id = -1
        samples = []
        for where, row in read_rows(path):
            messages = build_messages(
                row, prompt_key, apply_chat_template or bool(multimodal_keys), multimodal_keys, where
            )
            metadata = row.get(metadata_key) or {}
            if not isinstance(metadata, dict):
                raise ValueError(f"{where}: column {metadata_key!r} must hold an object, got {type(metadata).__name__}")
            tools = None
            if tool_key is not None and row.get(tool_key) is not None:
                tools = _parse_tools(row[tool_key], where)
                metadata = {**metadata, "tools": tools}
            prompt: Any = messages
            if apply_chat_template:
                prompt = _rendered(tokenizer, messages, tools, apply_chat_template_kwargs or {}, where)
            inputs = None
            if processor is not None and isinstance(messages, list):
                from slime.utils.processing_utils import process_vision_info

                inputs = process_vision_info(messages, processor)
            label = _column(row, label_key, "label", where) if label_key is not None else None
            samples.append(Sample(prompt=prompt, label=label, metadata=metadata, multimodal_inputs=inputs))
        total = len(samples)
        if max_length is None and all(isinstance(sample.prompt, str) for sample in samples):
            max_length = engine_max_length
        self.origin_samples = filter_long_prompt(samples, tokenizer, processor, max_length)
        if not self.origin_samples:
            why = f"{total} rows, all longer than {max_length} tokens" if total else "no rows, or none in the slice"
            raise ValueError(f"{path} holds no usable prompt: {why}")
        self.samples = self.origin_samples

    def shuffle(self, new_epoch_id: int) -> None:
        """Put ``samples`` in the order of epoch ``new_epoch_id``."""
        if self.epoch_id == new_epoch_id:
            return
        permutation = list(range(len(self.origin_samples)))
        random.Random(self.seed + new_epoch_id).shuffle(permutation)
        self.samples = [self.origin_samples[i] for i in permutation]
        self.epoch_id = new_epoch_id

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def __len__(self) -> int:
        return len(self.samples)


def process_rollout_data(args: Any, rollout_data_ref: Sequence[Any], dp_rank: int, dp_size: int) -> dict[str, Any]:
    """Return the columns of data-parallel rank ``dp_rank``, on the CPU (see ``RolloutShard.to_rollout_data``).

    ``rollout_data_ref`` are the boxed references that the rollout manager's ``generate`` returns, one per rank; raises
    ValueError when there are not ``dp_size`` of them.
    """
    del args  # part of the signature known to callers
    if len(rollout_data_ref) != dp_size:
        raise ValueError(f"the rollout has shards for {len(rollout_data_ref)} data-parallel ranks, expected {dp_size}")
    ray = importlib.import_module("ray")  # samples and data sets, which need none of it, are in this module too
    shard = ray.get(rollout_data_ref[dp_rank].inner)
    return dict(shard.to_rollout_data())


def get_source(sample: Sample) -> str:
    """Return where a sample comes from: its ``source`` attribute, ``metadata["source_name"]`` or ``"unknown"``."""
    source = getattr(sample, "source", None)
    if source is None and sample.metadata:
        source = sample.metadata.get("source_name")
    return "unknown" if source is None else str(source)
