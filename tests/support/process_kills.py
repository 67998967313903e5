"""A run of ``train.py`` whose processes are killed at random moments: how long it takes, and what is trained on."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime.rollout.debug_data import load_rollout
from slime.utils.types import Sample
from tests.support.run_train import Run, read_metric

DEADLINE_S = 300.0
LONGEST_WAIT_S = 4.0
"""A step of these runs takes less: all of its stages are met."""


@dataclass(frozen=True)
class Kind:
    """A kind of process: ``kill`` ends one, which ``counter`` counts (a metric).

    The run has recovered after a rollout at whose end the metric ``serving`` was ``count``, the loss behind it; without
    ``serving`` after the first rollout that knew of the loss.
    """

    name: str
    kill: Callable[[], None]
    counter: str
    serving: str = ""
    count: int = 0


@dataclass
class Kills:
    """Kills processes of ``run`` at random moments; ``folder`` has its dumps (``dump_<rollout>.pt``)."""

    run: Run
    folder: Path
    counted: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def repeat(self, kinds: Sequence[Kind], times: int, seed: int) -> str:
        """Kill each of ``kinds`` ``times`` times, in random order; wait for every recovery; return a line of each.

        ``SLIME_SOAK_SECONDS`` ends it earlier, after a recovery. No group is lost, none trained twice, and nothing
        trained that other weights had generated.
        """
        draw = random.Random(seed)
        order = [kind for kind in kinds for _ in range(times)]
        draw.shuffle(order)
        end = time.monotonic() + float(os.environ.get("SLIME_SOAK_SECONDS", "inf"))
        for kind in order:
            if time.monotonic() > end:
                break
            time.sleep(draw.uniform(0.0, LONGEST_WAIT_S))
            self.once(kind)
        rollouts = self.check()
        lines = [f"{rollouts} rollouts, every sample once; until one had all of them again:"]
        for name, seconds in self.seconds.items():
            middle, longest = statistics.median(seconds), max(seconds)
            lines.append(f"  {name}: {len(seconds)} kills, {middle:.1f} s (median), {longest:.1f} s (longest)")
        return "\n".join(lines)

    def once(self, kind: Kind) -> None:
        """Kill one, and wait until the run has recovered."""
        self.counted[kind.counter] += 1
        killed = time.monotonic()
        kind.kill()
        while not self._recovered(kind, self.counted[kind.counter]):
            what = f"kill {self.counted.total()}, a {kind.name}:\n{self.run.output}{self.run.logs()}"
            assert self.run.process.poll() is None, f"the run has ended after {what}"
            assert time.monotonic() - killed < DEADLINE_S, f"not recovered from {what}"
            time.sleep(0.25)  # it reads all metrics of the run
        self.seconds[kind.name].append(time.monotonic() - killed)
        print(f"kill {self.counted.total()}, {kind.name}: {self.seconds[kind.name][-1]:.1f} s", flush=True)

    def _recovered(self, kind: Kind, losses: int) -> bool:
        since = reached(self.run, kind.counter, losses)
        if since is None or not kind.serving:
            return since is not None
        values = read_metric(self.run.run_dir, kind.serving)
        return any(step >= since and value == kind.count for step, value in values.items())

    def check(self) -> int:
        """Every sample was trained on once, with the log-probs of its weights; return how many rollouts that were."""
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
