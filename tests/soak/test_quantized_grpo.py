"""GRPO on the quickstart's task with quantized engines, which a CPU emulates.

Rounding costs little accuracy on this task, with rounded weights in training (QAT) or without. What QAT does is seen
better in the log-probs: the trainer's are those of the engines again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.quickstart import recipe
from slime.weights.quantization import Format, Fp8, Int4
from slime.weights.quantization.files import quantize_checkpoint
from tests.support.quickstart import metric

pytestmark = pytest.mark.integration

ROLLOUTS, FEW_ROLLOUTS = 60, 8
BLOCKS, GROUPS = Fp8((64, 64), "block"), Int4(128)
QAT = ("--quantization-aware-training",)
RUNS: dict[str, tuple[Format | None, tuple[str, ...]]] = {
    "bf16": (None, ()), "fp8": (BLOCKS, ()), "int4": (GROUPS, ()), "int4-qat": (GROUPS, QAT),
}  # fmt: skip


def run(module_or_script: list[str], log: Path) -> None:
    with log.open("w") as out:
        subprocess.run([sys.executable, *module_or_script], check=True, stdout=out, stderr=out, timeout=2000)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's data, and its model after SFT in bf16."""
    root = tmp_path_factory.mktemp("quantized-grpo")
    paths = recipe.Paths(root)
    run(["-m", *recipe.make_model(paths, 0)], root / "model.log")
    run(["-m", *recipe.make_data(paths, 0)], root / "data.log")
    run([recipe.SFT_SCRIPT, *recipe.sft(paths, 0)], root / "sft.log")
    (file,) = paths.sft_model.glob("*.safetensors")
    weights: dict[str, torch.Tensor] = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((paths.sft_model / "config.json").read_text())
    (paths.sft_model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return root


def grpo(root: Path, name: str, rollouts: int, dtype: str = "bfloat16") -> Path:
    """Train as ``RUNS[name]`` says, with engines that compute in ``dtype``; return the run directory."""
    form, flags = RUNS[name]
    paths = recipe.Paths(root)
    plain = served = paths.sft_model
    if form is not None:
        served = root / f"{type(form).__name__}"
        if not served.exists():
            quantize_checkpoint(plain, served, form)
    run_dir = root / f"{name}-{rollouts}"
    words = recipe.grpo(paths, 0, rollouts=rollouts, shuffled=False)
    words[words.index("--hf-checkpoint") + 1] = str(served)
    words[words.index("--run-dir") + 1] = str(run_dir)
    run(["train.py", *words, "--ref-load", str(plain), "--sglang-dtype", dtype, *flags], Path(f"{run_dir}.log"))
    return run_dir


@pytest.mark.timeout(9000)
def test_quantized_engines_learn_nearly_as_much(trained: Path, capsys: pytest.CaptureFixture) -> None:
    """Compared are the means of the last two held-out accuracies."""
    accuracies = {}
    for name in RUNS:
        evaluated = metric(grpo(trained, name, ROLLOUTS), f"eval/{recipe.DATASET}")
        accuracies[name] = sum(evaluated[step] for step in sorted(evaluated)[-2:]) / 2
    with capsys.disabled():
        print(f"\nheld-out accuracy after {ROLLOUTS} rollouts: {accuracies}")
    assert accuracies["fp8"] >= accuracies["bf16"] - 0.05
    assert accuracies["int4-qat"] >= accuracies["bf16"] - 0.05
    assert accuracies["int4-qat"] > accuracies["int4"]


@pytest.mark.timeout(9000)
def test_with_qat_the_trainer_has_the_log_probs_of_the_engines(trained: Path, capsys: pytest.CaptureFixture) -> None:
    """They compute in fp16: in bf16 the rounding of activations alone makes a third of what INT4 does."""
    gaps = {}
    for name in ("bf16", "int4", "int4-qat"):
        run_dir = grpo(trained, name, FEW_ROLLOUTS, "float16")
        values = metric(run_dir, "train/train_rollout_logprob_abs_diff").values()
        gaps[name] = (min(values), max(values))
    with capsys.disabled():
        print(f"\nmean difference of log-probs, least and largest of {FEW_ROLLOUTS} rollouts: {gaps}")
    assert gaps["int4-qat"][1] < 2 * gaps["bf16"][1]
    assert gaps["int4"][0] > 5 * gaps["int4-qat"][1]
