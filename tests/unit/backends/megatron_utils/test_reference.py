from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from slime.backends.megatron_utils.train.weight_backup import refreshed_reference
from tests.support.arguments import run_args


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints of rollouts 0 to 6; the last one is tracked."""
    for iteration in range(7):
        directory = tmp_path / f"iter_{iteration:07d}"
        directory.mkdir()
        for name in ("metadata.json", ".metadata", "common.pt"):
            (directory / name).touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("6\n")
    return tmp_path


def find(root: Path, **overrides: Any) -> tuple[str, int] | None:
    return refreshed_reference(
        run_args(**{"load": str(root), "finetune": False, "ref_update_interval": 3, **overrides})
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("step", "interval", "expected"),
    # the actor becomes the reference after rollouts 2, 5, ... with an interval of 3
    [(None, 3, 5), (5, 3, 5), (4, 3, 2), (2, 3, 2), (1, 3, None), (None, 1, 6), (None, 7, 6), (None, 8, None)],
)
def test_the_actor_of_the_last_refresh(root: Path, step: int | None, interval: int, expected: int | None) -> None:
    found = find(root, ckpt_step=step, ref_update_interval=interval)
    assert found == (None if expected is None else (str(root), expected))


def test_nothing_without_a_resume(root: Path, tmp_path: Path) -> None:
    assert find(root, ref_update_interval=None) is None
    assert find(root, finetune=True) is None
    assert find(tmp_path / "absent") is None
    assert find(root, load=None) is None


def test_a_refresh_that_was_not_saved_is_said(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in (root / "iter_0000005").iterdir():
        path.unlink()
    (root / "iter_0000005").rmdir()
    with caplog.at_level(logging.WARNING):
        assert find(root) is None
    assert "after rollout 5" in caplog.text
