"""The trainer on one GPU: numbers of the CPU in fp32, memory onloaded and offloaded, ``train.py`` from end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.distributed import DEVICES, run_distributed
from tests.support.gpu_memory import LENGTH, SAMPLES
from tests.support.model_families import FAMILIES, make_checkpoint
from tests.support.replay import write_dumps
from tests.support.run_train import Finished, rl_flags, run_train, sft_file, sft_flags, sums_file
from tests.support.trainer import tiny_checkpoint
from tools.tiny_model import make_tiny_checkpoint

pytestmark = pytest.mark.gpu
# Reductions add up in another order than on a CPU, and exponentials are other approximations.
METRICS, GRADIENTS = 1e-4, 2e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("checkpoints")
    tiny = {name: tiny_checkpoint(folder / name, seed=0, family=name) for name in ("qwen3", "qwen3_moe")}
    return {**tiny, **{name: make_checkpoint(folder, name) for name in FAMILIES}}


@pytest.fixture(scope="module")
def trained(checkpoints: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Metrics and gradients of a step of every family, by device."""
    corrected = {"entropy_coef": 0.01, "use_tis": True}
    scenarios = [{"checkpoint": path, "args": {"load": path, **corrected}} for path in checkpoints.values()]
    found = {}
    for device in DEVICES:
        arguments = {"checkpoint": "", "scenarios": scenarios}
        (results,) = run_distributed("tests.support.trainer_ranks:gradients", 1, arguments, timeout=400, device=device)
        found[device] = dict(zip(checkpoints, results, strict=True))
    return found


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", *FAMILIES])
def test_metrics_and_gradients_equal_those_of_a_cpu(family: str, trained: Any) -> None:
    seen, expected = trained["cuda"][family], trained["cpu"][family]
    for step, other in zip(seen["steps"], expected["steps"], strict=True):
        assert step.keys() == other.keys()
        for metric, value in other.items():
            assert step[metric] == pytest.approx(value, rel=METRICS, abs=2e-6), metric
    whole = torch.stack([gradient.norm() for gradient in expected["gradients"].values()]).norm()
    assert seen["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        difference = (seen["gradients"][name].cpu() - gradient).norm()
        assert difference <= GRADIENTS * max(gradient.norm(), 1e-2 * whole), name


OPTIONS: dict[str, dict[str, Any]] = {
    "packed, chunked": {"micro_batch_size": 4, "log_probs_chunk_size": 5, "entropy_coef": 0.02},
    "gspo": {"advantage_estimator": "gspo"},
    "cispo": {"advantage_estimator": "cispo"},
    "reinforce++": {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
    "sequences masked, dual clip": {"use_opsm": True, "opsm_delta": 1e-4, "eps_clip_c": 1.5},
    "per token": {"calculate_per_token_loss": True},
    "sft": {"loss_type": "sft_loss"},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "adapters": {"lora_rank": 4, "lora_alpha": 8.0},
    "without moments": {"use_stateless_adam": True, "no_save_optim": True, "adam_eps": 1e-3},
    "deterministic": {"deterministic_mode": True},
}


@pytest.fixture(scope="module")
def optimized(checkpoints: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Metrics of two rollouts of two steps with Adam, under every option, by device."""
    path = checkpoints["qwen3"]
    steps = {"load": path, "lr": 1e-3, "adam_eps": 1e-3, "global_batch_size": 4}
    scenarios = [{"args": {**steps, **options}, "rollouts": 2} for options in OPTIONS.values()]
    found = {}
    for device in DEVICES:
        (results,) = run_distributed(
            "tests.support.trainer_ranks:run_scenarios", 1, {"checkpoint": path, "scenarios": scenarios}, device=device
        )
        found[device] = dict(zip(OPTIONS, results, strict=True))
    return found


@pytest.mark.parametrize("option", OPTIONS)
def test_steps_of_the_optimizer_equal_those_of_a_cpu(option: str, optimized: Any) -> None:
    seen, expected = (optimized[device][option]["reports"] for device in ("cuda", "cpu"))
    for report, other in zip(seen, expected, strict=True):
        for step, other_step in zip(report["steps"], other["steps"], strict=True):
            for metric, value in other_step.items():
                assert step[metric] == pytest.approx(value, rel=1e-3, abs=1e-5), metric


@pytest.fixture(scope="module")
def asleep(checkpoints: dict[str, str]) -> dict[str, Any]:
    arguments = {"checkpoint": checkpoints["qwen3"]}
    return run_distributed("tests.support.trainer_memory_ranks:bf16_sleep", 1, arguments, device="cuda")[0]


@pytest.mark.parametrize("way", ["rebuilt", "copied"])
def test_a_bf16_trainer_is_onloaded_as_it_was_offloaded(way: str, asleep: Any) -> None:
    report = asleep[way]
    assert report["dtype"] is torch.bfloat16
    assert report["asleep"] == report["asleep again"] == 0
    assert report["export"], "the weights were others while the trainer slept"
    assert report["parameters"]
    assert report["optimizer"]
    for name, value in asleep["awake"].items():
        assert torch.equal(report["trained"][name], value), name


def losses(run: Finished) -> list[float]:
    return run.values("train/loss")


def test_sft_learns_what_it_learns_on_a_cpu(tmp_path: Path) -> None:
    """And resumes from a checkpoint as if it had not been ended."""
    flags = sft_flags(make_tiny_checkpoint(tmp_path / "model"), sft_file(tmp_path / "sft.jsonl"))
    save = ["--save", str(tmp_path / "save"), "--load", str(tmp_path / "save"), "--save-interval", "3"]
    runs = [run_train([*flags, "--fp32", "--num-rollout", "6"], tmp_path / device, device=device) for device in DEVICES]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-3)
    assert losses(runs[1])[-1] < losses(runs[1])[0]
    run_train([*flags, *save, "--fp32", "--num-rollout", "3"], tmp_path / "first", device="cuda")
    second = run_train([*flags, *save, "--fp32", "--num-rollout", "6"], tmp_path / "second", device="cuda")
    assert losses(second) == pytest.approx(losses(runs[1])[3:], rel=1e-5)


@pytest.mark.parametrize("precision", ["--fp32", "--bf16"])
def test_a_replay_with_a_reference_trains_as_on_a_cpu(precision: str, tmp_path: Path) -> None:
    """``--offload-train``: the trainer sleeps between two rollouts."""
    model = make_tiny_checkpoint(tmp_path / "model")
    dumps = write_dumps(tmp_path, 3)
    flags = [
        *rl_flags(model, sums_file(tmp_path / "sums.jsonl")), "--debug-train-only", "--load-debug-rollout-data", dumps,
        "--num-rollout", "3", "--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-load", str(model), "--offload-train",
    ]  # fmt: skip
    on_cpu = run_train([*flags, "--fp32"], tmp_path / "cpu")
    on_gpu = run_train([*flags, precision], tmp_path / "cuda", device="cuda")
    names = (
        "train/loss",
        "train/grad_norm",
        "train/kl_loss",
        "rollout/ref_log_probs",
        "train/train_rollout_logprob_abs_diff",
    )
    for name in names:
        tolerance = {"rel": 1e-3, "abs": 1e-6} if precision == "--fp32" else {"rel": 0.1, "abs": 0.02}
        assert len(on_cpu.values(name)) == 3, name
        assert on_gpu.values(name) == pytest.approx(on_cpu.values(name), **tolerance), name


SIZES = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 128, "vocab_size": 151_936,
}  # fmt: skip
TOKENS, WIDTH = SAMPLES * LENGTH, SIZES["num_key_value_heads"] * SIZES["head_dim"]
CASES: dict[str, dict[str, Any]] = {
    "everything kept": {},
    "MLP recomputed": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eight layers as wide as those of Qwen3-4B, 1.3 billion parameters."""
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("memory") / "model", **SIZES))


@pytest.mark.parametrize("case", CASES)
def test_memory_is_what_a_dry_run_estimates(case: str, large_model: str) -> None:
    arguments = {"checkpoint": large_model, "settings": CASES[case]}
    found = run_distributed("tests.support.gpu_memory:gibibytes", 1, arguments, device="cuda")[0]
    print(case, {name: round(value, 3) for name, value in found.items()})
    assert found["at rest"] == pytest.approx(found["estimated at rest"], rel=0.01)
    # Values of packed sequences are copied for torch's attention; the estimate is of kernels that take them as views.
    copied = 0 if case == "recomputed" else 2 * SIZES["num_hidden_layers"] * TOKENS * WIDTH / 2**30
    assert found["actor_train_peak_allocated"] == pytest.approx(found["estimated peak"] + copied, rel=0.01)
    assert found["log_probs_peak_allocated"] < found["estimated peak"]
    assert found["context"] < found["estimated context"]
    assert found["asleep"] < 0.01 * found["at rest"]
