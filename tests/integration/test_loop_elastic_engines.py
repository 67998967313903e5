"""``slime engines`` on a run in progress: engines join and leave, and no sample, token or version is amiss."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from slime import __main__ as command
from slime.rollout.debug_data import load_rollout
from slime.utils.types import Sample
from tests.support.run_train import Run, command_line, read_metric, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

DEADLINE_S = 480.0


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the output of ``slime engines`` for a run. In this process: another one would import PyTorch for each."""
    monkeypatch.setattr(ray._private.ray_constants, "ENABLE_RAY_CLUSTER", True)  # put back what the command changes
    for name in ("RAY_AUTH_MODE", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def call(run: Run, *words: object, status: int = 0) -> str:
        capsys.readouterr()
        assert command.main(["engines", *map(str, words), "--run-dir", str(run.run_dir)]) == status, run.logs()
        printed = capsys.readouterr()
        return printed.err if status else printed.out

    return call


def wait_until(run: Run, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{run.output}{run.logs()}"
        assert run.process.poll() is None, f"the run has ended:\n{run.output}{run.logs()}"
        time.sleep(0.05)


def serving(run: Run) -> float:
    """Return the number of engines at the end of the last rollout."""
    found = read_metric(run.run_dir, "rollout/engines/serving")
    return found[max(found)] if found else 0


def pauses(run: Run, rank: int) -> int:
    """Count the pauses of an engine for a push."""
    return (run.run_dir / "logs" / f"engine_{rank}.log").read_text().count("POST /pause_generation")


def server_of(run: Run, rank: int, table: str) -> int:
    """The process that answers HTTP of an engine in what ``list`` has printed."""
    found = re.search(rf"  {rank} +http://127.0.0.1:(\d+) ", table)
    assert found, table
    lines = {pid: command_line(pid) for pid in run.processes()}
    of_engine = [pid for pid, line in lines.items() if re.search(rf"--port[ =]{found[1]}\b", line)]
    return next(pid for pid in of_engine if "process_supervisor" not in lines[pid])


def check_samples(folder: Path, rollouts: int, pushed_again: int | None = None) -> None:
    """Whole groups, each sample once and in the order of the prompts, all of its tokens of the newest weights.

    ``pushed_again``: the rollout in the middle of which weights were pushed once more.
    """
    indices: list[int | None] = []
    for rollout_id in range(rollouts):
        samples = load_rollout(folder / f"dump_{rollout_id}.pt")
        newest = {str(rollout_id + 1)} if pushed_again is None or rollout_id <= pushed_again else set()
        newest |= {str(rollout_id + 2)} if pushed_again is not None and rollout_id >= pushed_again else set()
        for sample in samples:
            assert sample.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
            assert 0 < sample.response_length == len(sample.rollout_log_probs or ()) <= 256
            assert newest.issuperset(sample.weight_versions)
            assert sample.weight_versions
        indices += sorted(sample.index for sample in samples if sample.index is not None)
    assert indices == list(range(16 * rollouts))


@pytest.mark.soak
@pytest.mark.parametrize("when", ["in a rollout", "in a push"])
def test_one_engine_becomes_three_and_one_again(tmp_path: Path, engines: Callable[..., str], when: str) -> None:
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    extra = f"""--num-rollout 100000 --rollout-max-response-len 256 --rollout-num-gpus 1 --rollout-max-engines 3
        --custom-rm-path tests.support.rollout_hooks.parity_reward
        --rollout-data-postprocess-path tests.support.rollout_hooks.stay_while_asked
        --save-debug-rollout-data {tmp_path}/dump_{{rollout_id}}.pt"""
    with Run([*flags, *extra.split()], tmp_path / "run") as run:
        run.wait_for(r"rollout 0 of ", DEADLINE_S)
        assert engines(run, "add", "--count", 2) == "being started: engine 1, engine 2\n"
        wait_until(run, lambda: serving(run) == 3)

        # One leaves while all generate: what it holds is sent to the others.
        assert engines(run, "remove", 2, "--timeout", 0).startswith("removed: engine 2")
        wait_until(run, lambda: serving(run) == 2)
        table = engines(run, "list")
        assert [line.split()[-1] for line in table.splitlines()[1:]] == ["serving"] * 2, table

        if when == "in a push":  # which the other engine holds up for longer than this one may wait for
            (run.run_dir / "stay").touch()
            wait_until(run, (run.run_dir / "stays").exists)
            slow, before = server_of(run, 0, table), pauses(run, 1)
            os.kill(slow, signal.SIGSTOP)
            (run.run_dir / "stay").unlink()
            wait_until(run, lambda: pauses(run, 1) > before)
            assert engines(run, "remove", 1, "--timeout", 1) == "removed: engine 1\n"
            os.kill(slow, signal.SIGCONT)
            run.wait_for(r"retrying the weight push without engine 1", DEADLINE_S)
        else:
            assert engines(run, "remove", 1, "--timeout", 0).startswith("removed: engine 1")
        wait_until(run, lambda: serving(run) == 1)
        assert "0 engines would be left, fewer than --rollout-min-engines 1" in engines(run, "remove", 0, status=1)
        last = max(read_metric(run.run_dir, "train/loss")) + 2
        run.wait_for(rf"rollout {last} of ", DEADLINE_S)
        run.send(signal.SIGTERM)
        ended = run.finish(60.0)
        assert ended.returncode == 143, ended.output
        run.assert_nothing_left()

    check_samples(tmp_path, last + 1)
    for which in ("min", "max"):
        versions = ended.metric(f"rollout/weight_version/{which}")
        assert all(version == rollout_id + 1 for rollout_id, version in versions.items())
    # Nothing was generated with the weights of the checkpoint: trainer and engines agree throughout.
    assert max(ended.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    counts = {name: ended.metric(f"rollout/engines/{name}")[last] for name in ("serving", "added", "removed")}
    assert counts == {"serving": 1, "added": 2, "removed": 2}
