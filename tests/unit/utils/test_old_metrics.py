"""Functions about metrics as slime <= 0.3.1 has them, which log hooks reuse."""

from __future__ import annotations

import base64
import math
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from slime.observability import rollout_metrics, tracking
from slime.observability.metric_utils import compression_ratio, compute_pass_rate
from slime.observability.timer import Timer, get_timers, inverse_timer
from slime.utils.misc import decode_int32_meta_array
from slime.utils.types import Sample


def test_pass_rates_of_a_flat_list():
    """One right answer in four: 1/4, 1 - C(3,2)/C(4,2), and 1; then none."""
    assert compute_pass_rate([1, 0, 0, 0], 4) == {"pass@1": 0.25, "pass@2": 0.5, "pass@4": 1.0}
    assert compute_pass_rate([1, 0, 0, 0], 2, num_groups=2) == {"pass@1": 0.25, "pass@2": 0.5}
    assert compute_pass_rate([1, 0], 1) == {}
    with pytest.raises(AssertionError, match="3 rewards are not 1 groups of 2"):
        compute_pass_rate([1, 0, 1], 2)


def test_compression():
    size = len(zlib.compress(b"a" * 1000, 9))
    assert compression_ratio("a" * 1000) == (1000 / size, pytest.approx(100 * (1 - size / 1000)))
    assert compression_ratio("") == (math.inf, 0.0)
    assert compression_ratio(b"x" * 99, algorithm="lzma", level=1)[0] > 1
    with pytest.raises(ValueError, match="expected one of zlib, gzip, bz2, lzma"):
        compression_ratio("a", algorithm="zip")


def test_timers():
    Timer().reset()
    with Timer().context("old"):
        pass
    Timer().add("old", 5.0)
    Timer().start("outer")
    with inverse_timer("outer"):
        pass
    Timer().end("outer")
    assert Timer().log_dict() == get_timers().seconds()
    assert 5.0 <= Timer().log_dict()["old"] < 6.0
    Timer().reset("old")
    assert set(Timer().log_dict()) == {"outer"}
    Timer().reset()
    assert Timer().log_dict() == {}


def test_metrics_of_samples_with_arguments_made_by_hand():
    args = SimpleNamespace(advantage_estimator="grpo", rollout_num_gpus=2)
    samples = [
        Sample(index=n, group_index=0, rollout_id=n, response_length=2 * n, reward=1.0, status=Sample.Status.COMPLETED)
        for n in (1, 2)
    ]
    found = rollout_metrics.compute_metrics_from_samples(args, samples)
    assert found["response_len/mean"] == 3.0
    assert next(value for name, value in found.items() if name.startswith("zero_std/count_1")) == 1.0
    speed = rollout_metrics.compute_perf_metrics_from_samples(args, samples, 3.0)
    assert (speed["rollout_time"], speed["tokens_per_gpu_per_sec"]) == (3.0, 6 / 3.0 / 2)
    tracking.drain()
    rollout_metrics.log_rollout_data(7, args, samples, {"mine": 1.5}, 3.0)
    records = {record["name"]: record["value"] for record in tracking.drain()}
    assert records["mine"] == 1.5
    assert records["rollout/response_len/mean"] == 3.0


def test_arrays_of_an_answer_by_key():
    text = base64.b64encode(np.array([3, 4], dtype="<i4").tobytes()).decode()
    for keys in ("b", ("a", "b"), ["b", "c"]):
        assert decode_int32_meta_array({"b": text}, keys).tolist() == [3, 4]
    assert decode_int32_meta_array({"b": text}, ("x",)) is None
    assert decode_int32_meta_array(text).tolist() == [3, 4]
