"""Engines that join, leave and die at many random moments, and real ones: at the wrong moment, and with their node."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.servers.engine_client import EngineClient
from tests.integration.test_loop_elastic_engines import (
    DEADLINE_S,
    check_samples,
    engines,
    server_of,
    serving,
    wait_until,
)
from tests.support.engine_churn import churn_engines
from tests.support.engine_kills import ENGINE_WORDS, rollout_client
from tests.support.imports import ROOT
from tests.support.machines import Machines
from tests.support.run_train import Run, read_metric, rl_flags, sums_file
from tests.support.standin_fleet import standin_fleet
from tools.tiny_model import make_tiny_checkpoint

__all__ = ["engines"]  # a fixture
pytestmark = [pytest.mark.integration, pytest.mark.soak]
KEY = "of-the-test"
CHANGES = int(os.environ.get("SLIME_SOAK_KILLS", "20")) * 3
FLAGS = """--num-rollout 100000 --rollout-max-response-len 256
    --custom-rm-path tests.support.rollout_hooks.parity_reward
    --save-debug-rollout-data {folder}/dump_{{rollout_id}}.pt"""


def flags_of(folder: Path, words: str) -> list[str]:
    flags = rl_flags(make_tiny_checkpoint(folder / "model"), sums_file(folder / "sums.jsonl"))
    return [*flags, *FLAGS.format(folder=folder).split(), *words.split()]


def last_rollout(run: Run) -> int:
    """The last rollout that was trained on."""
    return int(max(read_metric(run.run_dir, "train/loss"), default=-1))


def end_and_check(run: Run, folder: Path, pushed_again: int | None = None) -> dict[str, float]:
    """Two rollouts later: nothing is amiss with samples, tokens and versions; return the counts of engines.

    ``pushed_again``: the rollout in the middle of which weights were pushed.
    """
    last = last_rollout(run) + 2
    run.wait_for(rf"rollout {last} of ", DEADLINE_S)
    run.send(signal.SIGTERM)
    ended = run.finish(60.0)
    assert ended.returncode == 143, ended.output
    run.assert_nothing_left()
    check_samples(folder, last + 1, pushed_again)
    assert max(ended.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    names = ("serving", "added", "removed", "lost")
    return {name: ended.metric(f"rollout/engines/{name}").get(last, 0.0) for name in names}


@pytest.mark.timeout(600)
def test_standins_join_leave_and_die_at_many_random_moments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    with (
        standin_fleet(monkeypatch, 2, ENGINE_WORDS, use_fault_tolerance=True) as (standins, router),
        rollout_client(monkeypatch, tmp_path) as make_args,
    ):
        print(churn_engines(monkeypatch, standins, router, make_args, CHANGES))


@pytest.mark.timeout(2400)
def test_the_only_engine_dies_while_another_is_added(tmp_path: Path, engines: Callable[..., str]) -> None:
    """It takes the weights of then from a push in the middle of the rollout, and so does the successor of the lost."""
    words = "--rollout-num-gpus 1 --rollout-max-engines 2 --use-fault-tolerance"
    words += f" --sglang-api-key {KEY}"
    with Run(flags_of(tmp_path, words), tmp_path / "run") as run:
        run.wait_for(r"rollout 1 of ", DEADLINE_S)
        table = engines(run, "list")
        only, (url,) = server_of(run, 0, table), re.findall(r" 0 +(http://\S+) ", table)
        assert engines(run, "add") == "being started: engine 1\n"
        assert re.search(r" 1 .* starting$", engines(run, "list"), re.MULTILINE)
        wait_until(run, lambda: EngineClient(url, KEY).num_requests() > 0)
        os.kill(only, signal.SIGKILL)
        run.wait_for(rf"\(pid {only}, .* was ended by signal 9", DEADLINE_S)
        run.wait_for(r"It was the last one that served", DEADLINE_S)
        line = run.wait_for(r"generating rollout \d+: every engine was lost; those .* wait for weights", DEADLINE_S)
        pushed = int(re.findall(r"generating rollout (\d+)", line)[0])
        wait_until(run, lambda: serving(run) == 2)
        assert end_and_check(run, tmp_path, pushed) == {"serving": 2, "added": 1, "removed": 0, "lost": 1}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("notice", ["drain-node", "SIGTERM"])
def test_a_node_that_ray_takes_away_is_replaced(tmp_path: Path, notice: str) -> None:
    """Its engine leaves in time, no request breaks off, and one is added on a node that joins."""
    with contextlib.ExitStack() as stack:
        # Ray's sockets live under its directory, and their paths must be short.
        root = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True))
        machines = stack.enter_context(Machines(Path(root), head_slots=2, slots=1))
        leaving = machines.add()
        words = "--rollout-num-gpus 2 --rollout-max-engines 2 --drain-timeout 30"
        run = stack.enter_context(Run(flags_of(tmp_path, words), tmp_path / "run", env=machines.joining))

        def command(*words: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", "slime", "engines", *words, "--run-dir", str(run.run_dir)],
                env={**os.environ, **machines.joining}, cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S,
            )  # fmt: skip
            return done.stdout or done.stderr

        run.wait_for(r"rollout 1 of ", DEADLINE_S)
        if notice == "SIGTERM":
            leaving.terminate()
            within = r"1\d"  # half of the 30 s that Ray gives it
        else:
            machines.drain(leaving, 120)
            within = "30"  # --drain-timeout
        run.wait_for(rf"Ray takes nodes away: engines 1 leave within {within} s", DEADLINE_S)
        run.wait_for(r"engine 1 was removed", DEADLINE_S)
        leaving.switch_off()
        wait_until(run, lambda: serving(run) == 1)
        assert "the Ray cluster has no room for engine 2" in command("add")
        machines.add()
        assert command("add") == "being started: engine 3\n"
        wait_until(run, lambda: serving(run) == 2)
        assert end_and_check(run, tmp_path) == {"serving": 2, "added": 1, "removed": 1, "lost": 0}
