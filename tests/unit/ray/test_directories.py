"""Directories that a run holds: every one it writes state to, before it changes anything."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime import driver
from slime.arguments.errors import ArgumentError
from slime.ray import directories
from slime.utils.directory_lock import NAME, DirectoryLock, HeldByAnother
from tests.support.arguments import run_args


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    directories.release()


def test_every_place_that_a_run_writes_state_to(tmp_path: Path) -> None:
    root = str(tmp_path)
    args = run_args(
        save=f"{root}/save", run_dir=f"{root}/run", save_hf=f"{root}/hf/model_{{rollout_id}}",
        save_debug_rollout_data=f"{root}/dumps/{{rollout_id}}.pt", save_debug_train_data=f"{root}/dumps/t/{{rank}}.pt",
        update_weight_transport="disk", update_weight_disk_dir=f"{root}/weights",
        update_weight_local_checkpoint_dir=f"{root}/local", ci_save_grad_norm=f"{root}/norm.pt",
    )  # fmt: skip
    directories.hold(args)
    directories.hold(args)
    assert {str(path.relative_to(root)) for path in tmp_path.rglob(f"*{NAME}")} == {
        f"save/{NAME}", f"run/{NAME}", f"hf/.model_{{rollout_id}}{NAME}", f"dumps/.{{rollout_id}}.pt{NAME}",
        f"dumps/t/.{{rank}}.pt{NAME}", f"weights/{NAME}", f"local/{NAME}", f".norm.pt{NAME}",
    }  # fmt: skip
    directories.release()
    assert not list(tmp_path.rglob(f"*{NAME}"))


@pytest.mark.parametrize("flags", [{"debug_rollout_only": True}, {"num_rollout": 0}, {"serve_only": True}], ids=str)
def test_what_is_only_read_is_not_held(tmp_path: Path, flags: dict[str, object]) -> None:
    directories.hold(run_args(save=f"{tmp_path}/save", run_dir=f"{tmp_path}/run", **flags))
    assert [path.parent.name for path in tmp_path.rglob(NAME)] == ["run"]


def test_the_critic_of_a_run_is_held_too(tmp_path: Path) -> None:
    flags = ["--advantage-estimator", "ppo", "--save", f"{tmp_path}/save", "--save-interval", "1"]
    directories.hold(run_args(*flags, "--critic-num-gpus-per-node", "1"))
    with pytest.raises(HeldByAnother, match=f"process {os.getpid()} on "):
        DirectoryLock(tmp_path / "save/critic" / NAME, f"--save {tmp_path}/save/critic", "another run")


def test_runs_of_other_names_share_a_directory_of_exports(tmp_path: Path) -> None:
    one = DirectoryLock(tmp_path / f".first_{{rollout_id}}{NAME}", "--save-hf", "another run")
    directories.hold(run_args(save_hf=f"{tmp_path}/second_{{rollout_id}}"))
    one.release()


SECOND = """
import sys
from slime import driver
from tests.support.arguments import run_args
save, run = sys.argv[1:]
sys.exit(driver.run(run_args(save=save, run_dir=run, save_interval=1, skip_first_look=True)))
"""


@pytest.mark.parametrize("shared", ["save", "run"])
def test_the_same_command_started_twice_is_refused_before_it_changes_anything(tmp_path: Path, shared: str) -> None:
    args = run_args(save=f"{tmp_path}/save", run_dir=f"{tmp_path}/run", save_interval=1)
    directories.hold(args)
    (tmp_path / "save/iter_0000003.writing").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = {"save": [f"{tmp_path}/save", f"{tmp_path}/run2"], "run": [f"{tmp_path}/save2", f"{tmp_path}/run"]}[shared]
    second = subprocess.run([sys.executable, "-c", SECOND, *other], capture_output=True, text=True, timeout=120)
    assert second.returncode == 2, second.stderr
    said = second.stderr.strip().splitlines()[-1]
    assert f"error: --{'run-dir' if shared == 'run' else 'save'} {tmp_path}/{shared} is being written by" in said
    assert f"process {os.getpid()} on " in said
    assert {path: path.read_bytes() for path in before} == before
    assert (tmp_path / "save/iter_0000003.writing").is_dir()
    assert not list(tmp_path.rglob("config.yaml"))


def test_trainers_elsewhere_may_see_what_this_host_does_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    directories.hold(run_args(save=f"{tmp_path}/file/save", actor_num_nodes=2))
    assert f"--save {tmp_path}/file/save is not locked against a second start: Not a directory" in caplog.text


def test_a_refused_start_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    first = DirectoryLock(tmp_path / "run" / NAME, "--run-dir", "another run")
    with pytest.raises(ArgumentError, match="another run"):
        directories.hold(run_args(save=f"{tmp_path}/save", run_dir=f"{tmp_path}/run"))
    assert not (tmp_path / "save" / NAME).exists()
    first.release()


def test_checkpoints_that_appear_during_the_start_are_not_overwritten(tmp_path: Path) -> None:
    args = run_args(save=f"{tmp_path}/save", load="/weights", save_interval=1, continues_own_checkpoints=True)
    directories.hold(args)
    (tmp_path / "save/latest_checkpointed_iteration.txt").write_text("3\n")
    with pytest.raises(ArgumentError, match="another run has saved checkpoints there while this one started"):
        driver._open(args)


@pytest.mark.parametrize("reason", [errno.EROFS, errno.EACCES, errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("flag", ["save", "run_dir"])
def test_a_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flag: str, reason: int
) -> None:
    def fails(self: DirectoryLock) -> int:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(DirectoryLock, "_open", fails)
    args = run_args(**{flag: f"{tmp_path}/x"})
    name = f"--{flag.replace('_', '-')} {tmp_path}/x"
    if flag == "run_dir" and reason in (errno.ENOSPC, errno.EDQUOT):
        directories.hold(args)  # a run does without what is for people
        assert name in caplog.text
        assert "MiB are free there" in caplog.text
    else:
        with pytest.raises(ArgumentError, match=f"{name} cannot be written: .*: {os.strerror(reason)}") as refused:
            directories.hold(args)
        assert ("free there" in str(refused.value)) == (reason in (errno.ENOSPC, errno.EDQUOT))
