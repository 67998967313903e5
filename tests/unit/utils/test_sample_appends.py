"""Any series of appends against a slow model of a sample: one record per token."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.utils.types import Sample

ARGS = SimpleNamespace(num_layers=2, moe_router_topk=1, sglang_speculative_algorithm="EAGLE")
FINISH = {"stop": "completed", "length": "truncated", "abort": "aborted", "tool": None}


@dataclass
class Call:
    """One append: tokens of an engine (with a top-p set and a log-prob each) or of a tool."""

    tokens: list[int]
    sampled: bool
    masks: list[list[int]]
    finish: str | None
    form: str

    def arguments(self) -> dict:
        make = {"list": list, "tensor": torch.tensor, "array": np.array}[self.form]
        given: dict = {"tokens": make(self.tokens), "text": "".join(map(chr, self.tokens)), "trainable": self.sampled}
        if self.sampled:
            given["log_probs"] = make([-float(token) for token in self.tokens])
        offsets = [sum(map(len, self.masks[:n])) for n in range(len(self.tokens) + 1)]
        meta: dict = {"cached_tokens": 1, "prompt_tokens": 2, "spec_verify_ct": 3, "weight_version": "v"}
        if self.sampled:
            meta |= {
                "top_p_token_ids": [i for kept in self.masks for i in kept],
                "top_p_token_offsets": offsets,
            }
        if self.finish:
            meta["finish_reason"] = {"type": self.finish}
        return {**given, "meta_info": meta}


@st.composite
def calls(draw) -> Call:
    tokens = draw(st.lists(st.integers(65, 90), min_size=1, max_size=4))
    masks = [draw(st.lists(st.integers(0, 9), max_size=3)) for _ in tokens]
    return Call(
        tokens,
        draw(st.booleans()),
        masks,
        draw(st.sampled_from([None, *FINISH])),
        draw(st.sampled_from(["list", "tensor", "array"])),
    )


@settings(max_examples=60, deadline=None)
@given(series=st.lists(calls(), max_size=5), prompt=st.lists(st.integers(0, 5), max_size=3))
def test_appends_against_a_record_per_token(series: list[Call], prompt: list[int]):
    sample = Sample(tokens=list(prompt))
    records: list[tuple[int, int, float, list[int]]] = []
    status, finished = "pending", 0
    for call in series:
        sample.append_response_tokens(ARGS, **call.arguments())
        for token, kept in zip(call.tokens, call.masks, strict=True):
            records.append((token, 1, -float(token), kept) if call.sampled else (token, 0, 0.0, []))
        if call.finish:
            finished += 1
            status = FINISH[call.finish] or status
    assert sample.tokens == prompt + [token for token, *_ in records]
    assert sample.response == "".join(chr(token) for token, *_ in records)
    assert sample.response_length == len(records)
    assert (sample.loss_mask or []) == [trained for _, trained, *_ in records]
    assert (sample.rollout_log_probs or []) == [log_prob for *_, log_prob, _ in records]
    assert sample.effective_response_length == sum(trained for _, trained, *_ in records)
    assert sample.status.value == status
    assert sample.weight_versions == ["v"] * finished
    assert sample.prefix_cache_info.to_dict() == {"cached_tokens": finished, "total_prompt_tokens": 2 * finished}
    assert sample.spec_info.spec_verify_ct == 3 * finished
    if any(call.sampled for call in series):
        ids, offsets = sample.rollout_top_p_token_ids.tolist(), sample.rollout_top_p_token_offsets.tolist()
        assert [ids[a:b] for a, b in itertools.pairwise(offsets)] == [kept for *_, kept in records]
        assert offsets[0] == 0
    else:
        assert sample.rollout_top_p_token_offsets is None
    again = Sample.from_dict(sample.to_dict())
    assert again.to_dict().keys() == sample.to_dict().keys()
    assert (again.tokens, again.status, again.spec_info) == (sample.tokens, sample.status, sample.spec_info)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_routed_experts_against_a_row_per_token(data):
    sample = Sample(tokens=[0, 0])
    rows: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        tokens = data.draw(st.lists(st.just(1), min_size=1, max_size=3))
        start = data.draw(st.integers(0, len(rows)))
        total = len(sample.tokens) + len(tokens) - 1
        new = [[data.draw(st.integers(0, 7)) for _ in range(2)] for _ in range(total - start)]
        meta = {"routed_experts": np.array(new).reshape(-1), "routed_experts_start_len": start}
        sample.append_response_tokens(ARGS, tokens=tokens, log_probs=[0.0] * len(tokens), meta_info=meta)
        rows += new[len(rows) - start :]  # what is held stays
        assert sample.rollout_routed_experts.tolist() == [[[a], [b]] for a, b in rows]
