"""``train.py --sglang-config``: a frozen judge beside the actor, and engines of different sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.engines import Reference
from tests.support.rollout_hooks import JUDGED_TEXT
from tests.support.run_train import Finished, rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def actor_and_judge(folder: Path) -> tuple[Path, Path, Path]:
    """Two checkpoints of different size, and the file that serves them, a slot for each."""
    judge = make_tiny_checkpoint(folder / "judge", seed=7, num_hidden_layers=1, hidden_size=64, intermediate_size=96)
    file = f"""
sglang:
  - name: actor
    server_groups: [{{num_gpus: 1}}]
  - name: judge
    model_path: {judge}
    server_groups: [{{num_gpus: 1, overrides: {{max_total_tokens: 4096}}}}]
"""
    return make_tiny_checkpoint(folder / "actor"), judge, write(folder / "engines.yaml", file)


def server_arguments(run: Finished, rank: int) -> str:
    """The line in which an engine says what it was started with."""
    log = (run.run_dir / "logs" / f"engine_{rank}.log").read_text()
    return next(line for line in log.splitlines() if "server_args=" in line)


def test_a_frozen_judge_takes_turns_with_the_trainer(tmp_path: Path):
    """Rewards are asked of a model of another size, on a slot of the trainer's: it is offloaded, and keeps its weights
    while those of the actor change. The trainer's ranks are tensor parallel, so that none holds whole weights.
    """
    actor, judge, engines = actor_and_judge(tmp_path)
    flags = rl_flags(actor, sums_file(tmp_path / "sums.jsonl"))
    extra = f"""--colocate --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel
        --rollout-num-gpus 2 --sglang-config {engines} --num-rollout 3 --save {tmp_path / "save"} --save-interval 1
        --check-weight-update-equal --use-fault-tolerance
        --custom-rm-path tests.support.rollout_hooks.judged_reward"""
    run = run_train([*flags, *extra.split()], tmp_path / "run")
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0, 2: 3.0}
    for stage in ("offload_rollout", "onload_train", "offload_train", "onload_rollout", "sync_weights"):
        assert sorted(run.metric(f"perf/stage/{stage}_time")) == [0, 1, 2], stage
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
    assert 0 < run.metric("rollout/raw_reward")[0] < 1  # the judge has an opinion
    verdicts = [json.loads(line) for line in (run.run_dir / "judge.jsonl").read_text().splitlines()]
    assert len(verdicts) >= 3 * 16
    assert len({verdict["url"] for verdict in verdicts}) == 1
    (token,) = {verdict["token"] for verdict in verdicts}
    expected = float(Reference(judge).log_probs(JUDGED_TEXT, [token])[0])
    assert [verdict["log_prob"] for verdict in verdicts] == pytest.approx([expected] * len(verdicts), abs=1e-5)
    assert "'max_total_tokens': 4096" in server_arguments(run, 1)
    assert "'max_total_tokens': 4096" not in server_arguments(run, 0)
    assert (run.run_dir / "logs" / "router_judge.log").exists()
    for name in ("actor", "judge"):
        assert set(run.metric(f"rollout/engines/{name}/serving").values()) == {1.0}


@pytest.mark.soak
def test_engines_of_different_sizes_get_the_same_weights(tmp_path: Path):
    """One engine of two slots beside two of one, with settings of their own, and a slot that stays free."""
    actor = make_tiny_checkpoint(tmp_path / "actor")
    engines = write(
        tmp_path / "engines.yaml",
        """
sglang:
  - name: actor
    server_groups:
      - {num_gpus: 2, num_gpus_per_engine: 2, overrides: {max_running_requests: 7}}
      - {worker_type: placeholder, num_gpus: 1}
      - {num_gpus: 2, num_gpus_per_engine: 1, overrides: {max_running_requests: 9}}
""",
    )
    flags = rl_flags(actor, sums_file(tmp_path / "sums.jsonl"))
    extra = f"""--rollout-num-gpus 5 --sglang-config {engines} --num-rollout 2 --check-weight-update-equal
        --router-policy round_robin --custom-rm-path tests.support.rollout_hooks.parity_reward"""
    run = run_train([*flags, *extra.split()], tmp_path / "run")
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0}
    for rank, tp_size, limit in ((0, 2, 7), (1, 1, 9), (2, 1, 9)):
        arguments = server_arguments(run, rank)
        assert f"'tp_size': {tp_size}," in arguments
        assert f"'max_running_requests': {limit}," in arguments
    answered = [(run.run_dir / "logs" / f"engine_{rank}.log").read_text().count("POST /generate") for rank in range(3)]
    assert min(answered) > 0
