"""A run of ``train.py`` one process of which is killed at random moments: how long it takes, and what is trained on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from slime.rollout.debug_data import load_rollout
from slime.utils.types import Sample
from tests.support.run_train import Run, read_metric

DEADLINE_S = 300.0
LONGEST_WAIT_S = 8.0


@dataclass
class Kills:
    """Calls ``kill`` at random moments; ``folder`` has the dumps (``dump_<rollout>.pt``).

    The run has recovered after a rollout that began with the loss behind it: ``recovered(kills so far)`` says so of the
    metrics.
    """

    run: Run
    folder: Path
    kill: Callable[[], None]
    recovered: Callable[[int], bool]
    seconds: list[float] = field(default_factory=list)

    def repeat(self, times: int, seed: int) -> str:
        """Kill ``times`` times, waiting for the recovery from each; return what happened, in words."""
        moments = random.Random(seed)
        for number in range(1, times + 1):
            time.sleep(moments.uniform(0.0, LONGEST_WAIT_S))
            self.kill()
            killed = time.monotonic()
            while not self.recovered(number):
                waited = time.monotonic() - killed
                assert waited < DEADLINE_S, f"kill {number}:\n{self.run.output}{self.run.logs()}"
                assert self.run.process.poll() is None, f"the run has ended:\n{self.run.output}{self.run.logs()}"
                time.sleep(0.05)
            self.seconds.append(time.monotonic() - killed)
        rollouts = self.check()
        in_order = sorted(self.seconds)
        return (
            f"{times} kills in {rollouts} rollouts, every sample once; until a whole rollout had all of them again "
            f"{in_order[len(in_order) // 2]:.1f} s (median), {in_order[-1]:.1f} s (longest)"
        )

    def check(self) -> int:
        """No group is lost, none trained twice, nothing trained that other weights had generated; return rollouts."""
        rollouts = max(read_metric(self.run.run_dir, "train/loss")) + 1
        indices: list[int | None] = []
        for rollout_id in range(rollouts):
            samples = load_rollout(self.folder / f"dump_{rollout_id}.pt")
            assert all(s.status in (Sample.Status.COMPLETED, Sample.Status.TRUNCATED) for s in samples)
            assert all(s.response_length == len(s.rollout_log_probs or ()) > 0 for s in samples)
            indices += sorted(sample.index for sample in samples if sample.index is not None)
        assert indices == list(range(len(indices))), "samples are missing, or there twice"
        assert max(read_metric(self.run.run_dir, "train/train_rollout_logprob_abs_diff").values()) <= 1e-5
        return rollouts


def reached(run: Run, name: str, at_least: float) -> int | None:
    """Return the first rollout after which the metric was so high, None before."""
    return min((step for step, value in read_metric(run.run_dir, name).items() if value >= at_least), default=None)


def serves_again(run: Run, lost: str, at_least: int, serving: str, count: int) -> bool:
    """Whether a rollout has had ``count`` engines at its end, after one that knew of ``at_least`` losses."""
    since = reached(run, lost, at_least)
    values = read_metric(run.run_dir, serving)
    return since is not None and any(step >= since and value == count for step, value in values.items())
