"""``train.py`` with adapters: pushed alone and merged, ended and resumed, with a critic of its own, in few bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slime.weights.hf.checkpoint import HfCheckpoint
from tests.support.run_train import rl_flags, run_train, sft_file, sft_flags, sums_file
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.integration

LORA = "--lora-rank 8 --lora-alpha 16 --lr 1e-2 --save-interval 1 --rollout-shuffle"


def flags_of(root: Path, more: str, family: str = "qwen3") -> list[str]:
    flags = rl_flags(make_tiny_checkpoint(root / "model", family), sums_file(root / "sums.jsonl"))
    saving = f"--save {root / 'save'} --load {root / 'save'}"
    reward = "--custom-rm-path tests.support.rollout_hooks.parity_reward"
    return [*flags, *f"{LORA} {saving} {reward} {more}".split()]


@pytest.mark.parametrize("sync", ["adapter", "merged"])
def test_engines_have_what_was_trained(sync: str, tmp_path: Path) -> None:
    flags = flags_of(tmp_path, f"--lora-sync {sync} --use-kl-loss --kl-loss-coef 0.1 --rollout-num-gpus 2")
    run = run_train([*flags, "--num-rollout", "3"], tmp_path / "run")
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert run.metric("rollout/weight_version/min") == {0: 1.0, 1: 2.0, 2: 3.0}
    assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0, 2: 3.0}
    kl = run.metric("train/kl_loss")
    assert abs(kl[0]) < 1e-8
    assert abs(kl[1]) > 1e-6
    assert json.loads((tmp_path / "save" / "iter_0000002" / "adapter" / "adapter_config.json").read_text())["r"] == 8
    again = run_train([*flags, "--num-rollout", "5"], tmp_path / "again")
    assert sorted(again.metric("train/loss")) == [3, 4]
    assert max(again.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5


def test_requests_in_flight_keep_their_adapter(tmp_path: Path) -> None:
    """Generation overlaps with training: samples are of the version that they began with, and of no other."""
    more = "--lora-sync adapter --num-rollout 4 --use-rollout-logprobs"
    run = run_train(flags_of(tmp_path, more), tmp_path / "run", script="train_async.py")
    assert sorted(run.metric("train/loss")) == [0, 1, 2, 3]
    assert run.metric("rollout/weight_version/max")[3] >= 3


def test_actor_and_critic_have_adapters_of_their_own(tmp_path: Path) -> None:
    more = "--advantage-estimator ppo --kl-coef 0.05 --num-critic-only-steps 1"
    run = run_train([*flags_of(tmp_path, more), "--num-rollout", "2"], tmp_path / "run")
    assert run.metric("train/critic-grad_norm")[0] > 0
    again = run_train([*flags_of(tmp_path, more), "--num-rollout", "3"], tmp_path / "again")
    assert sorted(again.metric("train/loss")) == [2]


COLOCATED = "--colocate --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel"


@pytest.mark.parametrize("sync", ["--lora-sync merged", "--lora-sync adapter --no-offload-rollout"])
def test_engines_on_the_trainers_slots(sync: str, tmp_path: Path) -> None:
    run = run_train([*flags_of(tmp_path, f"{COLOCATED} {sync}"), "--num-rollout", "3"], tmp_path / "run")
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    assert run.metric("rollout/weight_version/max") == {0: 1.0, 1: 2.0, 2: 3.0}


def test_adapters_of_experts_are_merged_for_engines(tmp_path: Path) -> None:
    flags = flags_of(tmp_path, "--lora-sync merged", "qwen3_moe")
    run = run_train([*flags, "--num-rollout", "3"], tmp_path / "run")
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5
    adapter = load_file(tmp_path / "save" / "iter_0000002" / "adapter" / "adapter_model.safetensors")
    trained = [name for name, tensor in adapter.items() if "experts" in name and "lora_B" in name and tensor.any()]
    assert trained


def test_distillation(tmp_path: Path) -> None:
    teacher = make_tiny_checkpoint(tmp_path / "teacher", seed=1)
    more = f"--lora-sync adapter --use-opd --opd-type megatron --opd-kl-coef 0.5 --opd-teacher-load {teacher}"
    run = run_train([*flags_of(tmp_path, more), "--num-rollout", "3"], tmp_path / "run")
    assert sorted(run.metric("train/loss")) == [0, 1, 2]
    assert max(run.metric("train/train_rollout_logprob_abs_diff").values()) <= 1e-5


def test_supervised_fine_tuning(tmp_path: Path) -> None:
    flags = sft_flags(make_tiny_checkpoint(tmp_path / "model"), sft_file(tmp_path / "sft.jsonl"))
    saving = f"{LORA} --save {tmp_path / 'save'} --load {tmp_path / 'save'} --lora-target-modules q_proj v_proj"
    command = [*flags, *saving.split()]
    losses = run_train([*command, "--num-rollout", "10"], tmp_path / "run").metric("train/loss")
    assert losses[9] < losses[0]
    again = run_train([*command, "--num-rollout", "12"], tmp_path / "again").metric("train/loss")
    assert sorted(again) == [10, 11]
    assert again[10] < losses[0]


def test_a_push_of_adapters_has_less_than_a_twentieth_of_the_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a model that is less tiny: what adapters save grows with the width."""
    hidden, mlp, heads, layers, rank = 384, 1024, 128, 2, 8
    model = make_tiny_checkpoint(
        tmp_path / "model", hidden_size=hidden, intermediate_size=mlp, num_attention_heads=6, num_key_value_heads=2,
        head_dim=64, num_hidden_layers=layers,
    )  # fmt: skip
    common = [*rl_flags(model, sums_file(tmp_path / "sums.jsonl")), "--num-rollout", "1"]
    sent = {}
    for name, flags in {"whole": "", "adapters": f"--lora-rank {rank} --lora-sync adapter"}.items():
        run = run_train([*common, *flags.split()], tmp_path / name)
        sent[name] = run.metric("perf/update_weights_wire_bytes")[0]
    with capsys.disabled():
        print(f"\nbytes of a push: {sent}, {sent['whole'] / sent['adapters']:.1f} times fewer")
    with HfCheckpoint(model) as checkpoint:
        assert sent["whole"] == sum(checkpoint.tensor(name).nbytes for name in checkpoint.names)
    shapes = [*[(hidden, hidden)] * 2, *[(hidden, heads)] * 2, *[(hidden, mlp)] * 3]
    assert sent["adapters"] == 4 * layers * rank * sum(map(sum, shapes))
    assert sent["whole"] >= 20 * sent["adapters"]
