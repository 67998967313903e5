"""The command lines of the quickstart. They are ordinary slime: what is tiny is the model, not the machinery."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MODEL = {"hidden-size": 128, "intermediate-size": 512, "num-hidden-layers": 2, "num-attention-heads": 8,
         "num-key-value-heads": 4}  # fmt: skip
SFT_SCRIPT = "train_async.py"  # it prepares the next batch while the trainer is busy
SFT_ROLLOUTS, SFT_BATCH, SFT_STEP = 60, 1280, 128
"""One pass over the demonstrations: batches of 1280, ten optimizer steps each; the same budget for every seed."""

GRPO_ROLLOUTS = 100
STEPS_PER_ROLLOUT, EVAL_INTERVAL, WARMUP_STEPS = 2, 10, 10
LORA_LR = "1.5e-3"
"""Ten times that of full training."""
PPO_ROLES = "examples/quickstart/ppo_roles.yaml"
Algorithm = Literal["grpo", "ppo"]
DATASET = "addition"


@dataclass(frozen=True)
class Paths:
    """Paths of a small run, and the length of its SFT."""

    root: Path
    sft_rollouts: int = SFT_ROLLOUTS

    @property
    def model(self) -> Path:
        """The randomly initialized model."""
        return self.root / "model"

    @property
    def data(self) -> Path:
        """The data set."""
        return self.root / "data"

    @property
    def sft(self) -> Path:
        """The run directory of SFT."""
        return self.root / "sft"

    @property
    def sft_model(self) -> Path:
        """The model after SFT, in Hugging Face format."""
        return self.root / "sft_model" / str(self.sft_rollouts - 1)

    @property
    def sft_save(self) -> Path:
        """The checkpoint after SFT, in Megatron's format."""
        return self.root / "sft_save"

    def grpo(self, shuffled: bool, lora_rank: int = 0) -> Path:
        """The run directory of GRPO, of its control, or of adapters."""
        return self.root / ("grpo_shuffled" if shuffled else f"grpo_lora{lora_rank}" if lora_rank else "grpo")

    @property
    def ppo(self) -> Path:
        """The run directory of PPO."""
        return self.root / "ppo"


def unused(run_dir: Path) -> Path:
    """Return ``run_dir``, or the first unused of ``run_dir-2``, ``-3``, ...: metrics of two runs do not mix."""
    names = itertools.chain([run_dir], (run_dir.with_name(f"{run_dir.name}-{n}") for n in itertools.count(2)))
    return next(path for path in names if not path.exists())


def make_model(paths: Paths, seed: int) -> list[str]:
    """Return the command that makes the model and its tokenizer."""
    sizes = [word for name, value in MODEL.items() for word in (f"--{name}", str(value))]
    return ["tools.tiny_model", "--family", "qwen3", "--out", str(paths.model), "--seed", str(seed), *sizes]


def make_data(paths: Paths, seed: int) -> list[str]:
    """Return the command that makes the data."""
    return [
        "examples.quickstart.make_data", "--out", str(paths.data), "--seed", str(seed),
        "--demonstrations", str(SFT_ROLLOUTS * SFT_BATCH),
    ]  # fmt: skip


def sft(paths: Paths, seed: int) -> list[str]:
    """Return the arguments of ``SFT_SCRIPT``."""
    return [
        "--hf-checkpoint", str(paths.model),
        "--prompt-data", str(paths.data / "sft.jsonl"), "--input-key", "messages",
        "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout",
        "--loss-type", "sft_loss", "--calculate-per-token-loss", "--disable-compute-advantages-and-returns",
        "--debug-train-only",
        "--num-rollout", str(paths.sft_rollouts), "--rollout-batch-size", str(SFT_BATCH),
        "--global-batch-size", str(SFT_STEP),
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096",
        "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1",
        "--lr", "4e-3", "--min-lr", "0", "--lr-decay-style", "cosine", "--lr-warmup-iters", "20",
        "--weight-decay", "0", "--adam-beta1", "0.9", "--adam-beta2", "0.98", "--clip-grad", "1.0",
        "--seed", str(1234 + seed),
        "--save", str(paths.sft_save), "--save-interval", str(paths.sft_rollouts), "--no-save-optim",
        "--save-hf", str(paths.root / "sft_model" / "{rollout_id}"),
        "--run-dir", str(paths.sft),
    ]  # fmt: skip


def grpo(
    paths: Paths, seed: int, *, rollouts: int, shuffled: bool, lora_rank: int = 0, warmup_steps: int = WARMUP_STEPS
) -> list[str]:
    """Return the arguments of ``train.py`` for GRPO: two engines behind the router, one trainer.

    ``warmup_steps``: at most; a short run warms up for half of its steps.
    ``lora_rank``: of the adapters that are trained in the place of the model, and that engines are sent alone.
    """
    evaluate_every, steps = min(EVAL_INTERVAL, rollouts), STEPS_PER_ROLLOUT * rollouts
    control = ["--custom-reward-post-process-path", "examples.quickstart.reward.shuffled_rewards"] if shuffled else []
    adapters = ["--lora-rank", str(lora_rank), "--lora-sync", "adapter"] if lora_rank else []
    return [
        "--hf-checkpoint", str(paths.sft_model), *adapters,
        "--prompt-data", str(paths.data / "train.jsonl"), "--input-key", "messages", "--label-key", "label",
        "--apply-chat-template", "--rollout-shuffle", "--rollout-seed", str(42 + seed),
        "--custom-rm-path", "examples.quickstart.reward.exact_answer", *control,
        "--num-rollout", str(rollouts), "--rollout-batch-size", "64", "--n-samples-per-prompt", "8",
        "--num-steps-per-rollout", str(STEPS_PER_ROLLOUT),
        "--rollout-max-response-len", "6", "--rollout-temperature", "1",
        "--eval-prompt-data", DATASET, str(paths.data / "held_out.jsonl"), "--n-samples-per-eval-prompt", "4",
        "--eval-interval", str(evaluate_every),
        "--actor-num-nodes", "1", "--actor-num-gpus-per-node", "1",
        "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "1",
        "--advantage-estimator", "grpo", "--eps-clip", "0.2", "--eps-clip-high", "0.28",
        "--use-kl-loss", "--kl-loss-coef", "0.15", "--kl-loss-type", "low_var_kl", "--entropy-coef", "0",
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096",
        "--lr", LORA_LR if lora_rank else "1.5e-4", "--min-lr", "0",
        "--lr-decay-style", "linear", "--lr-warmup-iters", str(min(warmup_steps, steps // 2)),
        "--weight-decay", "0", "--adam-beta1", "0.9", "--adam-beta2", "0.98", "--clip-grad", "1.0",
        "--seed", str(1234 + seed),
        "--run-dir", str(unused(paths.grpo(shuffled, lora_rank))),
    ]  # fmt: skip


def ppo(paths: Paths, seed: int, *, rollouts: int) -> list[str]:
    """Return the arguments of ``train.py`` for PPO: the same as GRPO's, with a critic in the place of groups.

    It learns alone for five rollouts (half of a shorter run), so that its values say something when the actor starts to
    follow them.
    """
    words = grpo(paths, seed, rollouts=rollouts, shuffled=False)
    words[words.index("--advantage-estimator") + 1] = "ppo"
    words[words.index("--run-dir") + 1] = str(unused(paths.ppo))
    return [
        *words, "--num-critic-only-steps", str(min(5, rollouts // 2)),
        "--normalize-advantages", "--gamma", "1", "--lambd", "1", "--value-clip", "0.2",
        "--megatron-config-path", PPO_ROLES,
    ]  # fmt: skip
