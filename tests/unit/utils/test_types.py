"""Sample: conversion, appending tokens, merging what engines send along."""

from __future__ import annotations

import base64
import copy
import dataclasses
import pickle
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slime.observability.trace_utils import trace_span
from slime.rollout.groups import copy_sample
from slime.utils.types import MultimodalTypes, ParamInfo, Sample

Status = Sample.Status
MOE = SimpleNamespace(num_layers=2, moe_router_topk=3, sglang_speculative_algorithm=None)


def int32(values) -> str:
    return base64.b64encode(np.array(values, dtype="<i4").tobytes()).decode()


def test_defaults():
    sample = Sample()
    assert (sample.prompt, sample.tokens, sample.response, sample.response_length) == ("", [], "", 0)
    assert sample.status is Status.PENDING
    assert sample.reward is None
    assert sample.loss_mask is None
    assert sample.remove_sample is False
    assert {status.value for status in Status} == {"pending", "completed", "truncated", "aborted", "failed"}


def test_dict_round_trip_keeps_unknown_attributes_and_leaves_its_input():
    sample = Sample(index=3, status=Status.TRUNCATED, metadata={"a": 1})
    sample.source = "web"
    sample.spec_info.add(
        {"spec_accept_token_num": 3, "spec_draft_token_num": 4, "spec_verify_ct": 2, "completion_tokens": 8}
    )
    data = sample.to_dict()
    assert data["status"] == "truncated"
    assert data["spec_info"]["spec_draft_token_num"] == 4
    kept = copy.deepcopy(data)
    again = Sample.from_dict(data)
    assert data == kept
    assert again == sample
    assert again.source == "web"
    assert Sample.from_dict({"status": "failed", "spec_info": {"spec_verify_ct": 1}}).spec_info.spec_verify_ct == 1
    with pytest.raises(KeyError):
        Sample.from_dict({})


@dataclasses.dataclass
class Mine(Sample):
    messages: list = dataclasses.field(default_factory=list)


def test_pickle_and_copies_of_subclasses():
    sample = Sample(tokens=[1], status=Status.ABORTED)
    assert pickle.loads(pickle.dumps(sample)) == sample
    with trace_span(sample, "generate"):  # gives it a trace
        pass
    mine = Mine(**sample.__dict__)
    assert mine.tokens == [1]
    assert mine.trace is sample.trace
    assert Sample(**sample.__dict__) == sample
    mine.messages.append({"role": "user"})
    for again in (copy.deepcopy(mine), copy_sample(mine), Mine.from_dict(mine.to_dict()), Mine(**mine.__dict__)):
        assert isinstance(again, Mine)
        assert again == mine
        assert again.trace == mine.trace
    assert type(Sample.from_dict(mine.to_dict())) is Sample
    assert Sample.from_dict(mine.to_dict()).messages == mine.messages


def test_rates():
    info = Sample.SpecInfo(spec_accept_token_num=3, spec_draft_token_num=4, spec_verify_ct=2, completion_token_num=9)
    assert (info.spec_accept_rate, info.spec_accept_length) == (0.75, 4.5)
    assert (Sample.SpecInfo().spec_accept_rate, Sample.SpecInfo().spec_accept_length) == (0.0, 0.0)
    cache = Sample.PrefixCacheInfo()
    assert cache.prefix_cache_hit_rate == 0.0
    cache.add({"cached_tokens": 3, "prompt_tokens": 4})
    cache.add({"prompt_tokens": 8})
    assert cache.prefix_cache_hit_rate == 0.25


def test_reward_value():
    assert Sample(reward=0.5).get_reward_value(SimpleNamespace(reward_key=None)) == 0.5
    assert Sample(reward={"acc": 1}).get_reward_value(SimpleNamespace(reward_key="acc")) == 1
    with pytest.raises(KeyError, match="index=7"):
        Sample(index=7, reward=0.5).get_reward_value(SimpleNamespace(reward_key="acc"))


def test_effective_response_length():
    assert Sample(response_length=4).effective_response_length == 4
    assert Sample(response_length=4, loss_mask=[1, 0, 1, 0]).effective_response_length == 2


def test_append_generated_then_tool_then_generated():
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(tokens=torch.tensor([3, 4]), log_probs=torch.tensor([-1.0, -2.0]), text="ab")
    sample.append_response_tokens(tokens=[5], trainable=False, text="[tool]")
    sample.append_response_tokens(tokens=(6,), log_probs=np.array([-3.0]), text="c")
    assert sample.tokens == [1, 2, 3, 4, 5, 6]
    assert sample.response == "ab[tool]c"
    assert sample.response_length == 4
    assert sample.loss_mask == [1, 1, 0, 1]
    assert sample.rollout_log_probs == [-1.0, -2.0, 0.0, -3.0]
    assert all(type(token) is int for token in sample.tokens)


def test_append_nothing_generated_still_defines_the_lists():
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=[], log_probs=[], text="", meta_info={"finish_reason": {"type": "abort"}})
    assert (sample.loss_mask, sample.rollout_log_probs, sample.status) == ([], [], Status.ABORTED)


def test_an_empty_list_of_log_probs_is_none():
    sample = Sample(tokens=[1])
    sample.append_response_tokens(tokens=None, log_probs=[], text="a")
    sample.append_response_tokens(tokens=[2, 3], log_probs=[], trainable=False, text="b")
    sample.append_response_tokens(tokens=[4], log_probs=[-1.0], text="c")
    sample.append_response_tokens(tokens=[5], log_probs=torch.tensor([]), trainable=False)
    assert (sample.tokens, sample.response) == ([1, 2, 3, 4, 5], "abc")
    assert (sample.loss_mask, sample.rollout_log_probs) == ([0, 0, 1, 0], [0.0, 0.0, -1.0, 0.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": [1], "log_probs": []}, "1 tokens but 0 log_probs"),
        ({"tokens": [1, 2], "log_probs": [-1.0]}, "2 tokens but 1 log_probs"),
        ({"tokens": [1]}, "need log_probs"),
        ({"tokens": [1], "log_probs": [-1.0], "trainable": False}, "must not carry log_probs"),
        ({"log_probs": [-1.0]}, "without tokens"),
    ],
)
def test_wrong_appends_leave_the_sample_as_it_was(arguments, message):
    sample = Sample(index=5, tokens=[9], response="x")
    before = copy.deepcopy(sample)
    with pytest.raises(ValueError, match=message):
        sample.append_response_tokens(**arguments, text="more")
    assert sample == before


def test_appends_extend_the_lists_that_callers_hold():
    tokens, mask, log_probs, versions = [1, 2], [1], [-1.0], ["7"]
    sample = Sample(tokens=tokens, loss_mask=mask, rollout_log_probs=log_probs, response_length=1)
    sample.weight_versions = versions
    sample.append_response_tokens(tokens=[3, 4], log_probs=[-2.0, -3.0])
    sample.append_response_tokens(tokens=torch.tensor([5]), trainable=False)
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "8"}
    sample.append_response_tokens(tokens=[6], log_probs=[-4.0], meta_info=meta)
    assert (tokens, mask, log_probs) == ([1, 2, 3, 4, 5, 6], [1, 1, 1, 0, 1], [-1.0, -2.0, -3.0, 0.0, -4.0])
    assert versions == ["7", "8"]
    assert sample.tokens is tokens
    assert sample.loss_mask is mask
    assert sample.rollout_log_probs is log_probs
    empty = Sample(tokens=[], rollout_log_probs=(held := []), loss_mask=[])
    empty.append_response_tokens(tokens=[1], log_probs=[-1.0])
    assert empty.rollout_log_probs is held
    assert held == [-1.0]


def test_arrays_and_tuples_become_lists_and_stay_as_they_were():
    tokens, log_probs = torch.tensor([1, 2]), np.array([-1.0])
    sample = Sample(tokens=tokens, loss_mask=(1,), rollout_log_probs=log_probs, response_length=1)
    sample.append_response_tokens(tokens=[3], log_probs=[-2.0])
    assert (sample.tokens, sample.loss_mask, sample.rollout_log_probs) == ([1, 2, 3], [1, 1], [-1.0, -2.0])
    assert (tokens.tolist(), log_probs.tolist()) == ([1, 2], [-1.0])


STOP = {"finish_reason": {"type": "stop"}, "weight_version": "9", "cached_tokens": 3, "prompt_tokens": 5}
STOP |= {"spec_verify_ct": 2, "completion_tokens": 4}


@pytest.mark.parametrize(
    ("meta", "error"),
    [
        ({**STOP, "top_p_token_ids": [1], "top_p_token_offsets": [0, 5]}, ValueError),
        ({**STOP, "top_p_token_ids": [1], "top_p_token_offsets": ["x", "y"]}, ValueError),
        ({**STOP, "routed_experts": [1, 2, 3]}, TypeError),  # args that know nothing of layers
        ({**STOP, "weight_versions": [{"version": "9"}]}, KeyError),  # a span without its start
        ({**STOP, "weight_versions": [{"version": "9", "start": "later"}]}, ValueError),
        ({**STOP, "finish_reason": {"kind": "stop"}}, KeyError),
        ({**STOP, "cached_tokens": "many"}, TypeError),
    ],
)
def test_no_failure_leaves_a_trace_in_the_sample_or_its_lists(meta, error):
    args = SimpleNamespace(sglang_speculative_algorithm="EAGLE")
    sample = Sample(index=5, tokens=[9, 8], response="x", response_length=1, loss_mask=[1], rollout_log_probs=[-1.0])
    sample.append_response_tokens(args, tokens=[7], log_probs=[-2.0], meta_info={**STOP, "weight_version": "8"})
    held = dict(sample.__dict__)
    before = copy.deepcopy(sample)
    with pytest.raises(error):
        sample.append_response_tokens(args, tokens=[1, 2], log_probs=[-1.0, -2.0], text="more", meta_info=meta)
    assert sample == before
    assert list(sample.__dict__) == list(held)
    assert all(sample.__dict__[name] is value for name, value in held.items())
    sample.append_response_tokens(args, tokens=[1], log_probs=[-3.0], meta_info=STOP)
    assert sample.tokens == [9, 8, 7, 1]


def test_a_value_that_ends_in_the_middle_leaves_the_sample_as_it_was():
    def broken():
        yield -1.0
        raise KeyboardInterrupt

    sample = Sample(tokens=[9], response="x")
    before = copy.deepcopy(sample)
    with pytest.raises(KeyboardInterrupt):
        sample.append_response_tokens(tokens=[1, 2], log_probs=broken(), text="more")
    assert sample == before


def test_earlier_tokens_without_log_probs():
    sample = Sample(tokens=[1, 2, 3], response_length=2)
    with pytest.raises(ValueError, match="2 earlier response tokens have no rollout_log_probs"):
        sample.append_response_tokens(tokens=[4], log_probs=[-1.0])
    sample.append_response_tokens(tokens=[4], trainable=False)
    assert sample.rollout_log_probs == [0.0, 0.0, 0.0]
    assert sample.loss_mask == [1, 1, 0]


@pytest.mark.parametrize(
    ("kind", "status"),
    [("length", Status.TRUNCATED), ("abort", Status.ABORTED), ("stop", Status.COMPLETED), ("other", Status.PENDING)],
)
def test_terminal_information(kind, status):
    sample = Sample()
    meta = {
        "finish_reason": {"type": kind}, "weight_version": "4", "cached_tokens": 1, "prompt_tokens": 2,
        "spec_verify_ct": 5,
    }  # fmt: skip
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info=meta)
    assert sample.status is status
    assert sample.weight_versions == ["4"]
    assert sample.prefix_cache_info.total_prompt_tokens == 2
    assert sample.spec_info.spec_verify_ct == 0
    sample.update_from_meta_info(SimpleNamespace(sglang_speculative_algorithm="EAGLE"), meta)
    assert sample.spec_info.spec_verify_ct == 5
    assert sample.weight_versions == ["4", "4"]


def test_terminal_information_can_wait():
    sample = Sample()
    meta = {"finish_reason": {"type": "stop"}, "weight_version": "4"}
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info=meta, update_terminal_info=False)
    sample.append_response_tokens(tokens=[1], log_probs=[-1.0], meta_info={"finish_reason": None})
    assert sample.status is Status.PENDING
    assert sample.weight_versions == []


@pytest.mark.parametrize(
    "names", [("top_p_token_ids", "top_p_token_offsets"), ("top_p_kept_token_ids", "top_p_kept_token_offsets")]
)
@pytest.mark.parametrize("encode", [int32, list, lambda v: np.array(v, dtype="<i4").tobytes(), torch.tensor])
def test_top_p_masks_are_merged(names, encode):
    sample = Sample(tokens=[0])
    ids, offsets = names
    sample.append_response_tokens(
        tokens=[1, 2], log_probs=[-1, -1], meta_info={ids: encode([7, 8, 9]), offsets: encode([0, 1, 3])}
    )
    sample.append_response_tokens(tokens=[3], trainable=False)
    sample.append_response_tokens(tokens=[4], log_probs=[-1], meta_info={ids: encode([5]), offsets: encode([0, 1])})
    assert sample.rollout_top_p_token_ids.dtype == torch.int32
    assert sample.rollout_top_p_token_ids.tolist() == [7, 8, 9, 5]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 1, 3, 3, 4]


def test_top_p_masks_come_as_engines_tell_them():
    sample = Sample(tokens=[0])
    meta = {"output_token_sampling_mask": [[7], [8, 9], []]}
    sample.append_response_tokens(tokens=[7, 9, 1], log_probs=[-1, -1, -1], meta_info=meta)
    assert sample.rollout_top_p_token_ids.tolist() == [7, 8, 9]
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 1, 3, 3]
    with pytest.raises(ValueError, match=r"top-p offsets must have 2 entries from 0 to 3, got 3 entries"):
        sample.append_response_tokens(
            tokens=[1], log_probs=[-1], meta_info={"output_token_sampling_mask": [[1, 2], [3]]}
        )


def test_tool_text_before_the_first_top_p_mask_is_empty_but_sampled_tokens_must_have_one():
    sample = Sample(tokens=[0])
    sample.append_response_tokens(tokens=[1, 2], trainable=False)
    assert sample.rollout_top_p_token_ids is None
    meta = {"top_p_token_ids": [5], "top_p_token_offsets": [0, 1]}
    sample.append_response_tokens(tokens=[3], log_probs=[-1], meta_info=meta)
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 0, 0, 1]
    sampled = Sample(tokens=[0])
    sampled.append_response_tokens(tokens=[1], log_probs=[-1])
    with pytest.raises(ValueError, match="rollout_top_p_token_offsets has 2 entries, expected 3"):
        sampled.append_response_tokens(tokens=[3], log_probs=[-1], meta_info=meta)
    with pytest.raises(ValueError, match="rollout_top_p_token_offsets has 4 entries, expected 5"):
        sample.append_response_tokens(tokens=[3], log_probs=[-1])


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [([5], None), (None, [0, 1]), ([5], [0, 1, 1]), ([5], [1, 1]), ([5, 6], [0, 1]), ("not base64!", [0, 1])],
)
def test_broken_top_p_masks_are_refused(ids, offsets):
    meta = {"top_p_token_ids": ids, "top_p_token_offsets": offsets}
    with pytest.raises(ValueError):
        Sample().append_response_tokens(tokens=[1], log_probs=[-1], meta_info=meta)


def routes(rows):
    """Per row the same expert in the one layer."""
    return {"routed_experts": np.array(rows, dtype=np.int32)}


ONE = SimpleNamespace(num_layers=1, moe_router_topk=1, sglang_speculative_algorithm=None)


def held(sample):
    return sample.rollout_routed_experts.flatten().tolist()


def test_a_continuation_keeps_the_routes_of_what_was_sampled():
    """A prompt of 2 tokens; 2 are sampled, then the request is aborted; the rest is read again in a new prefill."""
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(ONE, tokens=[3, 4], log_probs=[-1, -1], meta_info=routes([1, 1, 1]))
    sample.append_response_tokens(ONE, tokens=[5], log_probs=[-1], meta_info=routes([2, 2, 2, 2]))
    assert held(sample) == [1, 1, 1, 2]
    # text of a tool has no routes until it is read; what follows it is new
    sample.append_response_tokens(ONE, tokens=[6, 7], trainable=False)
    assert held(sample) == [1, 1, 1, 2]
    sample.append_response_tokens(ONE, tokens=[8], log_probs=[-1], meta_info=routes([3] * 7))
    assert held(sample) == [1, 1, 1, 2, 3, 3, 3]
    # an answer without a new token changes nothing
    sample.append_response_tokens(ONE, tokens=[], log_probs=[], meta_info=routes([4] * 7))
    assert held(sample) == [1, 1, 1, 2, 3, 3, 3]
    # nor do rows from a later token on replace what is held
    sample.append_response_tokens(
        ONE, tokens=[9], log_probs=[-1], meta_info={**routes([5] * 6), "routed_experts_start_len": 2}
    )
    assert held(sample) == [1, 1, 1, 2, 3, 3, 3, 5]


def test_a_new_start_takes_the_new_routes():
    """Routes that stayed behind when a sample was made a prompt again are of other tokens."""
    sample = Sample(tokens=[1, 2])
    sample.append_response_tokens(ONE, tokens=[3, 4], log_probs=[-1, -1], meta_info=routes([1, 1, 1]))
    sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs = [1, 2, 9, 9, 9], 0, None, None
    sample.append_response_tokens(ONE, tokens=[3], log_probs=[-1], meta_info=routes([2] * 5))
    assert held(sample) == [2] * 5
    sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs = [1, 2], 1, [1], [-1.0]
    sample.append_response_tokens(ONE, tokens=[3], log_probs=[-1], meta_info=routes([3] * 2))
    assert held(sample) == [3, 3]


def test_routed_experts_splice():
    sample = Sample(tokens=[1, 2])
    first = np.arange(2 * 2 * 3)
    sample.append_response_tokens(MOE, tokens=[3], log_probs=[-1], meta_info={"routed_experts": int32(first)})
    assert sample.rollout_routed_experts.shape == (2, 2, 3)
    new = np.arange(100, 100 + 1 * 2 * 3)
    meta = {"routed_experts": int32(new), "routed_experts_start_len": 2}
    sample.append_response_tokens(MOE, tokens=[4], log_probs=[-1], meta_info=meta)
    expected = np.concatenate([first.reshape(2, 2, 3), new.reshape(1, 2, 3)])
    assert np.array_equal(sample.rollout_routed_experts.numpy(), expected)


@pytest.mark.parametrize(
    "meta",
    [
        {"routed_experts": int32(range(5))},
        {"routed_experts": int32(range(6)), "routed_experts_start_len": 1},
        {"routed_experts": int32(range(18)), "routed_experts_start_len": -1},
    ],
)
def test_broken_routed_experts_are_refused(meta):
    sample = Sample(tokens=[1, 2])
    with pytest.raises(ValueError, match="routed_experts"):
        sample.append_response_tokens(MOE, tokens=[3], log_probs=[-1], meta_info=meta)


def test_inconsistent_lengths_are_refused():
    with pytest.raises(ValueError, match="loss_mask has 1 entries, expected 2"):
        Sample(tokens=[1, 2], response_length=2, loss_mask=[1], rollout_log_probs=[0, 0]).append_response_tokens(
            text=""
        )


def test_other_types():
    assert [kind.placeholder for kind in MultimodalTypes.all()] == ["<image>", "<video>", "<audio>"]
    assert MultimodalTypes.get("video") is MultimodalTypes.VIDEO
    assert MultimodalTypes.get("smell") is None
    assert ParamInfo("w", torch.float32, (2,), {}, 8, 0).size == 8


def test_types_import_without_torch():
    code = "import slime.utils.types, slime.utils.misc, slime.utils.async_utils, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
