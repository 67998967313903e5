"""Rollouts on disk: what is written is what is trained on later, named by rollout, subsampled from both ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.ray.manager.conversion import load_dump, save_dump
from slime.utils.types import Sample
from tests.support.arguments import run_args


def dump_args(tmp_path: Path, **changes: Any) -> Any:
    template = str(tmp_path / "dumps" / "{rollout_id}.pt")
    base = {
        "save_debug_rollout_data": template,
        "load_debug_rollout_data": template,
    }
    return run_args(**{**base, **changes})


def numbered(count: int) -> list[Sample]:
    return [
        Sample(
            index=i,
            group_index=i // 2,
            rollout_id=i,
            prompt=[{"role": "user", "content": f"{i}+1="}],
            tokens=[1, 2, i],
            response_length=1,
            reward={"score": 0.5 * i, "kind": "ok"},
            loss_mask=[1],
            rollout_log_probs=[-0.1 * i],
            status=Sample.Status.TRUNCATED if i % 2 else Sample.Status.COMPLETED,
            metadata={"source_name": "sums"},
            weight_versions=["3"],
        )
        for i in range(count)
    ]


def test_what_is_read_equals_what_was_written(tmp_path: Path) -> None:
    samples = numbered(5)
    samples[0].own_attribute = [1, 2]  # type: ignore[attr-defined]
    save_dump(dump_args(tmp_path), 7, samples)
    restored = load_dump(dump_args(tmp_path), 7)
    assert [s.to_dict() for s in restored] == [s.to_dict() for s in samples]


def test_layout_of_the_file(tmp_path: Path) -> None:
    save_dump(dump_args(tmp_path), 7, numbered(2))
    save_dump(dump_args(tmp_path), "eval_9", numbered(1))
    for name, rollout_id, count in (("7", 7, 2), ("eval_9", 9, 1)):
        data = torch.load(tmp_path / "dumps" / f"{name}.pt", weights_only=True)
        assert data["rollout_id"] == rollout_id
        assert [s["index"] for s in data["samples"]] == list(range(count))
        assert data["samples"][0]["status"] == "completed"
    assert sorted(p.name for p in (tmp_path / "dumps").iterdir()) == ["7.pt", "eval_9.pt"]


@pytest.mark.parametrize(
    ("count", "ratio", "kept"),
    [
        (10, 0.5, [0, 1, 7, 8, 9]),  # n = 5: the first 2 and the last 3
        (10, 0.4, [0, 1, 8, 9]),
        (10, 0.15, [9]),  # n = 1: none of the front
        (10, 0.05, []),
        (4, 1.0, [0, 1, 2, 3]),
    ],
)
def test_subsampling_keeps_both_ends(tmp_path: Path, count: int, ratio: float, kept: list[int]) -> None:
    save_dump(dump_args(tmp_path), 0, numbered(count))
    args = dump_args(tmp_path, load_debug_rollout_data_subsample=ratio)
    assert [s.index for s in load_dump(args, 0)] == kept


def test_a_dump_that_is_not_there_names_file_and_flag(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as absent:
        load_dump(dump_args(tmp_path), 3)
    text = str(absent.value)
    assert "--load-debug-rollout-data" in text
    assert str(tmp_path / "dumps" / "3.pt") in text
    assert "rollout 3" in text


def test_a_file_that_is_no_dump_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "dumps").mkdir()
    (tmp_path / "dumps" / "0.pt").write_text("not a dump")
    with pytest.raises(ValueError, match=r"--load-debug-rollout-data: .*0\.pt is not a rollout dump"):
        load_dump(dump_args(tmp_path), 0)
