"""A reader never sees a part of a checkpoint, whatever moment the writer is killed at."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from slime.backends.megatron_utils.checkpoints import directory as cd
from slime.utils.checkpoint_tracker import NOTE
from slime.utils.directory_lock import Owner

FILES = ("metadata.json", ".metadata", "common.pt", "__0_0.distcp")


def write(root: Path, iteration: int, content: str = "x") -> None:
    directory = cd.begin(root, iteration)
    for name in FILES:
        (directory / name).write_text(content)
    cd.publish(root, iteration)


def test_published_checkpoint_is_found(tmp_path: Path) -> None:
    write(tmp_path, 12)
    assert cd.is_megatron_checkpoint(tmp_path)
    assert cd.find_checkpoint(tmp_path) == (tmp_path / "iter_0000012", 12)
    assert (tmp_path / cd.TRACKER).read_text().strip() == "12"


def test_killed_while_writing_leaves_the_earlier_checkpoint_current(tmp_path: Path) -> None:
    write(tmp_path, 3)
    directory = cd.begin(tmp_path, 4)
    (directory / "common.pt").write_text("half")
    assert cd.find_checkpoint(tmp_path) == (tmp_path / "iter_0000003", 3)
    write(tmp_path, 4)  # the next run saves the same iteration: the leftover is not in the way
    assert cd.find_checkpoint(tmp_path)[1] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000003", "iter_0000004", NOTE, cd.TRACKER]


def test_killed_at_every_rename_of_a_second_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving iteration 5 again: after each single file-system step a complete iteration 5, old or new, is found."""
    real = os.replace
    for crash_after in range(4):
        root = tmp_path / str(crash_after)
        write(root, 5, "old")
        directory = cd.begin(root, 5)
        for name in FILES:
            (directory / name).write_text("new")
        calls = 0

        def stop_at(a: object, b: object, limit: int = crash_after) -> None:
            nonlocal calls
            if calls == limit:
                raise KeyboardInterrupt
            calls += 1
            real(a, b)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stop_at)
            with contextlib.suppress(KeyboardInterrupt):
                cd.publish(root, 5)
        found, iteration = cd.find_checkpoint(root)
        assert iteration == 5
        texts = {(found / name).read_text() for name in FILES}
        assert texts in ({"old"}, {"new"})
    assert calls == 3  # the last round was not interrupted: the cases cover every rename there is


def test_incomplete_checkpoint_is_refused_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "iter_0000001" / ".metadata").unlink()
    with pytest.raises(ValueError, match=r"iter_0000001 is incomplete: it has no \.metadata.*--ckpt-step"):
        cd.find_checkpoint(tmp_path)


def test_missing_step_lists_what_is_there(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with pytest.raises(FileNotFoundError, match=r"iter_0000007.*iter_0000001"):
        cd.find_checkpoint(tmp_path, step=7)


def test_release_checkpoint_and_garbage_tracker(tmp_path: Path) -> None:
    (tmp_path / "release").mkdir()
    for name in FILES:
        (tmp_path / "release" / name).write_text("x")
    (tmp_path / cd.TRACKER).write_text("release\n")
    assert cd.find_checkpoint(tmp_path) == (tmp_path / "release", None)
    (tmp_path / cd.TRACKER).write_text("12 apples")
    with pytest.raises(ValueError, match="12 apples"):
        cd.find_checkpoint(tmp_path)


def test_no_tracker_is_no_megatron_checkpoint(tmp_path: Path) -> None:
    assert not cd.is_megatron_checkpoint(tmp_path)
    assert not cd.is_megatron_checkpoint(None)


@pytest.mark.parametrize(
    ("files", "form"),
    [
        (FILES, cd.TORCH_DIST),
        (("mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"), cd.TORCH),
        ((".metadata", "__0_0.distcp"), cd.TORCH_DCP),
    ],
)
def test_the_format_is_seen_by_the_files(tmp_path: Path, files: tuple[str, ...], form: str) -> None:
    directory = cd.begin(tmp_path, 2)
    for name in files:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("x")
    cd.publish(tmp_path, 2)
    found, _ = cd.find_checkpoint(tmp_path)
    assert cd.stored_format(found) == form
    (found / files[0]).unlink()
    with pytest.raises(ValueError, match=f"is incomplete: it has no {re.escape(files[0])}"):
        cd.find_checkpoint(tmp_path)


def test_what_another_process_is_writing_is_not_removed(tmp_path: Path) -> None:
    writing = cd.begin(tmp_path, 1)
    started = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    parent = replace(Owner.here("checkpoint 1"), pid=os.getppid(), ticks=started)
    (tmp_path / ".writer.json").write_text(parent.to_json())
    with pytest.raises(RuntimeError, match=f"{writing} is being written by another run, process {os.getppid()} on"):
        cd.begin(tmp_path, 2)
    assert writing.is_dir()


def test_what_is_removed_or_replaced_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cd.begin(tmp_path, 1)
    cd.begin(tmp_path, 2)
    assert f"{tmp_path}/iter_0000001.writing was never completed, and is removed" in caplog.text
    cd.publish(tmp_path, 2)
    assert not list((tmp_path / "iter_0000002").iterdir())
    cd.begin(tmp_path, 2)
    cd.publish(tmp_path, 2)
    assert f"{tmp_path}/iter_0000002 was saved before, and is replaced" in caplog.text
