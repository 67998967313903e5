"""Prompt files and the data set made of them."""

from __future__ import annotations

import importlib
import json
import logging
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.utils.chat_messages import check_messages, media_messages, text_messages
from slime.utils.prompt_files import read_file, read_rows
from slime.utils.types import MultimodalTypes, Sample

if TYPE_CHECKING:
    from slime.arguments.args import Args
    from slime.utils.processing_utils import Processor, Tokenizer

__all__ = [
    "Dataset", "build_messages", "filter_long_prompt", "get_source", "process_rollout_data", "read_file",
]  # fmt: skip

logger = logging.getLogger(__name__)

_TOKENIZE_AT_ONCE = 1024


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
    place = f"{where}: column {prompt_key!r}"
    if not isinstance(prompt, str | list):
        raise ValueError(f"{place} must hold text or a list of chat messages, got {type(prompt).__name__}")
    if not as_conversation:
        return prompt
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    check_messages(prompt, place)
    if not multimodal_keys:
        return text_messages(prompt, place)
    items: dict[str, Iterator[Any]] = {}
    for name, column in multimodal_keys.items():
        kind = MultimodalTypes.get(name)
        if kind is None:
            known = [k.name for k in MultimodalTypes.all()]
            raise ValueError(f"--multimodal-keys: unknown media type {name!r}, expected one of {known}")
        value = row.get(column)
        items[kind.placeholder] = iter([] if value is None else value if isinstance(value, list) else list(value))
    pattern = re.compile("(" + "|".join(re.escape(p) for p in items) + ")")
    messages = [dict(message) for message in prompt]
    for message in messages:
        if isinstance(message.get("content"), str):
            message["content"] = _split_content(message["content"], pattern, items, where)
    messages = media_messages(messages, place, {name.strip("<>"): left for name, left in items.items()})
    for placeholder, left in items.items():
        surplus = len(list(left))
        assert surplus == 0, f"{where}: {surplus} more media items than {placeholder} placeholders in the prompt"
    return messages


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


def _parse_tools(value: object, where: str) -> list[Any]:
    """Return a list of objects, of which any may be given as JSON text."""
    tools = _parsed(value.tolist() if isinstance(value, np.ndarray) else value, where)
    if not isinstance(tools, list):
        raise ValueError(f"{where} must hold a list of tools (or a JSON text of one), got {type(tools).__name__}")
    tools = [_parsed(tool, where) for tool in tools]
    for number, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ValueError(f"{where}: tool {number} must be an object, got {tool!r:.80}")
    return tools


def _parsed(value: object, where: str) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{where} holds {value!r:.80}, which is no JSON: {e}") from e


MEDIA_COLUMNS = frozenset({"image", "images", "video", "videos", "audio", "audios"})
_MEDIA_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".mp4", ".webm", ".mov", ".wav", ".mp3", ".flac")
_PLACEHOLDER = re.compile("<(image|video|audio)>")


def _is_media(value: object) -> bool:
    """Return True if the value of a column is media: a text may name something else, such as a container's image."""
    if isinstance(value, str):
        return value.startswith(("data:", "http://", "https://")) or value.lower().endswith(_MEDIA_ENDINGS)
    return isinstance(value, list | dict | bytes) and bool(value)


def _unread_media(row: Mapping[str, Any], prompt: str | Sequence[Any], where: str) -> str | None:
    """Return the column of a row that holds media of its prompt. Raises ValueError where the prompt refers to them."""
    if MEDIA_COLUMNS.isdisjoint(row):
        return None
    column = next((name for name in MEDIA_COLUMNS & row.keys() if _is_media(row[name])), None)
    texts = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt if isinstance(m, Mapping)]
    placeholder = next((m for t in texts if isinstance(t, str) and (m := _PLACEHOLDER.search(t))), None)
    if column is not None and placeholder is not None:
        raise ValueError(
            f"{where}: the prompt has {placeholder[0]} for what is in column {column!r}, and prompts with media are "
            "not available: the model would see the word alone; leave such rows out"
        )
    return column


def filter_long_prompt(
    origin_samples: list[Sample], tokenizer: Tokenizer, processor: Processor | None, max_length: int | None
) -> list[Sample]:
    """Return the origin_samples, in order, whose prompt has at most ``max_length`` tokens.

    Chat messages count as the chat template renders them, token ids as they are. What the template does not render is
    kept, with a warning.
    """
    if max_length is None or not origin_samples:
        return origin_samples
    kept: list[Sample] = []
    unknown = 0
    for start in range(0, len(origin_samples), _TOKENIZE_AT_ONCE):
        chunk = origin_samples[start : start + _TOKENIZE_AT_ONCE]
        lengths = _prompt_lengths(chunk, tokenizer, processor, max_length)
        kept += [sample for sample, n in zip(chunk, lengths, strict=True) if n is None or n <= max_length]
        unknown += lengths.count(None)
    if unknown:
        logger.warning(
            "the limit of %d prompt tokens is not applied to %d of %d prompts, which are lists that the chat template "
            "does not render", max_length, unknown, len(origin_samples),
        )  # fmt: skip
    if dropped := len(origin_samples) - len(kept):
        logger.warning(
            "%d of %d prompts have more than %d tokens and are dropped", dropped, len(origin_samples), max_length
        )
    return kept


def _prompt_lengths(
    samples: list[Sample], tokenizer: Tokenizer, processor: Processor | None, limit: int
) -> list[int | None]:
    """Return the tokens of each prompt, or what is above them and within ``limit``; None where it is not known."""
    lengths: list[int | None] = []
    counted: list[tuple[int, str]] = []
    for place, sample in enumerate(samples):
        prompt = sample.prompt
        images = (sample.multimodal_inputs or {}).get("images")
        if isinstance(prompt, str) and processor is not None and images:
            from slime.utils.processing_utils import expanded_length

            lengths.append(expanded_length(processor, tokenizer, prompt, sample.multimodal_inputs))
            continue
        if prompt and all(isinstance(item, int) for item in prompt):
            lengths.append(len(prompt))
            continue
        try:
            text = prompt if isinstance(prompt, str) else _as_rendered(tokenizer, sample)
        except Exception:  # noqa: BLE001  (templates raise what they like; a plug-in may read such a list)
            lengths.append(None)
            continue
        # A token is one byte at least: what is short enough in bytes need not be counted in tokens.
        size = len(text.encode("utf-8", "replace"))
        lengths.append(size)
        if size > limit:
            counted.append((place, text))
    if counted:
        encoded = tokenizer([text for _, text in counted], add_special_tokens=False)["input_ids"]
        for (place, _), ids in zip(counted, encoded, strict=True):
            lengths[place] = len(ids)
    return lengths


def _as_rendered(tokenizer: Tokenizer, sample: Sample) -> str:
    prompt: Any = sample.prompt
    check_messages(prompt, "the prompt")
    messages = text_messages(prompt, "the prompt")
    tools = (sample.metadata or {}).get("tools")
    return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True))


def _mixed(places: Mapping[str, str], key: str) -> str:
    (first, there), (other, here) = places.items()
    return (
        f"{here}: column {key!r} holds {other}, and {first} in {there}: without --apply-chat-template prompts must be "
        "all of one kind"
    )


def _media_of(messages: list[Any], processor: Processor | None, where: str) -> dict[str, Any]:
    from slime.utils.processing_utils import process_vision_info

    try:
        found = process_vision_info(messages, processor)
    except (OSError, ValueError, ImportError) as e:
        raise ValueError(f"{where}: its media cannot be read: {e}") from e
    if found["videos"]:
        raise ValueError(f"{where}: videos are not available yet, of which it has {len(found['videos'])}")
    return found


def _check_placeholders(prompt: Any, inputs: Mapping[str, Any], processor: Processor | None, where: str) -> None:
    """Raise ValueError for a rendered prompt that has not one placeholder for each image."""
    images, token = len(inputs.get("images") or ()), getattr(processor, "image_token", None)
    if isinstance(prompt, str) and isinstance(token, str) and (places := prompt.count(token)) != images:
        raise ValueError(
            f"{where}: the prompt has {images} images, and {places} times {token} as the chat template renders it"
        )


def _rendered(
    tokenizer: Tokenizer, messages: object, tools: list[Any] | None, keywords: Mapping[str, Any], where: str
) -> Any:
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
    ``engine_max_length``, which an engine would refuse. Media are refused without ``multimodal_keys``.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Tokenizer,
        processor: Processor | None,
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
        prompts_are_optional: bool = False,
    ) -> None:
        self.path = path
        self.seed = seed
        self.epoch_id = -1
        as_conversation = apply_chat_template or bool(multimodal_keys)
        if multimodal_keys and processor is None:
            raise ValueError(f"{path}: its media need a processor, and the checkpoint has none that can be loaded")
        samples = []
        places: dict[str, str] = {}  # the first text and the first list, where they are not rendered
        unread = None
        for where, row in read_rows(path):
            absent = prompts_are_optional and row.get(prompt_key) in (None, "")
            messages = "" if absent else build_messages(row, prompt_key, as_conversation, multimodal_keys, where)
            kind = "text" if isinstance(messages, str) else "a list"
            if not as_conversation and not absent and kind not in places:
                places[kind] = where
                if len(places) > 1:
                    raise ValueError(_mixed(places, prompt_key))
            if not multimodal_keys:
                unread = _unread_media(row, messages, where) or unread
            metadata = row.get(metadata_key) or {}
            if not isinstance(metadata, dict):
                raise ValueError(f"{where}: column {metadata_key!r} must hold an object, got {type(metadata).__name__}")
            tools = None
            if tool_key is not None and row.get(tool_key) is not None:
                tools = _parse_tools(row[tool_key], f"{where}: column {tool_key!r}")
                metadata = {**metadata, "tools": tools}
            prompt: Any = messages
            if apply_chat_template and not absent:
                prompt = _rendered(tokenizer, messages, tools, apply_chat_template_kwargs or {}, where)
            inputs = None
            if processor is not None and isinstance(messages, list):
                inputs = _media_of(messages, processor, where)
                _check_placeholders(prompt, inputs, processor, where)
            label = _column(row, label_key, "label", where) if label_key is not None else None
            samples.append(Sample(prompt=prompt, label=label, metadata=metadata, multimodal_inputs=inputs))
        if unread is not None:
            logger.warning("%s: column %r holds media, of which the model sees nothing: prompts are text", path, unread)
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


def process_rollout_data(args: Args, rollout_data_ref: Sequence[Any], dp_rank: int, dp_size: int) -> dict[str, Any]:
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
