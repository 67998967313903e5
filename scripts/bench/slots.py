"""How busy the default rollout keeps its request slots, over the mean time of a request.

A stand-in engine (a process of its own) takes a lognormal time per request; slots are ``--sglang-server-concurrency``.
Slot use is the share of the slots' time in which they have a request in flight, from the start of the first rollout to
the end of the last one, the ends of rollouts included; the engine's is without the way there and back, which on a busy
machine is mostly waiting for a processor. With over-sampling there is work for every slot to the end; without it the
slots run empty there.

    python -m scripts.bench.slots --mean-seconds 0.2 1 5 --repeats 3
"""

from __future__ import annotations

import argparse
import os
import statistics

from scripts.bench.rollout_runs import Run, rollout_args, run_rollouts
from scripts.bench.standin.process import standin_process

SAMPLES_PER_PROMPT = 4


def measure(mean: float, slots: int, seconds: float, over_sampling: bool, seed: int) -> Run:
    """Two rollouts of about ``seconds`` s each."""
    groups = max(slots // SAMPLES_PER_PROMPT, round(seconds * slots / mean / SAMPLES_PER_PROMPT))
    surplus = 2 * slots // SAMPLES_PER_PROMPT if over_sampling else 0
    with standin_process("--mean-seconds", mean, "--sigma", 0.8, "--seed", seed) as url:
        args = rollout_args(
            url,
            n_samples_per_prompt=SAMPLES_PER_PROMPT,
            rollout_batch_size=groups,
            over_sampling_batch_size=groups + surplus,
            sglang_server_concurrency=slots,
        )
        return run_rollouts(url, args, rollouts=2)


def _spread(shares: list[float]) -> str:
    return f"{statistics.median(shares):.1%} [{min(shares):.1%}, {max(shares):.1%}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mean-seconds", type=float, nargs="+", default=[0.2, 1.0, 5.0], help="of a request")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=15.0, help="of one rollout, about; at least 5 mean times")
    parser.add_argument("--repeats", type=int, default=3)
    words = parser.parse_args()
    print(f"{'mean s':>7}{'over-sampling':>15}{'slot use [min, max]':>25}{'engine [min, max]':>25}"
          f"{'requests':>10}{'client CPU':>12}")  # fmt: skip
    for mean in words.mean_seconds:
        for over_sampling in (True, False):
            seconds = max(words.seconds, 5 * mean)
            runs = [measure(mean, words.slots, seconds, over_sampling, seed) for seed in range(words.repeats)]
            cpu = statistics.median(run.cpu_seconds / run.seconds for run in runs)
            print(
                f"{mean:7g}{'yes' if over_sampling else 'no':>15}"
                f"{_spread([run.slot_use(words.slots) for run in runs]):>25}"
                f"{_spread([run.engine_use(words.slots) for run in runs]):>25}"
                f"{sum(run.counts['received'] for run in runs):10.0f}{cpu:12.1%}",
                flush=True,
            )
    print(f"{words.repeats} runs each, {words.slots} slots; load average {os.getloadavg()[0]:.1f}, "
          f"{os.cpu_count()} cores")  # fmt: skip


if __name__ == "__main__":
    main()
