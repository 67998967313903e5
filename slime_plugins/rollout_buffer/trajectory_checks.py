"""Checks of a trajectory when it is written: all that the rollout function and the trainer need of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.batching.validate import LARGEST_LOG_PROB
from slime.utils.plain_numbers import is_integer, is_number, reward_problem

ITEM_KEYS = ("uid", "instance_id", "messages", "reward", "extra_info")
LARGEST_TOKEN_ID = 2**31 - 1
_OPTIONAL = {
    "metadata": (dict, "an object"),
    "agent_session": (dict, "an object"),
    "response": (str, "a text"),
    "weight_versions": (list, "a list"),
    "weight_version_spans": (list, "a list"),
}


class ItemError(ValueError):
    """Written data that is no trajectory."""


def check_item(item: object, vocab_size: int | None = None, reward_key: str | None = None) -> None:
    """Raise ItemError, with the field, for what is no trajectory that can be trained on."""
    if not isinstance(item, Mapping):
        raise ItemError(f"expected an object with {', '.join(ITEM_KEYS)}, got {type(item).__name__}")
    missing = [key for key in ITEM_KEYS if key not in item]
    if missing:
        raise ItemError(f"a trajectory needs {', '.join(ITEM_KEYS)}; missing: {', '.join(missing)}")
    if not isinstance(item["uid"], str) or not item["uid"]:
        raise ItemError(f"uid must be a string that is not empty, got {item['uid']!r:.100}")
    if not isinstance(item["instance_id"], str) and not is_integer(item["instance_id"]):
        raise ItemError(f"instance_id must be a string or a number, got {item['instance_id']!r:.100}")
    extra = item["extra_info"]
    if not isinstance(extra, Mapping):
        raise ItemError(f"extra_info must be an object, got {extra!r:.100}")
    tools = extra.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ItemError(f"extra_info.tools must be a list of objects, got {tools!r:.100}")
    if problem := reward_problem(item["reward"], reward_key):
        raise ItemError(problem)
    _check_messages(item["messages"], trained="samples" not in item and "error" not in extra)
    if "samples" in item:
        _check_samples(item["samples"], "error" in extra, vocab_size)


def has_log_probs(item: Mapping[str, Any]) -> bool | None:
    """True when the trajectory has the log-probs of its tokens; None for a failed one, which fits both kinds."""
    samples = item.get("samples") or []
    if "error" in item["extra_info"] and not samples:
        return None
    return any(sample.get("rollout_log_probs") is not None for sample in samples)


def _check_messages(messages: object, *, trained: bool) -> None:
    if not isinstance(messages, list) or not messages:
        raise ItemError(f"messages must be a list of chat messages with a role each, got {messages!r:.200}")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ItemError(
                f"messages[{place}]: messages must be a list of chat messages with a role each, got {message!r:.200}"
            )
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
            raise ItemError(f"messages[{place}].tool_calls must be a list of objects, got {calls!r:.100}")
        content = message.get("content")
        reasons = message["role"] == "assistant" and (message.get("reasoning_content") or message.get("function_call"))
        if not (isinstance(content, str) or _are_parts(content) or (content is None and (calls or reasons))):
            raise ItemError(f"messages[{place}].content must be a text or a list of parts, got {content!r:.100}")
    if trained and not any(message["role"] == "assistant" for message in messages):
        raise ItemError("messages must have one of the assistant's, or there is nothing to train on")


def _are_parts(content: object) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content)
    )


def _check_samples(samples: object, failed: bool, vocab_size: int | None) -> None:
    if not isinstance(samples, list) or not all(isinstance(sample, Mapping) for sample in samples):
        raise ItemError(f"samples must be a list of objects, got {samples!r:.100}")
    if not samples and not failed:
        raise ItemError("samples must not be empty, unless extra_info has an error")
    for place, sample in enumerate(samples):
        _check_sample(f"samples[{place}]", sample, LARGEST_TOKEN_ID if vocab_size is None else vocab_size - 1)
    if len({sample.get("rollout_log_probs") is None for sample in samples}) > 1:
        raise ItemError("samples must all have rollout_log_probs, or none of them")


def _check_sample(name: str, sample: Mapping[str, Any], largest: int) -> None:
    tokens, length, mask = (sample.get(key) for key in ("tokens", "response_length", "loss_mask"))
    log_probs = sample.get("rollout_log_probs")
    if not isinstance(tokens, list) or not all(is_integer(token) and 0 <= token <= largest for token in tokens):
        raise ItemError(f"{name}.tokens must be a list of token ids, whole numbers from 0 to {largest}")
    if not is_integer(length) or not 0 < length < len(tokens):
        most = f"its {len(tokens)} tokens less one of a prompt"
        raise ItemError(f"{name}.response_length must be from 1 to {most}, got {length!r:.50}")
    if not isinstance(mask, list) or len(mask) != length or not all(is_integer(one) and one in (0, 1) for one in mask):
        raise ItemError(f"{name}.loss_mask must be {length} numbers, 0 or 1 each")
    if log_probs is not None and (
        not isinstance(log_probs, list)
        or len(log_probs) != length
        or not all(is_number(one) and one <= LARGEST_LOG_PROB for one in log_probs)
    ):
        raise ItemError(f"{name}.rollout_log_probs must be {length} finite numbers that are not above 0, or null")
    images = sample.get("images") or []
    if not isinstance(images, list) or not all(isinstance(i, str) and i.startswith("data:image/") for i in images):
        raise ItemError(f"{name}.images must be a list of data: URLs of images")
    for key, (kind, wanted) in _OPTIONAL.items():
        if sample.get(key) is not None and not isinstance(sample[key], kind):
            raise ItemError(f"{name}.{key} must be {wanted}, got {sample[key]!r:.100}")
