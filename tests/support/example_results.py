"""Learning goals of the small versions of examples, with shuffled rewards as the control."""

from __future__ import annotations

from typing import Any

GAIN, OVER_CONTROL, DRIFT = 0.15, 0.15, 0.20
BY_CHANCE = 1 / 16 + 0.09
"""Of 16 answers, with four standard deviations of 128 problems."""
SLOW = {("adaptive_environments", "hunt"): 0.10, ("delta_weight_sync", "held_out"): 0.10}
"""Examples that learn less in the time of a small version: both gained 0.12.

Shuffled rewards move a model too, but in no direction.

Twenty-one recorded controls changed by -0.04 on average with a standard deviation of 0.12, from -0.35 to +0.14: a
random walk of the weights, and evaluations are samples of 64 to 2,048 problems. A single control may rise by two
standard deviations over their average.
"""


def change(result: dict[str, Any], data_set: str) -> float:
    """Return by how much the share of right answers rose."""
    return float(result["after"][data_set] - result["before"][data_set])


def check_result(learned: dict[str, Any], control: dict[str, Any], data_set: str) -> None:
    """Fail where the reward taught too little, or shuffled rewards as much."""
    gained, drifted = change(learned, data_set), change(control, data_set)
    assert gained >= SLOW.get((learned["example"], data_set), GAIN), f"{data_set}: {gained:+.3f}"
    assert drifted <= DRIFT, f"{data_set} with shuffled rewards: {drifted:+.3f}"
    assert gained >= drifted + OVER_CONTROL, f"{data_set}: {gained:+.3f}, with shuffled rewards {drifted:+.3f}"


def check_exchanged(result: dict[str, Any]) -> None:
    """Fail where answers are right that cannot be read in the picture: problems have those of others."""
    for shares in (result["before"], result["after"]):
        assert shares["exchanged"] <= BY_CHANCE, f"with exchanged pictures: {shares['exchanged']:.3f}"
