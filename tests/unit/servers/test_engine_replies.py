"""Replies of engines that lack what makes them usable."""

from __future__ import annotations

from typing import Any

import pytest

from slime.agent.adapters.generation import generated
from slime.rollout.requests.generate_request import append_output
from slime.rollout.sglang_streaming_rollout import _GrowingAnswer
from slime.servers.engine_replies import output_tokens
from slime.servers.http_replies import wrong_with
from slime.utils.types import Sample
from tests.support.rollout_args import rollout_args

TOKENS = [[-0.5, 104, None], [-0.25, 105, None]]
STOP = {"finish_reason": {"type": "stop"}}
GOOD = {"text": "hi", "meta_info": {**STOP, "output_token_logprobs": TOKENS}}
BAD = [
    ({"text": "hello", "meta_info": STOP}, "no meta_info with output_token_logprobs"),
    ({"text": "hello", "meta_info": {**STOP, "output_token_logprobs": None}}, "output_token_logprobs"),
    ({"text": "hello", "meta_info": {**STOP, "output_token_logprobs": []}}, "output_token_logprobs"),
    ({"text": "", "meta_info": {**STOP, "completion_tokens": 3}}, "output_token_logprobs"),
    ({"text": "", "output_ids": [7], "meta_info": {"finish_reason": {"type": "abort"}}}, "output_token_logprobs"),
    ({"text": "part", "meta_info": {"finish_reason": {"type": "abort"}}}, "output_token_logprobs"),
    ({"text": "hi", "meta_info": {"output_token_logprobs": TOKENS}}, "no meta_info with finish_reason"),
    ({"text": "hello", "meta_info": {}}, "no meta_info with finish_reason, no meta_info with output_token_logprobs"),
    ({"text": "hi"}, "no meta_info:"),
    ({"text": "hi", "meta_info": [1]}, "no meta_info:"),
    (["hi"], "no meta_info:"),
    (None, "no meta_info:"),
    ({**GOOD, "meta_info": {**STOP, "output_token_logprobs": [[-0.5]]}}, "a log-prob and a token id each"),
    ({**GOOD, "meta_info": {**STOP, "output_token_logprobs": [-0.5, -0.25]}}, "a log-prob and a token id each"),
    ({**GOOD, "meta_info": {**STOP, "output_token_logprobs": [[-0.5, None]]}}, "a log-prob and a token id each"),
]


@pytest.mark.parametrize(("reply", "words"), BAD)
def test_every_reader_names_what_a_reply_lacks(reply: Any, words: str):
    sample = Sample(prompt="p", tokens=[1])
    for read in (output_tokens, generated, lambda r: append_output(rollout_args(), sample, r)):
        with pytest.raises(RuntimeError, match="the engine's reply has no") as caught:
            read(reply)
        assert words in str(caught.value)
    assert (sample.tokens, sample.response, sample.status) == ([1], "", Sample.Status.PENDING)


def test_tokens_without_their_text_are_no_sample():
    reply = {"meta_info": GOOD["meta_info"]}
    assert generated(reply).output_ids == [104, 105]  # agents decode themselves
    with pytest.raises(RuntimeError, match="has no text"):
        append_output(rollout_args(), Sample(prompt="p", tokens=[1]), reply)


@pytest.mark.parametrize(
    "reply",
    [
        {"text": "", "meta_info": {"finish_reason": {"type": "abort"}}},
        {"text": "", "meta_info": {**STOP, "completion_tokens": 0}},
        {"text": "", "meta_info": {**STOP, "output_token_logprobs": []}},
        {"text": "", "meta_info": {"finish_reason": None}},
    ],
)
def test_a_reply_that_made_nothing_may_lack_the_tokens(reply: dict[str, Any]):
    assert output_tokens(reply, with_text=True) == []
    assert output_tokens(GOOD, with_text=True) == TOKENS


class Bytes:
    """A tokenizer of one token per byte of UTF-8."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return bytes(i for i in ids if not (skip_special_tokens and i == 0)).decode("utf-8", "replace")


@pytest.mark.parametrize("cut", range(1, 12))
def test_the_text_of_a_continued_response_is_that_of_all_its_tokens(cut: int):
    """Engines tell of an incomplete character what they have of it, on both sides."""
    tokens = list("aé✓😀z".encode())
    args, tokenizer = rollout_args(rollout_skip_special_tokens=False), Bytes()
    sample = Sample(prompt="p", tokens=[1])
    for part, finish in ((tokens[:cut], "abort"), (tokens[cut:], "stop")):
        entries = [[-0.5, token, None] for token in part]
        meta_info = {"finish_reason": {"type": finish}, "output_token_logprobs": entries}
        append_output(args, sample, {"text": tokenizer.decode(part), "meta_info": meta_info}, tokenizer)
    assert sample.response == "aé✓😀z"
    assert sample.tokens == [1, *tokens]


@pytest.mark.parametrize("entries", [[-0.5], [[]], [[-0.5, 7], None]])
def test_an_answer_with_entries_that_are_none_is_rejected_by_name(entries: Any):
    reply = {"text": "h", "meta_info": {**STOP, "output_token_logprobs": entries}}
    assert wrong_with(reply) == "output_token_logprobs has an entry without a log-prob"


def test_a_stream_that_lacks_the_tokens_is_an_error():
    sample = Sample(prompt="p", tokens=[1])
    answer = _GrowingAnswer(rollout_args(), sample)
    with pytest.raises(RuntimeError, match="has no meta_info"):
        answer.take({"text": "h"}, "http://engine")
    with pytest.raises(RuntimeError, match="has no meta_info with output_token_logprobs"):
        answer.take({"text": "hello", "meta_info": STOP}, "http://engine")
    assert (sample.tokens, sample.response) == ([1], "")
