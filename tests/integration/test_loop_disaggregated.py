"""GRPO with a prefill and a decode engine, and a regular engine of the same checkpoint to compare with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines import Reference
from tests.support.run_train import Finished, canary, rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration
pytest.importorskip("nixl", reason="prefill and decode engines on a CPU need nixl, which make setup installs")

ROLLOUTS, LIMIT = 4, 2
TOLERANCE = 1e-5


def test_prefill_and_decode_engines_through_a_run(tmp_path: Path):
    """Rollouts run ahead of the trainer, so that pushes come in the middle of requests."""
    checkpoint = make_tiny_checkpoint(tmp_path / "model")
    engines = tmp_path / "engines.yaml"
    engines.write_text(f"""
sglang:
  - name: actor
    server_groups: [{{worker_type: prefill, num_gpus: 1}}, {{worker_type: decode, num_gpus: 1}}]
  - {{name: regular, model_path: {checkpoint}, update_weights: false, server_groups: [{{num_gpus: 1}}]}}
""")
    flags = rl_flags(checkpoint, sums_file(tmp_path / "sums.jsonl"))
    extra = f"""--sglang-config {engines} --rollout-num-gpus 3 --num-rollout {ROLLOUTS} --rollout-max-response-len 192
        --sglang-server-concurrency 12 --router-policy round_robin
        --custom-rm-path tests.support.rollout_hooks.compared_reward
        --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async --max-staleness {LIMIT}
        --save {tmp_path}/save --save-hf {tmp_path}/hf-{{rollout_id}} --save-interval 1 --no-save-optim
        --save-debug-rollout-data {tmp_path}/dump_{{rollout_id}}.pt"""
    run = run_train([*flags, *extra.split()], tmp_path / "run", script="train_async.py")

    check_answers(run)
    assert canary(run.output) <= TOLERANCE
    assert run.metric("train/train_rollout_logprob_abs_diff")[0] <= TOLERANCE
    logs = run.run_dir / "logs"
    assert all((logs / f"engine_{rank}.log").read_text().count("POST /generate") > 3 for rank in range(3))
    # Version v has the weights after rollout v - 2, and the first one those of the checkpoint.
    references = [Reference(path) for path in (checkpoint, *(tmp_path / f"hf-{i}" for i in range(ROLLOUTS - 1)))]
    samples = [s for i in range(ROLLOUTS) for s in torch.load(tmp_path / f"dump_{i}.pt", weights_only=True)["samples"]]
    assert len(samples) == 16 * ROLLOUTS
    assert len({sample["index"] for sample in samples}) == len(samples)
    assert max(check_log_probs(sample, references) for sample in samples) > 1, "no push came in the middle of a request"
    check_lags(run)


def check_lags(run: Finished) -> None:
    """Version v holds the weights of step v - 1, and rollout r is trained on weights of step r."""
    oldest, newest = (run.metric(f"rollout/weight_version/{which}") for which in ("min", "max"))
    lags = run.metric("rollout/staleness/max")
    shares = {k: run.metric(f"rollout/staleness/lag_{k}") for k in range(LIMIT + 1)}
    for rollout_id in range(ROLLOUTS):
        assert rollout_id + 1 - LIMIT <= oldest[rollout_id] <= newest[rollout_id] <= rollout_id + 1
        assert lags[rollout_id] == rollout_id + 1 - oldest[rollout_id] <= LIMIT
        assert sum(share.get(rollout_id, 0.0) for share in shares.values()) == pytest.approx(1.0)
    assert max(lags.values()) >= 1  # it did run ahead


def check_answers(run: Finished) -> None:
    """Of the same weights both kinds of engines gave the same greedy tokens and log-probs."""
    lines = [json.loads(line) for line in (run.run_dir / "compared.jsonl").read_text().splitlines()]
    of_checkpoint = [(one, other) for one, other in lines if one["version"] == "1" and one["finish"] == "length"]
    assert len(of_checkpoint) >= 16
    for one, other in of_checkpoint:
        assert one["tokens"] == other["tokens"]
        assert one["log_probs"] == pytest.approx(other["log_probs"], abs=TOLERANCE)


def check_log_probs(sample: dict[str, Any], references: list[Reference]) -> int:
    """Every token has the log-prob that the weights of its version give it; return the number of versions."""
    tokens, length, spans = sample["tokens"], sample["response_length"], sample["weight_version_spans"]
    prompt, output = tokens[:-length], tokens[-length:]
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == length
    for span in spans:
        part = slice(span["start"], span["end"])
        expected = references[int(span["version"]) - 1].log_probs(prompt, output)[part].tolist()
        assert sample["rollout_log_probs"][part] == pytest.approx(expected, abs=TOLERANCE)
    return len({span["version"] for span in spans})
