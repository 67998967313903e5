"""Calls of ``slime.utils.types``, the types of rollout functions and filters, and data sources."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput, MetricGatherer
from slime.utils.types import MultimodalTypes, Sample
from tests.support.reference_calls import Call
from tests.support.rollout_args import rollout_args

TYPES, BASE, FILTERS = "slime.utils.types.", "slime.rollout.base_types.", "slime.rollout.filter_hub.base_types."
SOURCE = "slime.rollout.data_source."
ALL_FIELDS: dict[str, Any] = {
    "index": 3, "prompt": "p", "tokens": [1, 2, 3], "response": "r", "response_length": 2, "label": "l", "reward": 0.5,
    "loss_mask": [1, 0], "status": Sample.Status.TRUNCATED, "metadata": {"rm_type": "f1"},
}  # fmt: skip


def fields_arrive(sample: Any) -> None:
    assert {name: getattr(sample, name) for name in ALL_FIELDS} == ALL_FIELDS
    assert sample.effective_response_length == 1


def answered() -> Sample:
    """One prompt token, then one response token."""
    return Sample(tokens=[7, 8], response="a", response_length=1, loss_mask=[1], rollout_log_probs=[-1.0])


def generated(_: Any, sample: Sample) -> None:
    assert (sample.tokens, sample.response, sample.response_length) == ([7, 8, 9, 10], "abc", 3)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 1], [-1.0, -0.5, -0.25])
    assert (sample.status, sample.weight_versions) == (Sample.Status.COMPLETED, ["4"])


def told_by_a_tool(_: Any, sample: Sample) -> None:
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 0, 0], [-1.0, 0.0, 0.0])
    assert sample.status is Sample.Status.PENDING


def counted(_: Any, info: Any) -> None:
    assert info.to_dict() == {
        "spec_accept_token_num": 6, "spec_draft_token_num": 9, "spec_verify_ct": 3, "completion_token_num": 8,
    }  # fmt: skip
    assert (info.spec_accept_rate, info.spec_accept_length) == (6 / 9, 8 / 3)


def cached(_: Any, info: Any) -> None:
    assert info.to_dict() == {"cached_tokens": 4, "total_prompt_tokens": 8}
    assert info.prefix_cache_hit_rate == 0.5


ENGINE = SimpleNamespace(sglang_speculative_algorithm=None)
STOPPED = {"finish_reason": {"type": "stop"}, "weight_version": "4"}
SPEC = {"spec_accept_token_num": 6, "spec_draft_token_num": 9, "spec_verify_ct": 3}
SPEC_COUNTS = {**SPEC, "completion_token_num": 8}

TYPE_CALLS = [
    Call(TYPES + "Sample", ALL_FIELDS, fields_arrive),
    Call(TYPES + "Sample.Status", {"value": "pending"}, Sample.Status.PENDING),
    Call(TYPES + "Sample.SpecInfo", SPEC_COUNTS, lambda info: counted(None, info)),
    Call(
        TYPES + "Sample.SpecInfo.add",
        {"meta_info": {**SPEC, "completion_tokens": 8}},
        counted,
        on=Sample.SpecInfo,
    ),
    Call(TYPES + "Sample.SpecInfo.to_dict", {}, SPEC_COUNTS, on=lambda: Sample.SpecInfo(6, 9, 3, 8)),
    Call(TYPES + "Sample.SpecInfo.from_dict", {"data": SPEC_COUNTS}, lambda info: counted(None, info)),
    Call(TYPES + "Sample.SpecInfo.from_dict", {"data": {}}, Sample.SpecInfo()),
    Call(TYPES + "Sample.PrefixCacheInfo", {"cached_tokens": 4, "total_prompt_tokens": 8}, lambda i: cached(None, i)),
    Call(
        TYPES + "Sample.PrefixCacheInfo.add",
        {"meta_info": {"cached_tokens": 4, "prompt_tokens": 8}},
        cached,
        on=Sample.PrefixCacheInfo,
    ),
    Call(
        TYPES + "Sample.PrefixCacheInfo.to_dict",
        {},
        {"cached_tokens": 1, "total_prompt_tokens": 2},
        on=lambda: Sample.PrefixCacheInfo(1, 2),
    ),
    Call(TYPES + "Sample.PrefixCacheInfo.from_dict", {"data": {"cached_tokens": 4}}, Sample.PrefixCacheInfo(4, 0)),
    Call(
        TYPES + "Sample.to_dict",
        {},
        lambda found: {**found, "status": "aborted", "index": 5} == found or pytest.fail(str(found)),
        on=lambda: Sample(index=5, status=Sample.Status.ABORTED),
    ),
    Call(
        TYPES + "Sample.from_dict",
        {"data": {"status": "failed", "index": 5, "of_my_own": 1}},
        lambda s: (s.status, s.index, s.of_my_own) == (Sample.Status.FAILED, 5, 1) or pytest.fail(str(s)),
    ),
    Call(
        TYPES + "Sample.get_reward_value",
        {"args": SimpleNamespace(reward_key="score")},
        -1.0,
        on=lambda: Sample(reward={"score": -1.0}),
    ),
    Call(
        TYPES + "Sample.append_response_tokens",
        {
            "args": ENGINE,
            "tokens": [9, 10],
            "log_probs": [-0.5, -0.25],
            "trainable": True,
            "meta_info": STOPPED,
            "text": "bc",
            "update_terminal_info": True,
        },
        generated,
        on=answered,
    ),
    Call(TYPES + "Sample.append_response_tokens", {"tokens": [9, 10], "trainable": False}, told_by_a_tool, on=answered),
    Call(
        TYPES + "Sample.update_from_meta_info",
        {"args": ENGINE, "meta_info": {"finish_reason": {"type": "length"}, "weight_version": "4"}},
        lambda _, s: (s.status, s.weight_versions) == (Sample.Status.TRUNCATED, ["4"]) or pytest.fail(str(s)),
        on=answered,
    ),
    Call(
        TYPES + "ParamInfo",
        {"name": "w", "dtype": "bfloat16", "shape": (2, 3), "attrs": {"tp": True}, "size": 12, "src_rank": 1},
        lambda p: (p.name, p.shape, p.size, p.src_rank) == ("w", (2, 3), 12, 1) or pytest.fail(str(p)),
    ),
    Call(
        TYPES + "MultimodalTypes.all",
        {},
        [MultimodalTypes.IMAGE, MultimodalTypes.VIDEO, MultimodalTypes.AUDIO],
    ),
    Call(TYPES + "MultimodalTypes.get", {"name": "video"}, MultimodalTypes.VIDEO),
    Call(TYPES + "MultimodalTypes.get", {"name": "smell"}, None),
]

SAMPLES = [[Sample(index=0)], [Sample(index=1)]]


def rewarded(*rewards: float) -> dict[str, Any]:
    return {"args": SimpleNamespace(reward_key=None), "samples": [Sample(reward=reward) for reward in rewards]}


def filtered(keep: bool, reason: str | None, fallback: bool) -> Any:
    def check(output: Any) -> None:
        assert (output.keep, output.reason) == (keep, reason)
        assert keep or output.keep_when_insufficient is fallback

    return check


def counted_drops() -> MetricGatherer:
    gatherer = MetricGatherer()
    for reason in ("zero_std_1.0", "zero_std_1.0", "long", None):
        gatherer.on_dynamic_filter_drop(reason)
    return gatherer


OUTPUT_CALLS = [
    Call(BASE + "RolloutFnTrainOutput", {"samples": SAMPLES}, RolloutFnTrainOutput(SAMPLES, None)),
    Call(
        BASE + "RolloutFnTrainOutput", {"samples": SAMPLES, "metrics": {"m": 1}}, lambda o: o.metrics["m"] == 1 or 1 / 0
    ),
    Call(BASE + "RolloutFnEvalOutput", {"data": {}, "metrics": {"m": 1}}, RolloutFnEvalOutput({}, {"m": 1})),
    Call(
        BASE + "call_rollout_fn",
        {
            "fn": lambda args, n, source, evaluation: [[source] * n],
            "*args": [1, 2, Sample(index=7)],
            "evaluation": False,
        },
        lambda output: [[s.index for s in g] for g in output.samples] == [[7, 7]] or pytest.fail(str(output)),
    ),
    Call(
        BASE + "call_rollout_fn",
        {
            "fn": lambda args, *, evaluation, more: {"set": {"rewards": [more]}},
            "*args": [1],
            "evaluation": True,
            "more": 4,
        },
        lambda output: output.data["set"]["rewards"] == [4] or pytest.fail(str(output)),
    ),
    Call(
        FILTERS + "DynamicFilterOutput",
        {"keep": False, "reason": "long", "keep_when_insufficient": True},
        DynamicFilterOutput(keep=False, reason="long", keep_when_insufficient=True),
    ),
    Call(FILTERS + "call_dynamic_filter", {"fn": None, "*args": [1, []]}, DynamicFilterOutput(True)),
    Call(
        FILTERS + "call_dynamic_filter",
        {"fn": lambda args, samples, **kwargs: len(samples) > kwargs["least"], "*args": [None, [1]], "least": 1},
        DynamicFilterOutput(False),
    ),
    *(  # drop iff not keep and not (keep_when_insufficient and remaining <= target)
        Call(
            FILTERS + "should_drop_dynamic_filter_output",
            {
                "output": DynamicFilterOutput(keep, keep_when_insufficient=fallback),
                "remaining_batch_size": remaining,
                "target_data_size": 4,
            },
            drop,
        )
        for keep, fallback, remaining, drop in [
            (True, False, 9, False),
            (False, False, 4, True),
            (False, True, 4, False),
            (False, True, 5, True),
        ]
    ),
    Call(FILTERS + "MetricGatherer", {}, lambda gatherer: gatherer.collect() == {} or pytest.fail("not empty")),
    Call(
        FILTERS + "MetricGatherer.on_dynamic_filter_drop",
        {"reason": "long"},
        lambda _, g: g.collect() == {"rollout/dynamic_filter/drop_long": 1} or pytest.fail(str(g.collect())),
        on=MetricGatherer,
    ),
    Call(
        FILTERS + "MetricGatherer.collect",
        {},
        lambda found: (
            {**found, "rollout/dynamic_filter/drop_zero_std_1.0": 2, "rollout/dynamic_filter/drop_long": 1} == found
            or 1 / 0
        ),
        on=counted_drops,
    ),
    *(
        Call(
            f"slime.rollout.filter_hub.dynamic_sampling_filters.{name}",
            lambda rewards=rewards: rewarded(*rewards),
            filtered(keep, reason, fallback),
        )
        for name, fallback in (("check_reward_nonzero_std", False), ("check_reward_nonzero_std_with_fallback", True))
        for rewards, keep, reason in (([1.0, 0.0], True, None), ([1.0, 1.0], False, "zero_std_1.0"))
    ),
]


def source_args(**more: Any) -> Any:
    folder = Path(tempfile.mkdtemp())
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"p{i}", "label": f"l{i}"}) + "\n" for i in range(3)))
    values = {"prompt_data": str(prompts), "save": str(folder), "load": str(folder), "hf_checkpoint": None, **more}
    return rollout_args(**values)


def source(kind: type = RolloutDataSourceWithBuffer) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        from slime.rollout import data_source
        from tests.support.rollout_args import CharTokenizer

        patch.setattr(data_source, "load_tokenizer", lambda *a, **k: CharTokenizer())
        patch.setattr(data_source, "load_processor", lambda *a, **k: None, raising=False)
        return kind(source_args())


def plain_source() -> Any:
    return source(RolloutDataSource)


def drawn(groups: Any) -> None:
    assert [[(s.prompt, s.group_index, s.index) for s in group] for group in groups] == [
        [("p0", 0, 0), ("p0", 0, 1)], [("p1", 1, 2), ("p1", 1, 3)],
    ]  # fmt: skip


def a_group() -> list[Sample]:
    return [Sample(index=90, prompt="mine"), Sample(index=91, prompt="mine")]


def saved_and_read(_: Any, saved: Any) -> None:
    assert len(list((Path(saved.args.save) / "rollout").glob("global_dataset_state_dict_7.*"))) == 1
    saved.get_samples(1)
    saved.load(7)
    drawn(saved.get_samples(2))


def add_refused() -> Any:
    """A data source without buffer refuses; the call is judged by its error."""
    held = plain_source()

    class Refusing:
        def add_samples(self, *args: Any, **kwargs: Any) -> str:
            with pytest.raises(RuntimeError):
                held.add_samples(*args, **kwargs)
            return "refused"

    return Refusing()


SOURCE_CALLS = [
    *(
        Call(f"{SOURCE}{name}.get_samples", {"num_samples": 2}, drawn, on=maker)
        for name, maker in [("RolloutDataSource", plain_source), ("DataSource", source)]
    ),
    *(
        Call(f"{SOURCE}{name}.save", {"rollout_id": 7}, saved_and_read, on=maker)
        for name, maker in [("RolloutDataSource", plain_source), ("DataSource", source)]
    ),
    *(
        Call(f"{SOURCE}{name}.load", given, None, on=maker)  # a missing file is fine
        for name, maker in [("RolloutDataSource", plain_source), ("DataSource", source)]
        for given in ({}, {"rollout_id": None}, {"rollout_id": 4})
    ),
    Call(f"{SOURCE}DataSource.__len__", {}, 3, on=source),
    Call(f"{SOURCE}RolloutDataSource.add_samples", lambda: {"samples": [a_group()]}, "refused", on=add_refused),
    *(
        Call(
            f"{SOURCE}{name}.add_samples",
            lambda: {"samples": [a_group()]},
            lambda _, s: [x.index for x in s.get_samples(2)[0]] == [90, 91] or pytest.fail("not first"),
            on=source,
        )
        for name in ("DataSource", "RolloutDataSourceWithBuffer")
    ),
    Call(
        f"{SOURCE}RolloutDataSourceWithBuffer.update_metadata",
        {"metadata": {"a": 1}},
        lambda _, s: s.get_metadata() == {"a": 1} or pytest.fail(str(s.get_metadata())),
        on=source,
    ),
    Call(f"{SOURCE}RolloutDataSourceWithBuffer.get_metadata", {}, {}, on=source),
    Call(f"{SOURCE}RolloutDataSourceWithBuffer.get_buffer_length", {}, 0, on=source),
    Call(
        f"{SOURCE}pop_first",
        lambda: {"args": None, "rollout_id": None, "buffer": [["a"], ["b"], ["c"]], "num_samples": 2},
        lambda found, _, given: (found, given["buffer"]) == ([["a"], ["b"]], [["c"]]) or pytest.fail(str(found)),
    ),
    *(
        Call(
            f"{SOURCE}{name}",
            lambda: {"args": source_args(rollout_global_dataset=False, prompt_data=None)},
            lambda s: [len(g) for g in s.get_samples(2)] == [2, 2] or pytest.fail("no blank samples"),
        )
        for name in ("RolloutDataSource", "RolloutDataSourceWithBuffer")
    ),
]
CALLS = [*TYPE_CALLS, *OUTPUT_CALLS, *SOURCE_CALLS]
