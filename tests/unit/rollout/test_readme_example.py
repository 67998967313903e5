"""The plug-in that the README shows works as it stands there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from slime.rollout.base_types import iter_samples
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample
from tools.markdown import read_page

README = Path(__file__).resolve().parents[3] / "README.md"
NAME = "readme_example_plugin"


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    code = next(fence.text for fence in read_page(README).fences if fence.language == "python")
    module = ModuleType(NAME)
    exec(compile(code, str(README), "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


def test_the_readme_plugin_asks_twice_and_trains_on_the_models_words_only(cluster, make_args, plugin):
    args = make_args(
        custom_rm_path=f"{NAME}.last_word",
        custom_generate_function_path=f"{NAME}.two_turns",
        n_samples_per_prompt=1,
        rollout_max_response_len=len(plugin.AGAIN) + 20,
    )
    samples = list(iter_samples(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples))
    assert len(samples) == 4
    assert len(cluster.requests) == 8
    again = [ord(c) for c in plugin.AGAIN]
    for sample in samples:
        first, second = sample.response.split(plugin.AGAIN)
        assert sample.loss_mask == [1] * len(first) + [0] * len(again) + [1] * len(second)
        assert sample.tokens == [ord(c) for c in sample.prompt + sample.response]
        assert sample.status == Sample.Status.COMPLETED


def test_the_readme_plugin_keeps_to_the_length_limit(cluster, make_args, plugin):
    args = make_args(
        custom_rm_path=f"{NAME}.last_word",
        custom_generate_function_path=f"{NAME}.two_turns",
        rollout_max_response_len=len(plugin.AGAIN),
    )
    samples = list(iter_samples(generate_rollout(args, 0, RolloutDataSourceWithBuffer(args)).samples))
    assert len(cluster.requests) == len(samples) == 8


async def test_the_readme_reward(plugin):
    def sample(response: str) -> Sample:
        return Sample(response=response, label="42")

    assert await plugin.last_word(None, sample("It is 42<|im_end|>")) == 1.0
    assert await plugin.last_word(None, sample("42 or 43<|im_end|>")) == 0.0
    assert await plugin.last_word(None, sample("")) == 0.0
