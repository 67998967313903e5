"""Use of an engine's slots by the default rollout, over the mean time of a request.

A stand-in engine (a process of its own) runs ``--slots`` requests at a time, each for a lognormal time; the others wait
there. Slot use is the share of the slots' time in which they run a request, as the engine counts it, from the start of
the first rollout to the end of the last one, the ends of rollouts included. With over-sampling there is work for every
slot to the end; without it the slots run empty there. ``--concurrency`` is ``--sglang-server-concurrency``: as low as
``--slots`` nothing can wait at the engine, and a slot is empty for the way there and back. With ``--max-waiting`` the
engine refuses (503) what is more, as SGLang does with ``--max-queued-requests``.

    python -m benchmarks.slots --mean-seconds 0.2 1 5 --repeats 3
"""

from __future__ import annotations

import argparse
import os
import statistics

from benchmarks.rollout_runs import Run, rollout_args, run_rollouts
from tests.support.standin.process import standin_process

SAMPLES_PER_PROMPT = 4


def measure(
    mean: float,
    slots: int,
    concurrency: int,
    seconds: float,
    over_sampling: bool,
    seed: int,
    max_waiting: int | None = None,
) -> Run:
    """Two rollouts of about ``seconds`` s each."""
    groups = max(slots // SAMPLES_PER_PROMPT, round(seconds * slots / mean / SAMPLES_PER_PROMPT))
    surplus = 2 * slots // SAMPLES_PER_PROMPT if over_sampling else 0
    command = ["--slots", slots, "--mean-seconds", mean, "--sigma", 0.8, "--seed", seed]
    command += [] if max_waiting is None else ["--max-waiting", max_waiting]
    with standin_process(*command) as url:
        args = rollout_args(
            url,
            n_samples_per_prompt=SAMPLES_PER_PROMPT,
            rollout_batch_size=groups,
            over_sampling_batch_size=groups + surplus,
            sglang_server_concurrency=concurrency,
        )
        return run_rollouts(url, args, rollouts=2)


def _spread(shares: list[float]) -> str:
    return f"{statistics.median(shares):.1%} [{min(shares):.1%}, {max(shares):.1%}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mean-seconds", type=float, nargs="+", default=[0.2, 1.0, 5.0], help="of a request")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=256, help="most requests in flight")
    parser.add_argument("--max-waiting", type=int, help="requests that wait at the engine; it refuses more")
    parser.add_argument("--seconds", type=float, default=15.0, help="of one rollout, about; at least 5 mean times")
    parser.add_argument("--repeats", type=int, default=3)
    words = parser.parse_args()
    print(f"{'mean s':>7}{'over-sampling':>15}{'slot use [min, max]':>25}{'in flight':>11}"
          f"{'requests':>10}{'refused':>9}{'client CPU':>12}{'load':>6}")  # fmt: skip
    for mean in words.mean_seconds:
        for over_sampling in (True, False):
            seconds = max(words.seconds, 5 * mean)
            runs = [
                measure(mean, words.slots, words.concurrency, seconds, over_sampling, seed, words.max_waiting)
                for seed in range(words.repeats)
            ]
            print(
                f"{mean:7g}{'yes' if over_sampling else 'no':>15}"
                f"{_spread([run.slot_use(words.slots) for run in runs]):>25}"
                f"{statistics.median(run.in_flight_seconds / run.seconds for run in runs):11.1f}"
                f"{sum(run.counts['received'] for run in runs):10.0f}"
                f"{sum(run.counts['refused'] for run in runs):9.0f}"
                f"{statistics.median(run.cpu_seconds / run.seconds for run in runs):12.1%}{os.getloadavg()[0]:6.1f}",
                flush=True,
            )
    print(f"{words.repeats} runs each, {words.slots} slots, at most {words.concurrency} requests in flight; "
          f"{os.cpu_count()} cores")  # fmt: skip


if __name__ == "__main__":
    main()
