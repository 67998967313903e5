"""On-policy distillation: a teacher behind ``--rm-url`` returns the log-probs of what the student wrote.

``reward_func`` (``--custom-rm-path``) asks an SGLang server or slime's log-prob server, ``post_process_rewards``
(``--custom-reward-post-process-path``) makes ``teacher_log_probs`` of its reply. Rewards are zero: what trains is the
difference between the log-probs of teacher and student.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from slime.arguments.args import Args
from slime.rollout.cancelling import gather_or_cancel
from slime.rollout.requests.images import images_of
from slime.rollout.rm_hub.remote import ask
from slime.utils.declared import with_defaults
from slime.utils.image_tokens import as_png, collapsed
from slime.utils.types import Sample

__all__ = ["post_process_rewards", "reward_func"]

ATTEMPTS_IN_TIME = 3
"""So many attempts that hang fit into the time of a reward."""
_last_ids: dict[str, int] = {}
"""Address of a teacher -> the last id of its vocabulary, once it has been met."""


@functools.cache
def _image_token(checkpoint: str) -> int:
    """Return the id of the placeholder of images. Raises ValueError for a checkpoint without one."""
    found = json.loads((Path(checkpoint) / "config.json").read_text(encoding="utf-8")).get("image_token_id")
    if not isinstance(found, int):
        raise ValueError(f"{checkpoint}: config.json has no image_token_id, and a sample has images")
    return found


async def reward_func(args: Args, sample: Sample | list[Sample], **kwargs: object) -> Any:
    """Return the teacher's whole reply, with the log-probs of every token of ``sample``; for a list, one each.

    The teacher must have the student's tokenizer. ``--rollout-request-timeout`` bounds a reward as a whole: a third of
    it an attempt, so that one that hangs leaves time for others. Raises ValueError without ``--rm-url`` and for a reply
    that lacks the log-probs of the sample's very tokens, HttpRequestError when the teacher does not answer.
    """
    args = with_defaults(args)
    if isinstance(sample, list):
        return await gather_or_cancel([reward_func(args, one, **kwargs) for one in sample])
    if not args.rm_url:
        raise ValueError(f"{__name__}.reward_func needs --rm-url, the /generate address of the teacher's server")
    payload: dict[str, Any] = {
        "input_ids": list(sample.tokens),
        "sampling_params": {
            "temperature": args.rollout_temperature,
            "max_new_tokens": 0,
            "skip_special_tokens": False,
        },
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if images := images_of(sample):
        pad = _image_token(args.hf_checkpoint)
        payload["input_ids"] = collapsed(sample.tokens, pad, len(images), _name(sample))
        payload["image_data"] = [as_png(image) for image in images]
    timeout = args.rollout_request_timeout
    reply = await ask(args.rm_url, payload, timeout / ATTEMPTS_IN_TIME)
    await _name_last_id(args.rm_url, sample, reply, timeout / ATTEMPTS_IN_TIME)
    teacher_log_probs(sample, reply)
    return reply


async def _name_last_id(url: str, sample: Sample, reply: object, timeout: float) -> None:
    """Write the last id of the teacher's vocabulary into ``reply`` where SGLang reports 0 in its place.

    It does so for ids beyond the vocabulary as well, with the last one's log-prob. Which of them it is the server knows
    itself: it refuses log-probs of ids that it does not have, and HttpRequestError is raised.
    """
    entries = _response_entries(sample, reply)
    hidden = [(entry, token) for entry, token in zip(entries, _response(sample), strict=True) if entry[1] == 0 != token]
    if not hidden:
        return
    last = max(token for _, token in hidden)
    if _last_ids.get(url) != last:
        question = {
            "input_ids": [0],
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "token_ids_logprob": [last],
        }
        await ask(url, question, timeout)
        _last_ids[url] = last
    for entry, token in hidden:
        if token == last:
            entry[1] = last


def post_process_rewards(args: Args, samples: Sequence[Sample], **kwargs: object) -> tuple[list[float], list[float]]:
    """Set ``teacher_log_probs`` (response_length floats) of all samples; return (raw rewards, rewards), all 0.0.

    A sample whose reward failed, which is left out of the loss, gets zeros. Raises ValueError naming the sample for a
    reward that is no teacher's reply.
    """
    args = with_defaults(args)
    for sample in samples:
        failed = sample.remove_sample and "reward_error" in (sample.metadata or {})
        sample.teacher_log_probs = (
            [0.0] * sample.response_length if failed else teacher_log_probs(sample, sample.get_reward_value(args))
        )
    return [0.0] * len(samples), [0.0] * len(samples)


def teacher_log_probs(sample: Sample, reply: object) -> list[float]:
    """Return the log-probs of the response tokens (response_length floats) of a teacher's ``reply``.

    ``meta_info.input_token_logprobs`` has ``[log-prob, token id, ...]`` for every token of prompt and response; nothing
    is known about the first. ``log_probs``, of the log-prob server, are those of all but the first. Raises ValueError
    when it is missing, or is not about the tokens of ``sample``.
    """
    entries = _response_entries(sample, reply)
    masks = sample.loss_mask if images_of(sample) else None
    for position, (entry, token) in enumerate(zip(entries, _response(sample), strict=True)):
        if entry[1] != token and masks is not None and not masks[position]:  # servers give images ids of their own
            entries[position] = [0.0, token]
            continue
        if entry[1] != token:
            raise ValueError(
                f"{_name(sample)}: response token {position} is {token}, but the teacher returned {entry[1]}; both "
                "must have the same tokenizer"
            )
        if not isinstance(entry[0], (int, float)) or not math.isfinite(entry[0]):
            raise ValueError(
                f"{_name(sample)}: the teacher's log-prob of response token {position} is {entry[0]!r}, no number"
            )
    return [float(entry[0]) for entry in entries]


def _name(sample: Sample) -> str:
    return f"sample index={sample.index} group_index={sample.group_index}"


def _response(sample: Sample) -> list[int]:
    return list(sample.tokens)[len(sample.tokens) - sample.response_length :]


def _response_entries(sample: Sample, reply: object) -> list[Any]:
    """Return what ``reply`` has of each response token, ``[log-prob, token id, ...]``."""
    meta_info = reply.get("meta_info") if isinstance(reply, Mapping) else None
    entries = meta_info.get("input_token_logprobs") if isinstance(meta_info, Mapping) else None
    of_tokens = reply.get("log_probs") if isinstance(reply, Mapping) else None
    if isinstance(of_tokens, Sequence):  # of the log-prob server, about all tokens but the first
        entries = [
            [value, token] for value, token in zip_longest([None, *of_tokens], sample.tokens[: len(of_tokens) + 1])
        ]
    if not isinstance(entries, Sequence):
        raise ValueError(
            f"{_name(sample)}: the teacher's reply has neither meta_info.input_token_logprobs nor log_probs, is "
            f"--rm-url /generate of an SGLang or log-prob server? Got {reply!r:.300}"
        )
    total, length = len(sample.tokens), sample.response_length
    with_images = bool((sample.multimodal_inputs or {}).get("images"))  # each is as many tokens as the server makes it
    if len(entries) <= length if with_images else len(entries) != total:
        raise ValueError(
            f"{_name(sample)}: the teacher returned the log-probs of {len(entries)} tokens, the sample has {total} "
            f"({length} of them in the response)"
        )
    if length >= total:
        raise ValueError(f"{_name(sample)} has no prompt: the teacher cannot say how likely its first token is")
    return list(entries[len(entries) - length :])
