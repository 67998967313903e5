"""What a user most likely meant by a word that is no known flag."""

from __future__ import annotations

import difflib
import re
from argparse import Action
from collections.abc import Collection, Mapping, Sequence

# Dashes that word processors and web pages make of "--": hyphens, en and em dash, minus sign.
_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\ufe58\ufe63\uff0d"
# Short names of the field, names that other trainers use, and switches that only old documents show -> the flag.
SYNONYMS: dict[str, str] = {
    "tp": "--tensor-model-parallel-size",
    "tp-size": "--tensor-model-parallel-size",
    "tensor-parallel-size": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "pp-size": "--pipeline-model-parallel-size",
    "pipeline-parallel-size": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "cp-size": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "expert-parallel-size": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "learning-rate": "--lr",
    "batch-size": "--rollout-batch-size",
    "train-batch-size": "--global-batch-size",
    "group-size": "--n-samples-per-prompt",
    "n-samples": "--n-samples-per-prompt",
    "num-generations": "--n-samples-per-prompt",
    "num-gpus": "--actor-num-gpus-per-node",
    "num-nodes": "--actor-num-nodes",
    "model": "--hf-checkpoint",
    "model-path": "--hf-checkpoint",
    "dataset": "--prompt-data",
    "train-data": "--prompt-data",
    "epochs": "--num-epoch",
    "num-epochs": "--num-epoch",
    "steps": "--num-rollout",
    "num-steps": "--num-rollout",
    "max-tokens": "--rollout-max-response-len",
    "max-new-tokens": "--rollout-max-response-len",
    "output-dir": "--save",
    "reward-model": "--rm-type",
    "use-critic": "--advantage-estimator ppo",
    "kl-loss": "--use-kl-loss",
    "resume": "--load",
    "lora-r": "--lora-rank",
    "lora-path": "--lora-adapter-path",
    "target-modules": "--lora-target-modules",
}
# Settings of trainers that use Hydra (``actor_rollout_ref.actor.optim.lr=1e-6``): the end of a path -> flag.
HYDRA: dict[str, str] = {
    "actor.optim.lr": "--lr",
    "actor.optim.lr_warmup_steps": "--lr-warmup-iters",
    "actor.optim.weight_decay": "--weight-decay",
    "actor.optim.clip_grad": "--clip-grad",
    "actor.grad_clip": "--clip-grad",
    "critic.optim.lr": "the lr of the role critic in the file of --megatron-config-path",
    "actor.ppo_mini_batch_size": "--global-batch-size (in samples: x --n-samples-per-prompt)",
    "actor.ppo_micro_batch_size_per_gpu": "--micro-batch-size",
    "actor.ppo_max_token_len_per_gpu": "--max-tokens-per-gpu",
    "actor.use_dynamic_bsz": "--use-dynamic-batch-size",
    "actor.clip_ratio": "--eps-clip",
    "actor.clip_ratio_low": "--eps-clip",
    "actor.clip_ratio_high": "--eps-clip-high",
    "actor.clip_ratio_c": "--eps-clip-c",
    "actor.entropy_coeff": "--entropy-coef",
    "actor.use_kl_loss": "--use-kl-loss",
    "actor.kl_loss_coef": "--kl-loss-coef",
    "actor.kl_loss_type": "--kl-loss-type",
    "actor.loss_agg_mode": "--calculate-per-token-loss (token-mean) or --pg-loss-reducer",
    "actor.megatron.tensor_model_parallel_size": "--tensor-model-parallel-size",
    "actor.megatron.pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "actor.megatron.context_parallel_size": "--context-parallel-size",
    "actor.megatron.expert_model_parallel_size": "--expert-model-parallel-size",
    "actor.ulysses_sequence_parallel_size": "--context-parallel-size",
    "rollout.n": "--n-samples-per-prompt",
    "rollout.temperature": "--rollout-temperature",
    "rollout.top_p": "--rollout-top-p",
    "rollout.top_k": "--rollout-top-k",
    "rollout.tensor_model_parallel_size": "--rollout-num-gpus-per-engine",
    "rollout.gpu_memory_utilization": "--sglang-mem-fraction-static",
    "rollout.max_num_seqs": "--sglang-max-running-requests",
    "rollout.val_kwargs.n": "--n-samples-per-eval-prompt",
    "rollout.val_kwargs.temperature": "--eval-temperature",
    "rollout.name": "no flag: engines are SGLang's",
    "model.path": "--hf-checkpoint",
    "model.lora_rank": "--lora-rank",
    "model.lora_alpha": "--lora-alpha",
    "model.enable_gradient_checkpointing": "--recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1",
    "data.train_files": "--prompt-data",
    "data.val_files": "--eval-prompt-data NAME FILE",
    "data.train_batch_size": "--rollout-batch-size",
    "data.max_prompt_length": "--rollout-max-prompt-len",
    "data.max_response_length": "--rollout-max-response-len",
    "data.prompt_key": "--input-key",
    "data.reward_fn_key": 'the metadata "rm_type" of a row',
    "data.shuffle": "--rollout-shuffle",
    "data.seed": "--rollout-seed",
    "algorithm.adv_estimator": "--advantage-estimator",
    "algorithm.gamma": "--gamma",
    "algorithm.lam": "--lambd",
    "algorithm.kl_ctrl.kl_coef": "--kl-coef",
    "algorithm.norm_adv_by_std_in_grpo": "--disable-grpo-std-normalization (for False)",
    "reward_model.reward_manager": "--rm-type or --custom-rm-path",
    "custom_reward_function.path": "--custom-rm-path MODULE.FUNCTION",
    "custom_reward_function.name": "--custom-rm-path MODULE.FUNCTION",
    "trainer.total_epochs": "--num-epoch",
    "trainer.total_training_steps": "--num-rollout",
    "trainer.save_freq": "--save-interval",
    "trainer.test_freq": "--eval-interval",
    "trainer.default_local_dir": "--save",
    "trainer.n_gpus_per_node": "--actor-num-gpus-per-node",
    "trainer.nnodes": "--actor-num-nodes",
    "trainer.project_name": "--wandb-project",
    "trainer.experiment_name": "--wandb-group",
    "trainer.logger": "--use-wandb, --use-tensorboard",
    "trainer.resume_mode": "no flag: --load and --save of the same directory resume",
    "trainer.val_before_train": "--skip-eval-before-train (for False)",
}
_PREFIXES = ("rollout-", "sglang-", "router-")


def hydra_message(word: str) -> str | None:
    """What to write in place of a word of Hydra, ``path.to.key=value`` with or without dashes; None for other words."""
    found = re.fullmatch(r"(?:--|[+~]{1,2})?([A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)+)(?:=(.*))?", word, re.DOTALL)
    if found is None or ("=" not in word and not word.startswith("--")):
        return None
    path, value = found[1].replace("-", "_"), found[2]
    flag = next((flag for key, flag in HYDRA.items() if path == key or path.endswith(f".{key}")), None)
    if flag is None:
        last = path.rpartition(".")[2].replace("_", "-")
        return f"{word} is a setting of Hydra; flags are written --flag value (`--help {last}` lists what mentions it)"
    if not flag.startswith("--"):
        return f"{word} is a setting of Hydra; here it is {flag}"
    is_switch = value in ("True", "true", "False", "false")
    return f"{word} is a setting of Hydra; here it is {flag}" + (f" {value}" if value and not is_switch else "")


def looks_like_flag(word: str, known: Collection[str]) -> bool:
    """Whether ``word`` was meant as a flag: by its hyphens, or by other dashes in front of a ``known`` option."""
    if " " in word:
        return False
    foreign = re.match(rf"[-{_DASHES}]{{1,3}}(?=[A-Za-z])", word)
    return bool(re.match(r"-{1,2}[A-Za-z]", word)) or (foreign is not None and _with_hyphens(word) in known)


def dashes_are_foreign(name: str) -> bool:
    """Whether ``name`` begins with dashes of a text instead of hyphens."""
    return any(character in _DASHES for character in name[:3])


def _with_hyphens(word: str) -> str:
    return "--" + word.lstrip("-" + _DASHES).split("=", 1)[0].replace("_", "-")


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known option a user most likely meant, or None."""
    stem = _with_hyphens(name)[2:]
    exact = {k.lstrip("-"): k for k in known}
    if stem in exact:
        return exact[stem]
    if stem in SYNONYMS and SYNONYMS[stem].split()[0] in known:
        return SYNONYMS[stem]
    for candidate in (*(prefix + stem for prefix in _PREFIXES), stem.removeprefix("no-"), "no-" + stem):
        if candidate in exact:
            return exact[candidate]
    matches = difflib.get_close_matches(stem, list(exact), n=5, cutoff=0.72)
    near = next((match for match in matches if _is_slip(stem, match)), None)
    return None if near is None else exact[near]


def _is_slip(stem: str, known: str) -> bool:
    """Whether ``stem`` is ``known`` with slips: words that are misspelled, or left out behind the first.

    A first word more or less is another thing: ``lora-rank`` is not ``q-lora-rank``, and ``actor-lr`` is not ``lr``.
    """
    words, others = stem.split("-"), known.split("-")
    if stem.replace("-", "") == known.replace("-", ""):
        return True
    if len(words) == len(others):
        return all(_misspelled(*pair) for pair in zip(words, others, strict=True))
    return _misspelled(words[0], others[0])


def _misspelled(one: str, other: str) -> bool:
    """Whether at most a third of the letters were added, left out, exchanged or swapped with their neighbor."""
    return _edits(one, other) <= max(1, max(len(one), len(other)) // 3)


def _edits(one: str, other: str) -> int:
    """The edit distance with swaps of neighbors (optimal string alignment)."""
    rows = [list(range(len(other) + 1))]
    for i, a in enumerate(one, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            best = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b))
            if i > 1 and j > 1 and (a, b) == (other[j - 2], one[i - 2]):
                best = min(best, rows[-2][j - 2] + 1)
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def stray_message(word: str, words: Sequence[str], known: Mapping[str, Action]) -> str:
    """Why ``word``, which belongs to no flag, is out of place in ``words``."""
    if f"--{word}" in known or word == "help":
        return f"unexpected word {word!r}; did you mean --{word}?"
    place = list(words).index(word) if word in words else -1
    before = next((w for w in reversed(words[: max(place, 0)]) if w in known), None)
    if before is None:
        return f"unexpected word {word!r}: every value belongs to a flag"
    if known[before].nargs == 0:
        return f"unexpected word {word!r} after {before}: it is a switch and takes no value"
    return f"unexpected word {word!r}: {before} takes one value; quote a value that contains spaces"


def parser_message(message: str) -> str:
    """An error of argparse in our words."""
    message = re.sub(r"^argument (--\S+?)(?:/--\S+)*: ", r"\1: ", message)
    option, _, reason = message.partition(": ")
    if reason in ("expected one argument", "expected at least one argument"):
        return f"{option}: a value is missing after it; one that begins with a dash is written {option}=VALUE"
    if match := re.fullmatch(r"ignored explicit argument (.*)", reason):
        return f"{option} is a switch and takes no value, got {match[1]}"
    return message
