"""The small version of the delta weight sync: its report, and the part of its model that is trained."""

from __future__ import annotations

from examples.delta_weight_sync.run import EXAMPLE
from examples.quickstart.recipe import MODEL


def test_every_push_is_described():
    rows = [("perf/update_weights_density", 0.1812), ("perf/update_weights_wire_bytes", 412_345.0), ("train/loss", 1.0)]
    assert [EXAMPLE.describe({"name": name, "step": 3, "value": value}) for name, value in rows] == [
        "rollout   3: 18.1% of the weights' bytes were pushed as changed",
        "rollout   3: 0.41 MB were written",
        None,
    ]


def test_the_trained_part_is_small_enough_to_be_pushed_alone():
    """Attention against attention and MLP, without the embedding: q and o are square, k and v have fewer heads."""
    width, share = MODEL["hidden-size"], MODEL["num-key-value-heads"] / MODEL["num-attention-heads"]
    attention, mlp = (2 + 2 * share) * width**2, 3 * width * MODEL["intermediate-size"]
    assert attention / (attention + mlp) < 0.3
