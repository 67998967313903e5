"""Sizes that an engine can have."""

from __future__ import annotations

import pytest

from slime.arguments import ArgumentError
from tests.support.arguments import dry, parse


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sglang-dp-size", 0], "--sglang-dp-size 0: at least 1"),
        (["--sglang-ep-size", 3], "--sglang-ep-size 3 must divide the tensor-parallel size 4 of an engine"),
        (["--sglang-moe-dp-size", 3], "--sglang-moe-dp-size 3 must divide the tensor-parallel size 4"),
        (["--sglang-moe-dp-size", 2, "--sglang-ep-size", 4], "--sglang-moe-dp-size 2 x --sglang-ep-size 4 must be"),
        (["--sglang-moe-dp-size", 2, "--sglang-pp-size", 2], "--sglang-moe-dp-size 2 excludes --sglang-pp-size 2"),
        (["--sglang-moe-dense-tp-size", 2], "--sglang-moe-dense-tp-size 2 must be 1 or the tensor-parallel size 4"),
    ],
)
def test_refused(words, message):
    with pytest.raises(ArgumentError, match=message):
        parse("--rollout-num-gpus", 4, "--rollout-num-gpus-per-engine", 4, *words)


def test_an_engine_on_several_nodes_has_whole_stages_on_each():
    twelve = ["--hf-checkpoint", "/nowhere", "--rollout-num-gpus", 12, "--rollout-num-gpus-per-engine", 12]
    for node, stages in ((4, 3), (6, 4), (6, 2), (2, 3)):
        assert dry(*twelve, "--num-gpus-per-node", node, "--sglang-pp-size", stages).sglang_pp_size == stages
    with pytest.raises(ArgumentError, match="--sglang-pp-size 3: an engine of 2 nodes"):
        dry(*twelve, "--num-gpus-per-node", 6, "--sglang-pp-size", 3)


def deployment(tmp_path, group: str) -> list:
    path = tmp_path / "engines.yaml"
    path.write_text(f"sglang:\n  - {{name: actor, server_groups: [{group}]}}\n")
    return ["--sglang-config", path, "--rollout-num-gpus", 4]


@pytest.mark.parametrize(
    ("group", "words", "message"),
    [
        ("{num_gpus: 4}", ["--sglang-pp-size", 2], "--rollout-num-gpus-per-engine 1 cannot hold --sglang-pp-size 2"),
        ("{num_gpus: 4, num_gpus_per_engine: 2, overrides: {tp_size: 4}}", [], "--sglang-tp-size 4: an engine has"),
        ("{num_gpus: 4, num_gpus_per_engine: 2, overrides: {ep_size: 3}}", [], "--sglang-ep-size 3 must divide"),
        ("{num_gpus: 4, num_gpus_per_engine: 2, overrides: {dp_size: 2}}", [], "needs --sglang-enable-dp-attention"),
    ],
)
def test_groups_of_a_deployment_are_checked_one_by_one(tmp_path, group, words, message):
    with pytest.raises(
        ArgumentError, match=f"model actor, group of regular engines, its values taken as flags.*{message}"
    ):
        dry(*deployment(tmp_path, group), *words)


def test_groups_need_not_fit_the_size_of_the_flags(tmp_path):
    group = "{num_gpus: 4, num_gpus_per_engine: 4, overrides: {dp_size: 2, enable_dp_attention: true}}"
    assert dry(*deployment(tmp_path, group), "--sglang-pp-size", 2).rollout_num_engines == 1
    assert dry(
        *deployment(tmp_path, "{num_gpus: 4}"),
        "--sglang-pp-size",
        2,
        "--debug-train-only",
        "--rollout-num-gpus-per-engine",
        2,
    )
