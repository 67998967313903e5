"""``--update-weight-mode delta`` through ``train.py``: engines have the trainer's weights, after a resume too."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.weights import versions as version_files
from tests.support.run_train import Finished, rl_flags, run_train, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.soak]


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_changes_reach_the_engines_also_after_a_resume(tmp_path: Path, encoding: str) -> None:
    """The norms alone are trained: in fp32 every trained weight changes in every step."""
    flags = rl_flags(make_tiny_checkpoint(tmp_path / "model"), sums_file(tmp_path / "sums.jsonl"))
    shared, local, save = (tmp_path / name for name in ("shared", "local", "save"))
    extra = f"""--rollout-num-gpus 2 --custom-rm-path tests.support.rollout_hooks.parity_reward
        --check-weight-update-equal --save {save} --load {save} --save-interval 1 --override-opt_param-scheduler
        --only-train-params-name-list layernorm --update-weight-transport disk --update-weight-disk-dir {shared}
        --update-weight-local-checkpoint-dir {local} --update-weight-mode delta --update-weight-delta-full-interval 3
        --update-weight-delta-encoding {encoding}
        --sglang-custom-pull-weights-pre-read-hook tests.support.rollout_hooks.note_pull"""
    command = [*flags, *extra.split()]
    pulled = tmp_path / "pulled"
    first = run_train([*command, "--num-rollout", "4"], tmp_path / "run", env={"SLIME_TEST_HOOKED": str(pulled)})
    check(first, [0, 1, 2, 3], [1.0, None, None, 1.0])
    # every engine, for every version, before it reads: one of them may have to fetch it
    expected = [f"{shared} {version}" for version in (1, 2, 3, 4, 5) for _engine in range(2)]
    assert sorted(pulled.read_text().splitlines()) == expected
    assert list(shared.iterdir()) == []
    assert [path.name for path in version_files.versions(local)] == ["weight_v000005"]
    # The directory of the engines' host is that of the run before, two versions ahead.
    resumed = run_train([*command, "--num-rollout", "6"], tmp_path / "resumed")
    check(resumed, [4, 5], [1.0, None])
    assert [path.name for path in version_files.versions(local)] == ["weight_v000003"]


def check(run: Finished, rollouts: list[int], densities: list[float | None]) -> None:
    """``densities``: of the push before each rollout; None for one of changes."""
    difference = run.metric("train/train_rollout_logprob_abs_diff")
    assert sorted(difference) == rollouts
    assert max(difference.values()) <= 1e-5
    assert list(run.metric("rollout/weight_version/max").values()) == [n + 1.0 for n in range(len(rollouts))]
    found, written = (run.metric(f"perf/update_weights_{name}") for name in ("density", "wire_bytes"))
    for rollout, expected in zip(rollouts, densities, strict=True):
        assert found[rollout] == expected if expected else 0 < found[rollout] < 0.3
        assert (written[rollout] < written[rollouts[0]] / 3) == (expected is None)
