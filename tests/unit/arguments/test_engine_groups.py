"""Engines of a deployment are planned, counted and refused while flags are resolved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime.arguments import ArgumentError
from tests.support.arguments import dry


def deployment(folder: Path, group: str) -> Path:
    path = folder / "engines.yaml"
    path.write_text(f"sglang:\n  - name: actor\n    server_groups:\n      - {group}\n")
    return path


def test_engines_are_those_of_the_groups() -> None:
    two_models = Path(__file__).parents[2] / "data" / "arguments" / "two_models.yaml"
    args = dry("--sglang-config", two_models, "--rollout-num-gpus", "42")
    assert args.rollout_num_engines == 6  # 1 prefill, 4 decode, 1 of the judge; 8 slots are kept free
    assert dry("--prefill-num-servers", "1", "--rollout-num-gpus", "6").rollout_num_engines == 6


@pytest.mark.parametrize(
    ("group", "slots", "message"),
    [
        ("{num_gpus: 12, num_gpus_per_engine: 12}", 12, "num_gpus_per_engine 12 slots spans nodes of --num-gpus-per-n"),
        ("{num_gpus: 8, num_gpus_per_engine: 3}", 8, "8 slots .* are no multiple of 3 per engine"),
        ("{num_gpus: 8}", 9, "actor 8 = 8 slots, but --rollout-num-gpus is 9; make them equal"),
        ("{num_gpus: 8}", 0, "actor 8 = 8 slots, but --rollout-num-gpus is 0; make them equal"),
    ],
)
def test_groups_that_make_no_whole_engines(tmp_path: Path, group: str, slots: Any, message: str) -> None:
    path = deployment(tmp_path, group)
    with pytest.raises(ArgumentError, match=f"--sglang-config {path}: .*{message}"):
        dry("--sglang-config", path, "--rollout-num-gpus", slots)
    dry("--sglang-config", path, "--rollout-num-gpus", slots, "--debug-train-only")  # no engines: nothing to refuse


def test_nodes_of_another_size_hold_the_same_engines(tmp_path: Path) -> None:
    path = deployment(tmp_path, "{num_gpus: 12, num_gpus_per_engine: 12}")
    assert dry("--sglang-config", path, "--rollout-num-gpus", "12", "--num-gpus-per-node", "4").rollout_num_engines == 1
