"""Gain of ``--partial-rollout`` when response lengths have a long tail: p99 = 10 x median.

Each way collects the same number of rollouts through the default rollout function from a stand-in engine that makes a
token per slot and step. Without over-sampling the slots run empty while the longest responses finish; with it their
groups are thrown away; with ``--partial-rollout`` they are continued in the next rollout. Wasted tokens are those the
engine made and no rollout returned or keeps. The bound is that of slots that are always full and waste nothing; where
groups are thrown away short responses are over-represented, so compare tokens/s before samples/s.

    python -m benchmarks.partial_rollout --rollouts 8 --repeats 3
"""

from __future__ import annotations

import argparse
import os
import statistics

from benchmarks.rollout_runs import Run, rollout_args, run_rollouts
from tests.support.standin.process import standin_process
from tests.support.standin.replies import LognormalLengths

SAMPLES_PER_PROMPT = 4
WAYS = {"no over-sampling": (0.0, False), "over-sampling": (0.5, False), "and partial": (0.5, True)}
"""Name -> surplus groups as a share of the rollout's, whether unfinished ones are continued."""


def measure(way: str, words: argparse.Namespace, seed: int) -> Run:
    """Collect the rollouts one way."""
    surplus, partial = WAYS[way]
    command = ["--tokens", words.median, "--p99-tokens", 10 * words.median, "--longest", 50 * words.median]
    with standin_process(
        *command, "--slots", words.slots, "--token-seconds", words.token_seconds, "--seed", seed
    ) as url:
        args = rollout_args(
            url,
            n_samples_per_prompt=SAMPLES_PER_PROMPT,
            rollout_batch_size=words.groups,
            over_sampling_batch_size=words.groups + round(surplus * words.groups),
            partial_rollout=partial,
            sglang_server_concurrency=4 * words.slots,
        )
        return run_rollouts(url, args, words.rollouts)


def mean_length(words: argparse.Namespace, draws: int = 200_000) -> float:
    """The mean length of a response."""
    lengths = LognormalLengths(words.median, 10 * words.median, 50 * words.median, seed=1)
    return statistics.fmean(lengths.draw() for _ in range(draws))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--median", type=int, default=200, help="median length in tokens")
    parser.add_argument("--token-seconds", type=float, default=0.001)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--groups", type=int, default=64, help=f"of a rollout, {SAMPLES_PER_PROMPT} samples each")
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    words = parser.parse_args()
    bound_tokens = words.slots / words.token_seconds
    bound_samples = bound_tokens / mean_length(words)
    print(f"{'':18}{'samples/s':>10}{'of bound [min, max]':>23}{'tokens/s':>10}{'of bound [min, max]':>23}"
          f"{'wasted':>9}{'slot use':>10}")  # fmt: skip
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for seed in range(words.repeats):
        for way in WAYS:
            runs[way].append(measure(way, words, seed))
    for way, several in runs.items():
        samples = [run.samples / run.seconds for run in several]
        tokens = [run.trained_tokens / run.seconds for run in several]
        wasted = [1 - (run.trained_tokens + run.kept_tokens) / run.counts["tokens"] for run in several]
        use = [run.slot_use(words.slots) for run in several]
        print(
            f"{way:18}{statistics.median(samples):10.1f}{_of(samples, bound_samples):>23}"
            f"{statistics.median(tokens):10.0f}{_of(tokens, bound_tokens):>23}"
            f"{statistics.median(wasted):9.1%}{statistics.median(use):10.1%}"
        )
    print(f"{'bound':18}{bound_samples:10.1f}{'':23}{bound_tokens:10.0f}")
    print(f"{words.repeats} runs of {words.rollouts} rollouts each, taking turns, {words.slots} slots; "
          f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")  # fmt: skip


def _of(values: list[float], bound: float) -> str:
    shares = [value / bound for value in values]
    return f"{statistics.median(shares):.1%} [{min(shares):.1%}, {max(shares):.1%}]"


if __name__ == "__main__":
    main()
