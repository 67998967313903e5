"""The part of a response that the policy wrote: a rule grades that, and not what a tool or an environment answered."""

from __future__ import annotations

import functools
import itertools
import threading
from typing import Any

from slime.arguments.args import Args
from slime.utils.types import Sample

__all__ = ["has_others_text", "own_text"]

_BETWEEN = " \n "
"""Replaces the text of others: what the policy wrote before and after it is not one word."""


_loading = threading.Lock()
"""The first samples of a run end together, each in a thread: one loads."""


@functools.cache
def _load(checkpoint: str, trust_remote_code: bool) -> Any:
    from slime.utils.processing_utils import load_tokenizer

    return load_tokenizer(checkpoint, trust_remote_code=trust_remote_code)


def _tokenizer(checkpoint: str, trust_remote_code: bool) -> Any:
    with _loading:
        return _load(checkpoint, trust_remote_code)


def has_others_text(sample: Sample) -> bool:
    """Return whether the mask of ``sample`` leaves tokens out, so that :func:`own_text` may have to decode."""
    mask, length = sample.loss_mask, sample.response_length
    return mask is not None and len(mask) == length <= len(sample.tokens) and not all(mask)


def own_text(args: Args, sample: Sample) -> str:
    """Return the text of the tokens that have loss mask 1 or that an engine made (``weight_version_spans``).

    That is the response as it stands where these are all its tokens (or none: a sample that is masked whole), and
    where the mask does not fit. The first call loads the tokenizer.
    """
    if not has_others_text(sample):
        return sample.response
    length = sample.response_length
    own = [bool(trained) for trained in sample.loss_mask or ()]
    for span in sample.weight_version_spans:
        own[span["start"] : span["end"]] = [True] * len(own[span["start"] : span["end"]])
    if all(own) or not any(own):
        return sample.response
    tokenizer = _tokenizer(args.hf_checkpoint, args.trust_remote_code)
    runs = itertools.groupby(zip(own, sample.tokens[-length:], strict=True), key=lambda token: token[0])
    texts = [[int(token) for _, token in run] for is_own, run in runs if is_own]
    skip = args.rollout_skip_special_tokens
    return _BETWEEN.join(
        tokenizer.decode(ids, skip_special_tokens=skip, spaces_between_special_tokens=False) for ids in texts
    )
