"""Checkpoints that are removed when a later one is complete."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from slime.arguments import ArgumentError
from slime.backends.megatron_utils.checkpoints import directory
from tests.support.arguments import parse, run_args
from tests.unit.backends.megatron_utils.test_checkpoint_dir import write

TENS = [9, 19, 29, 39, 49]


@pytest.mark.parametrize(
    ("flags", "iterations", "removed"),
    [
        ({}, TENS, []),
        ({"most_recent_k": 1}, TENS, TENS[:-1]),
        ({"most_recent_k": 2}, TENS, TENS[:-2]),
        ({"most_recent_k": 9}, TENS, []),
        ({"save_retain_interval": 20}, TENS, [9, 29]),  # after 20 and 40 rollouts, and the last
        ({"save_retain_interval": 20, "most_recent_k": 3}, TENS, [9]),
        ({"most_recent_k": 1, "use_critic": True}, TENS, TENS[:-2]),
        ({"save_retain_interval": 30, "use_critic": True}, TENS, [9, 19]),
        ({"most_recent_k": 1, "ref_update_interval": 20}, TENS, [9, 19, 29]),  # the reference is that of rollout 39
        ({"most_recent_k": 1, "ref_ckpt_step": 9}, TENS, [19, 29, 39]),
        ({"most_recent_k": 1, "opd_teacher_ckpt_step": 19}, TENS, [9, 29, 39]),
        ({"most_recent_k": 1}, [9, 19, 49, 59, 69], [9, 19]),  # resumed from 39: later ones will be replaced
    ],
)
def test_what_is_outdated_after_rollout_49(flags: dict[str, int], iterations: list[int], removed: list[int]) -> None:
    assert directory.outdated(run_args(**flags), iterations, 49) == removed


def test_directories_and_states_of_rollouts_are_removed_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "rollout").mkdir()
    for iteration in (0, 1, 2):
        write(tmp_path, iteration)
        (tmp_path / f"rollout/global_dataset_state_dict_{iteration}.json").write_text("{}")
    others = [tmp_path / "iter_0000000.writing", tmp_path / "release", tmp_path / "iter_x"]
    for other in others:
        other.mkdir()
    directory.remove_outdated(run_args(most_recent_k=1), tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("iter_???????")) == ["iter_0000002"]
    assert [path.name for path in (tmp_path / "rollout").iterdir()] == ["global_dataset_state_dict_2.json"]
    assert all(other.is_dir() for other in others)
    assert directory.find_checkpoint(tmp_path)[1] == 2


def test_what_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (0, 1):
        write(tmp_path, iteration)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(directory.shutil, "rmtree", refuse)
        directory.remove_outdated(run_args(most_recent_k=1), tmp_path, 1)
    assert "iter_0000000, which is outdated: [Errno 13] Permission denied" in caplog.text
    assert directory.find_checkpoint(tmp_path)[1] == 1
    write(tmp_path, 2)  # what is left goes with the next one
    assert not list(tmp_path.glob("*.replaced"))


def test_flags(tmp_path: Path) -> None:
    saving = ["--save", tmp_path / "save", "--save-interval", 10]
    assert parse(*saving, "--most-recent-k", 2, "--save-retain-interval", 20).save_retain_interval == 20
    for words, message in (
        (["--save-retain-interval", 15], "is no multiple of --save-interval 10"),
        (["--most-recent-k", 0], "would keep no checkpoint"),
        (["--most-recent-k", -2], "--most-recent-k"),
    ):
        with pytest.raises(ArgumentError, match=message):
            parse(*saving, *words)
