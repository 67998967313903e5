"""The generate function on the page about agents works as it stands there."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slime.batching.train_data import build_train_data
from slime.rollout import data_source, sglang_rollout
from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.servers import http_utils
from slime.utils.async_utils import run
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample
from tests.support.agents import BEGIN, END, ToolTokenizer, call_text, trained_text
from tests.support.rollout_args import rollout_args
from tests.support.standin import StandInCluster
from tools.markdown import read_page

PAGE = Path(__file__).resolve().parents[3] / "docs" / "en" / "advanced" / "agents.md"
NAME = "agents_page_example"


def model(ids: list[int], params: dict[str, Any]) -> list[int]:
    """Asks for the product that the question names, and then gives the result as its answer."""
    text = "".join(map(chr, ids))
    if f"{BEGIN}tool\n" in text:
        said = text.rsplit(f"{BEGIN}tool\n", 1)[1].split(END)[0]
    else:
        a, b = text.rsplit(f"{BEGIN}user\n", 1)[1].split(END)[0].split(" x ")
        said = call_text("multiply", {"a": a, "b": b})
    return [ord(c) for c in said + END]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    code = next(fence.text for fence in read_page(PAGE).fences if fence.language == "python")
    module = ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    monkeypatch.setattr(sglang_rollout, "load_tokenizer", lambda *a, **k: ToolTokenizer())
    monkeypatch.setattr(http_utils, "_http_client", None)
    SingletonMeta.clear_instances()
    yield module
    SingletonMeta.clear_instances()


@pytest.fixture
def cluster() -> Iterator[StandInCluster]:
    with StandInCluster(2, reply=model) as running:
        yield running


def run_example(
    example: ModuleType, cluster: StandInCluster, prompt: str, label: str, **overrides: Any
) -> list[Sample]:
    args = rollout_args(
        sglang_router_ip=cluster.host,
        sglang_router_port=cluster.port,
        custom_generate_function_path=f"{NAME}.generate",
        sglang_tool_call_parser=None,
        sglang_reasoning_parser=None,
        **overrides,
    )
    http_utils.init_http_client(args)
    sample = Sample(index=4, group_index=2, prompt=prompt, label=label)
    params = {"temperature": 1.0, "max_new_tokens": 200}
    try:
        return list(iter_samples(run(sglang_rollout.generate_and_rm(args, sample, params))))
    finally:
        example.Gateway(args).handle.stop()
        run(http_utils.get_http_client().close())


@pytest.mark.parametrize(("label", "reward"), [("42", 1.0), ("41", 0.0)])
def test_it_trains_on_both_turns_of_the_conversation(example, cluster, label, reward):
    [sample] = run_example(example, cluster, "6 x 7", label)
    call = call_text("multiply", {"a": "6", "b": "7"})
    assert trained_text(sample) == [call + END, "42" + END]
    assert sample.response == f"{call}{END}{BEGIN}tool\n42{END}{BEGIN}assistant\n42{END}"
    assert (sample.reward, sample.index, sample.group_index, sample.rollout_id) == (reward, 4, 2, 4)
    assert sample.metadata["use_tool"]
    assert len(cluster.requests) == 2
    assert len({headers["X-SMG-Routing-Key"] for engine in cluster.engines for headers in engine.headers}) == 1


def test_a_whole_rollout_of_it_becomes_training_data(example, cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(data_source, "load_tokenizer", lambda *a, **k: ToolTokenizer())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{i} x 7", "label": str(7 * i)}) + "\n" for i in range(6)))
    args = rollout_args(
        sglang_router_ip=cluster.host,
        sglang_router_port=cluster.port,
        custom_generate_function_path=f"{NAME}.generate",
        sglang_tool_call_parser=None,
        sglang_reasoning_parser=None,
        prompt_data=str(prompts),
        rollout_max_response_len=200,
    )
    http_utils.init_http_client(args)
    try:
        groups = sglang_rollout.generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples
    finally:
        example.Gateway(args).handle.stop()
        run(http_utils.get_http_client().close())
    samples = list(iter_samples(groups))
    assert len(groups) == 4
    assert [sample.reward for sample in samples] == [1.0] * 8
    assert sorted(sample.rollout_id for sample in samples) == list(range(8))
    assert sorted(sample.group_index for sample in samples) == [i // 2 for i in range(8)]
    assert example.Gateway(args).adapter.store == {}
    rewards = [sample.reward for sample in samples]
    data = build_train_data(args, samples, rewards, rewards)
    assert [sum(mask) for mask in data["loss_masks"]] == [sum(sample.loss_mask) for sample in samples]
    assert all(len(p) == n for p, n in zip(data["rollout_log_probs"], data["response_lengths"], strict=True))


def test_a_failed_tool_call_is_reported_to_the_model(example, cluster):
    [sample] = run_example(example, cluster, "six x 7", "42")
    assert trained_text(sample)[1].startswith("ValueError: invalid literal")
    assert sample.reward == 0.0


def test_a_question_that_fills_the_context_is_a_sample_without_a_response(example, cluster):
    [sample] = run_example(example, cluster, "6 x 7", "42", rollout_max_context_len=10)
    assert (sample.response_length, sample.reward, sample.status) == (0, 0.0, Sample.Status.TRUNCATED)
    assert cluster.requests == []
