"""Which sizes an engine can have."""

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
