"""``--update-weight-mode delta`` into engines' memory through ``train.py``, from two trainer ranks of a layout."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.integration.test_loop_engine_faults import engine_servers, wait_for_metric, wait_for_rollout
from tests.support.run_train import Run, read_metric, rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]

LAYOUTS = {"TP2": "--tensor-model-parallel-size 2 --sequence-parallel", "PP2": "--pipeline-model-parallel-size 2"}
FULL_INTERVAL = 4


def flags_of(root: Path, layout: str) -> list[str]:
    """Norms and one projection are trained: in fp32 every trained weight changes in every step."""
    flags = rl_flags(make_tiny_checkpoint(root / "model"), sums_file(root / "sums.jsonl"))
    more = f"""{LAYOUTS[layout]} --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 1
        --custom-rm-path tests.support.rollout_hooks.parity_reward --update-weight-mode delta
        --update-weight-delta-full-interval {FULL_INTERVAL} --only-train-params-name-list layernorm linear_proj
        --check-weight-update-equal --use-fault-tolerance"""
    return [*flags, *more.split()]


def size_of(checkpoint: Path) -> int:
    """Return the bytes of all weights."""
    from safetensors.torch import load_file

    return sum(t.nbytes for path in checkpoint.glob("*.safetensors") for t in load_file(path).values())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_have_the_weights_and_pushes_are_small(tmp_path: Path, layout: str, capsys) -> None:
    """After every push all engines have one checksum (``--check-weight-update-equal``) and the trainer's log-probs."""
    run = run_train([*flags_of(tmp_path, layout), "--num-rollout", "6"], tmp_path / "run")
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert run.metric("rollout/weight_version/max") == {n: n + 1.0 for n in range(6)}
    sent, density = (run.metric(f"perf/update_weights_{name}") for name in ("wire_bytes", "density"))
    with capsys.disabled():
        print(f"\n{layout}: bytes of each push {json.dumps(sent)}")
    full = [rollout for rollout in range(6) if density[rollout] == 1]
    assert full == [0, FULL_INTERVAL]
    assert all(sent[rollout] == size_of(tmp_path / "model") for rollout in full)
    assert all(0 < density[n] < 0.3 and sent[n] < sent[0] / 3 for n in range(6) if n not in full)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_engine_that_is_lost_gets_all_weights(tmp_path: Path, layout: str) -> None:
    flags = [*flags_of(tmp_path, layout), "--num-rollout", "100000", "--update-weight-delta-full-interval", "100000"]
    with Run(flags, tmp_path / "run") as run:
        wait_for_rollout(run, 2)
        os.kill(engine_servers(run)[1], signal.SIGKILL)
        back = wait_for_metric(run, "rollout/engines/restarted", 1)
        wait_for_rollout(run, back + 3)
        density = read_metric(run.run_dir, "perf/update_weights_density")
        full = [step for step, part in density.items() if part == 1]
        assert full[0] == 0
        assert full[1:]
        assert max(full) <= back + 1
        assert len(engine_servers(run)) == 2
        difference = read_metric(run.run_dir, "train/train_rollout_logprob_abs_diff")
        assert max(difference.values()) <= 1e-5
