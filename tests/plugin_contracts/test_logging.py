"""``--custom-rollout-log-function-path`` and ``--custom-eval-rollout-log-function-path``."""

from __future__ import annotations

import pytest

from slime.observability import tracking
from slime.observability.tracking import Tracker
from tests.plugin_contracts.contract import EXAMPLES, fingerprint, hook_at, must, subjects


@pytest.fixture(autouse=True)
def tracker(monkeypatch):
    monkeypatch.setattr(tracking, "_tracker", Tracker())


@pytest.mark.parametrize("path", subjects("CUSTOM_ROLLOUT_LOG_FUNCTION_PATH", f"{EXAMPLES}.log_rollout"))
def test_a_rollout_log_function(path, args, samples):
    hook = hook_at("CUSTOM_ROLLOUT_LOG_FUNCTION_PATH", path)
    before = fingerprint(samples)
    for metrics in ({"rollout/dynamic_filter/drop_too_easy": 1}, None):  # of the rollout function, which may have none
        result = hook(0, args, samples, metrics, 1.5)
        must(result in (True, False, None), hook, "True (leave the built-in metrics out) or False", result)
    must(fingerprint(samples) == before, hook, "the samples to stay as they are: they are trained on")


@pytest.mark.parametrize("path", subjects("CUSTOM_EVAL_ROLLOUT_LOG_FUNCTION_PATH", f"{EXAMPLES}.log_evaluation"))
def test_an_evaluation_log_function(path, args, samples):
    hook = hook_at("CUSTOM_EVAL_ROLLOUT_LOG_FUNCTION_PATH", path)
    data = {
        "sums": {"rewards": [1.0] * len(samples), "truncated": [False] * len(samples), "samples": samples},
        "bare": {"rewards": [0.5]},
    }
    for metrics in ({"eval/reward/failures": 0}, None):
        result = hook(0, args, data, metrics)
        must(result in (True, False, None), hook, "True (leave the built-in metrics out) or False", result)
