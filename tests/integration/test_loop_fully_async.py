"""``train_async.py`` with the fully asynchronous rollout: versions, lags, evaluation, and the end by Ctrl-C.

On every change: such a run, its versions and lags in ``test_loop_disaggregated.py``; Ctrl-C in
``test_run_security.py``.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.run_train import Run, read_metric, rl_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]

ROLLOUTS = 5
LIMIT = 2


def test_fully_async_rollouts_with_a_bound_on_staleness_until_ctrl_c(tmp_path: Path):
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    extra = f"""--rollout-num-gpus 1 --num-rollout 1000 --rollout-max-response-len 448 --sglang-server-concurrency 24
        --custom-rm-path tests.support.rollout_hooks.parity_reward
        --rollout-data-postprocess-path tests.support.rollout_hooks.note_training
        --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async --max-staleness {LIMIT}
        --eval-prompt-data sums {tmp_path / "sums.jsonl"} --eval-interval 2 --n-samples-per-eval-prompt 1
        --eval-max-response-len 8 --save-debug-rollout-data {tmp_path}/dump_{{rollout_id}}.pt"""
    with Run([*flags, *extra.split()], tmp_path / "run", script="train_async.py") as run:
        run.wait_for(rf"rollout {ROLLOUTS} of 1000", 300)
        run.send(signal.SIGINT)
        ended = run.finish(60)
        assert ended.returncode == 130
        run.assert_nothing_left(10)
    assert "Traceback" not in ended.output
    assert "never retrieved" not in ended.output + run.logs()

    oldest, newest = (read_metric(ended.run_dir, f"rollout/weight_version/{which}") for which in ("min", "max"))
    lags = read_metric(ended.run_dir, "rollout/staleness/max")
    shares = {k: read_metric(ended.run_dir, f"rollout/staleness/lag_{k}") for k in range(LIMIT + 1)}
    # Version v holds the weights of step v - 1, and rollout r is trained on weights of step r.
    for rollout_id in range(ROLLOUTS):
        assert rollout_id + 1 - LIMIT <= oldest[rollout_id] <= newest[rollout_id] <= rollout_id + 1
        assert lags[rollout_id] == rollout_id + 1 - oldest[rollout_id] <= LIMIT
        assert sum(share.get(rollout_id, 0.0) for share in shares.values()) == pytest.approx(1.0)
    assert max(lags.values()) >= 1  # it did run ahead
    difference = read_metric(ended.run_dir, "train/train_rollout_logprob_abs_diff")
    assert difference[0] <= 1e-5
    evaluated = read_metric(ended.run_dir, "eval/sums/weight_version/min")
    assert [evaluated[i] for i in (1, 3)] == [3, 5]

    import torch

    consumed: set[int] = set()
    everything: list[dict[str, Any]] = []
    for rollout_id in range(ROLLOUTS):
        samples = torch.load(tmp_path / f"dump_{rollout_id}.pt", weights_only=True)["samples"]
        assert len(samples) == 16
        for sample in samples:
            spans = sample["weight_version_spans"]
            assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
            assert spans[-1]["end"] == sample["response_length"]
            assert all(span.get("step", int(span["version"]) - 1) == int(span["version"]) - 1 for span in spans)
            assert not any(span.get("at_end") for span in spans)  # the engine says which tokens each version made
        assert not consumed & {sample["index"] for sample in samples}
        consumed |= {sample["index"] for sample in samples}
        everything += samples
    # A push did not end the requests in flight: they continued under the new weights.
    crossing = [sample for sample in everything if len(sample["weight_version_spans"]) > 1]
    assert crossing, [sample["weight_version_spans"] for sample in everything]
    for sample in crossing:
        versions = [int(span["version"]) for span in sample["weight_version_spans"]]
        assert versions == sorted(set(versions))
    assert generated_while_training(ended.run_dir, everything)
    reward = read_metric(ended.run_dir, "rollout/raw_reward")
    assert all(0.0 <= reward[i] <= 1.0 for i in range(ROLLOUTS))


def generated_while_training(run_dir: Path, samples: list[dict[str, Any]]) -> bool:
    """Return True if some request was with the engines at a moment at which the trainer was training."""
    trained = [json.loads(line) for line in (run_dir / "training.jsonl").read_text().splitlines()]
    found = False
    for sample in samples:
        events = [event for event in sample["trace"]["events"] if event["name"] == "sglang_generate"]
        starts = [event["ts"] for event in events if event["type"] == "span_start"]
        ends = [event["ts"] for event in events if event["type"] == "span_end"]
        for start, end in zip(starts, ends, strict=True):
            found |= any(start < window["to"] and window["from"] < end for window in trained)
    return found
