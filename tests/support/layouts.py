"""The layouts whose numbers must be equal, and what "equal" is measured as.

A case is an algorithm under a layout: two rollouts of two optimizer steps each, from the same weights and on the same
samples. What is compared with the layout of one process and one sample per micro-batch: losses and gradient norms
(relative), every other metric, and the parameters afterwards (relative to the largest change that training made).
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.distributed import run_distributed
from tests.support.float64 import as_float64
from tests.support.mtp import MIMO, add_layers, as_mimo
from tests.support.trainer import make_train_data, tiny_checkpoint

FP32, FLOAT64 = "fp32", "float64"
ALONE = "1 process"
ROLLOUTS = 2
# Samples per rollout: a step trains four rollouts, whatever the number of their samples (here eight).
SAMPLES_OF_ROLLOUTS = (1, 3, 2, 2, 2, 2, 1, 3)

# Two optimizer steps per rollout, so that ratios differ from one; every term of the loss is on.
GRPO = {
    "global_batch_size": 4,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "entropy_coef": 0.01,
    "use_tis": True,
    "normalize_advantages": True,
    "use_rollout_entropy": True,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": GRPO,
    "gspo": {**GRPO, "advantage_estimator": "gspo", "use_opsm": True, "opsm_delta": 1e-4},
    "reinforce++": {
        "advantage_estimator": "reinforce_plus_plus",
        "kl_coef": 0.05,
        "gamma": 0.9,
        "normalize_advantages": True,
        "global_batch_size": 4,
    },
    "per token": {**GRPO, "calculate_per_token_loss": True},
    "turn mean": {**GRPO, "pg_loss_reducer": "turn_mean"},
    "sft": {"loss_type": "sft_loss", "compute_advantages_and_returns": False, "global_batch_size": 4},
}
WITH_REF = {"grpo", "gspo", "reinforce++", "per token", "turn mean"}


MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "experts": {"family": "qwen3_moe", "mlp_only_layers": [1]},  # four experts, of which two see a token
    "mtp": {"family": "qwen2", "tie_word_embeddings": False, "mtp_layers": 2},
    "mtp, tied": {"family": "qwen2", "tie_word_embeddings": True, "mtp_layers": 1},
}
REFERENCES = {
    "tied": ALONE,
    "untied": "1 process, untied",
    "experts": "1 process, experts",
    "mtp": "1 process, MTP",
    "mtp, tied": "1 process, MTP, tied",
}


@dataclass(frozen=True)
class Layout:
    """``ranks`` processes that train ``model`` with ``flags``; ``reverse`` turns the samples of a step around.

    ``layers`` is the least number of layers that it needs.
    """

    ranks: int
    flags: dict[str, Any] = field(default_factory=dict)
    reverse: bool = False
    model: str = "tied"
    layers: int = 4

    @property
    def reference(self) -> str:
        """The layout that this one must equal."""
        return REFERENCES[self.model]


TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
SP: dict[str, Any] = {"sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
VPP2: dict[str, Any] = {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True}
CP2: dict[str, Any] = {"context_parallel_size": 2}
PLAIN: dict[str, Any] = {"use_distributed_optimizer": False}
OVERLAPPED: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
EP2: dict[str, Any] = {"expert_model_parallel_size": 2}
ETP1: dict[str, Any] = {"expert_tensor_parallel_size": 1}
MTP: dict[str, Any] = {"mtp_num_layers": 2, "enable_mtp_training": True, "mtp_loss_scaling_factor": 0.3}


def packed(tokens: int) -> dict[str, Any]:
    """Dynamic micro-batches of at most ``tokens`` per rank."""
    return {"use_dynamic_batch_size": True, "max_tokens_per_gpu": tokens}


def recomputed(granularity: str, **flags: Any) -> dict[str, Any]:
    """Activations thrown away in forward and computed again in backward."""
    return {"recompute_granularity": granularity, **flags}


FULL = recomputed("full", recompute_method="uniform", recompute_num_layers=1)
LAYOUTS: dict[str, Layout] = {
    ALONE: Layout(1),
    "4 samples per micro-batch": Layout(1, {"micro_batch_size": 4}),
    "64 tokens per micro-batch": Layout(1, packed(64)),
    "96 tokens, balanced by FLOPs": Layout(1, {**packed(96), "balance_by_flops": True}),
    "samples of a step in reverse": Layout(1, {"micro_batch_size": 2}, reverse=True),
    "padded to 128 tokens": Layout(1, {"data_pad_size_multiplier": 128}),
    "not padded": Layout(1, {"data_pad_size_multiplier": 1, "micro_batch_size": 2}),
    "recompute full, uniform": Layout(1, FULL),
    "recompute full, block": Layout(1, recomputed("full", recompute_method="block", recompute_num_layers=1)),
    "recompute selective": Layout(1, recomputed("selective")),
    "recompute selective, more": Layout(
        1, recomputed("selective", recompute_modules=["core_attn", "layernorm", "mlp"])
    ),
    "loss recomputed, chunks of 7": Layout(1, {"recompute_loss_function": True, "log_probs_chunk_size": 7}),
    "plain optimizer": Layout(1, PLAIN),
    REFERENCES["untied"]: Layout(1, model="untied"),
    REFERENCES["experts"]: Layout(1, model="experts"),
    "experts, packed, recompute full": Layout(1, {**packed(64), **FULL}, model="experts"),
    "TP2": Layout(2, TP2),
    "TP2+SP": Layout(2, {**TP2, **SP}),
    "TP2+SP, packed, recompute full": Layout(2, {**TP2, **SP, **packed(64), **FULL}),
    "PP2": Layout(2, PP2),
    "PP2, untied": Layout(2, PP2, model="untied"),
    "PP2, packed": Layout(2, {**PP2, **packed(64)}),
    "PP2 x VPP2": Layout(2, {**PP2, **VPP2}),
    "PP2 x VPP4": Layout(2, {**PP2, **VPP2, "virtual_pipeline_model_parallel_size": 4}, layers=8),
    "PP2 x VPP2, packed, recompute full": Layout(2, {**PP2, **VPP2, **packed(64), **FULL}),
    "CP2": Layout(2, CP2),
    "CP2, packed": Layout(2, {**CP2, **packed(32)}),
    "CP2, plain optimizer": Layout(2, {**CP2, **PLAIN}),
    "DP2": Layout(2),
    "DP2, packed, balanced": Layout(2, {**packed(64), "balance_data": True}),
    "DP2, packed, by FLOPs": Layout(2, {**packed(64), "balance_by_flops": True}),
    "DP2, overlapped": Layout(2, OVERLAPPED),
    "DP2, plain optimizer": Layout(2, PLAIN),
    "experts, EP2": Layout(2, EP2, model="experts"),
    "experts, EP2, packed, overlapped": Layout(2, {**EP2, **packed(64), **OVERLAPPED}, model="experts"),
    "experts, TP2+SP": Layout(2, {**TP2, **SP}, model="experts"),
    "experts, TP2+SP, ETP1": Layout(2, {**TP2, **SP, **ETP1}, model="experts"),
    "experts, TP2+SP x EP2, ETP1": Layout(2, {**TP2, **SP, **EP2, **ETP1}, model="experts"),
    "experts, PP2 x VPP2": Layout(2, {**PP2, **VPP2}, model="experts"),
    "experts, CP2 x EP2": Layout(2, {**CP2, **EP2}, model="experts"),
    REFERENCES["mtp"]: Layout(1, MTP, model="mtp"),
    REFERENCES["mtp, tied"]: Layout(1, {**MTP, "mtp_num_layers": 1}, model="mtp, tied"),
    "MTP, packed, recompute full": Layout(1, {**MTP, **packed(64), **FULL}, model="mtp"),
    "MTP, TP2": Layout(2, {**MTP, **TP2}, model="mtp"),
    "MTP, TP2+SP": Layout(2, {**MTP, **TP2, **SP}, model="mtp"),
    "MTP, PP2, packed, overlapped": Layout(2, {**MTP, **PP2, **packed(64), **OVERLAPPED}, model="mtp"),
    "MTP, PP2 x VPP2": Layout(2, {**MTP, **PP2, **VPP2}, model="mtp"),
    "MTP, PP2, tied": Layout(2, {**MTP, **PP2, "mtp_num_layers": 1}, model="mtp, tied"),
    "MTP, CP2, packed": Layout(2, {**MTP, **CP2, **packed(32)}, model="mtp"),
    "MTP, DP2, overlapped": Layout(2, {**MTP, **OVERLAPPED}, model="mtp"),
    "DP4, packed, balanced": Layout(4, {**packed(64), "balance_data": True}),
    "TP4+SP": Layout(4, {"tensor_model_parallel_size": 4, **SP}),
    "PP4": Layout(4, {"pipeline_model_parallel_size": 4}),
    "PP4 x VPP2": Layout(4, {"pipeline_model_parallel_size": 4, **VPP2}, layers=8),
    "PP4 x VPP2, without overlap": Layout(
        4, {"pipeline_model_parallel_size": 4, **VPP2, "overlap_p2p_comm": False}, layers=8
    ),
    "CP4": Layout(4, {"context_parallel_size": 4}),
    "TP2+SP x DP2, overlapped": Layout(4, {**TP2, **SP, **OVERLAPPED}),
    "TP2+SP x PP2": Layout(4, {**TP2, **SP, **PP2}),
    "TP2+SP x CP2": Layout(4, {**TP2, **SP, **CP2}),
    "PP2 x CP2, packed": Layout(4, {**PP2, **CP2, **packed(32)}),
    "PP2 x DP2, untied": Layout(4, PP2, model="untied"),
    "CP2 x DP2, packed, balanced": Layout(4, {**CP2, **packed(32), "balance_data": True}),
    "TP2+SP x PP2 x VPP2": Layout(4, {**TP2, **SP, **PP2, **VPP2}),
    "PP2 x VPP2 x DP2, overlapped": Layout(4, {**PP2, **VPP2, **OVERLAPPED}),
    "experts, EP4": Layout(4, {"expert_model_parallel_size": 4}, model="experts"),
    "experts, TP2+SP x EP2 x ETP2": Layout(4, {**TP2, **SP, **EP2}, model="experts"),
    "experts, PP2 x EP2": Layout(4, {**PP2, **EP2}, model="experts"),
    "experts, CP2 x EP4": Layout(4, {**CP2, "expert_model_parallel_size": 4}, model="experts"),
    "PP2 x VPP2 x CP2": Layout(4, {**PP2, **VPP2, **CP2}),
    "MTP, TP2+SP x PP2": Layout(4, {**MTP, **TP2, **SP, **PP2}, model="mtp"),
    "MTP, PP2 x CP2": Layout(4, {**MTP, **PP2, **CP2}, model="mtp"),
    "MTP, PP2 x DP2, overlapped": Layout(4, {**MTP, **PP2, **OVERLAPPED}, model="mtp"),
}  # fmt: skip


def layout_data(seed: int, *, reverse: bool = False) -> dict[str, list[Any]]:
    """Return random train data of eight rollouts with one to three samples each, sixteen in all."""
    data = make_train_data(prompts=8, per_prompt=2, seed=seed)
    ids = [rollout for rollout, count in enumerate(SAMPLES_OF_ROLLOUTS) for _ in range(count)]
    data["rollout_ids"] = ids
    sums = [sum(sum(mask) for mask, other in zip(data["loss_masks"], ids, strict=True) if other == i) for i in ids]
    data["rollout_mask_sums"] = sums
    if not reverse:
        return data
    order = [*range(8)[::-1], *range(8, 16)[::-1]]  # the two steps keep their samples
    return {key: [column[i] for i in order] for key, column in data.items()}


@dataclass(frozen=True)
class Result:
    """Report of a case, its final weights, and the largest change of one of them from the start.

    ``canary``: the log-probs of ``CANARY`` before training.
    """

    canary: list[float]
    steps: list[dict[str, float]]
    rollouts: list[dict[str, float]]
    weights: dict[str, np.ndarray]
    largest_change: float


@dataclass(frozen=True)
class Difference:
    """Distance of a case from its reference, see ``difference``."""

    loss: float
    grad_norm: float
    metrics: float
    weights: float


# What still counts as equal. The loss of a policy gradient is a sum of terms of about one that all but cancel: in fp32
# it may also be 1e-6 apart where that is more than 1e-5 of what is left (LOSS_FLOOR).
TOLERANCES = {FLOAT64: Difference(1e-10, 1e-10, 1e-10, 1e-10), FP32: Difference(1e-5, 1e-5, 2e-6, 1e-4)}
CANARY = [7, 3, 200, 3, 11, 90, 91, 92, 93, 250, 1]
LOSS_FLOOR = {FLOAT64: 0.0, FP32: 0.1}
# Adam divides by the gradient's size: with the usual eps the rounding of tiny gradients would be amplified to as much
# as a step, and runs would drift apart after the first.
ADAM_EPS = {FLOAT64: 1e-5, FP32: 1e-3}


def checkpoints(folder: Path, precision: str, num_layers: int = 4) -> dict[str, str]:
    """Write the tiny models that the cases start from, and those they are kept near to: name -> path."""
    found = {}
    for seed, (prefix, model) in enumerate(itertools.product(("", "reference of "), MODELS)):
        name = prefix + model
        fields = dict(MODELS[model])
        predicting = fields.pop("mtp_layers", 0)
        path = tiny_checkpoint(folder / name, seed=seed, num_hidden_layers=num_layers, **fields)
        if predicting:
            path = add_layers(path, folder / f"{name}-predicting", MIMO, predicting)
            as_mimo(path)
        found[name] = as_float64(path, folder / f"{name}-{precision}") if precision == FLOAT64 else path
    return found


def measure(
    folder: Path,
    precision: str,
    cases: list[tuple[str, str]],
    *,
    num_layers: int = 4,
    timeout: float = 600,
) -> dict[tuple[str, str], Result]:
    """Train the cases (algorithm, layout), and those that they must equal; return the results by case."""
    paths = checkpoints(folder, precision, num_layers)
    wanted = list(dict.fromkeys([*((a, LAYOUTS[name].reference) for a, name in cases), *cases]))
    found = {}
    for ranks in sorted({LAYOUTS[name].ranks for _, name in wanted}):
        here = [case for case in wanted if LAYOUTS[case[1]].ranks == ranks]
        arguments = {"paths": paths, "precision": precision, "cases": here}
        reports = run_distributed(
            "tests.support.layouts:train_cases", ranks, arguments, timeout=timeout, fresh=precision == FLOAT64
        )
        found.update({case: Result(**report) for case, report in zip(here, reports[-1], strict=True)})
    return found


def train_cases(paths: dict[str, str], precision: str, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Train the cases on this rank; return the fields of their results (on the last rank)."""
    if precision == FLOAT64:
        from tests.support import float64

        float64.enable()
    from tests.support.ranks import new_trainer
    from tests.support.trainer_ranks import hf_weights, train_once

    results = []
    for algorithm, name in cases:
        layout = LAYOUTS[name]
        checkpoint, reference = paths[layout.model], paths[f"reference of {layout.model}"]
        flags = {"lr": 1e-2, "adam_eps": ADAM_EPS[precision], **ALGORITHMS[algorithm], **layout.flags}
        with_ref = algorithm in WITH_REF
        trainer, _ = new_trainer(checkpoint, load=checkpoint, ref_load=reference, with_ref=with_ref, **flags)
        start = _float64(hf_weights(trainer.model, trainer.args))
        canary = trainer.canary(CANARY)
        reports = [train_once(trainer, i, layout_data(i, reverse=layout.reverse)) for i in range(ROLLOUTS)]
        weights = _float64(hf_weights(trainer.model, trainer.args))
        results.append(
            {
                "canary": canary,
                "steps": [step for report in reports for step in report["steps"]],
                "rollouts": [report["rollout"] for report in reports],
                "weights": weights,
                "largest_change": max(float(np.abs(weights[n] - w).max()) for n, w in start.items()),
            }
        )
    return results


def _float64(weights: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: weight.double().numpy() for name, weight in weights.items()}


def difference(result: Result, reference: Result, *, loss_floor: float = 0.0) -> Difference:
    """Return how far ``result`` is from ``reference``, the worst over all steps.

    Loss and gradient norm: relative (to ``loss_floor`` where the loss is less). Other metrics: relative, or absolute
    where they are less than one in size. Weights: the largest difference over the largest change that training made.
    """
    assert result.weights.keys() == reference.weights.keys()
    floors = {"loss": loss_floor, "grad_norm": 0.0, "metrics": 1.0}
    errors = dict.fromkeys(floors, 0.0)
    pairs = zip([*result.steps, *result.rollouts], [*reference.steps, *reference.rollouts], strict=True)
    for seen, expected in ((_comparable(a), _comparable(b)) for a, b in pairs):
        assert seen.keys() == expected.keys()
        for name, value in expected.items():
            kind = name if name in floors else "metrics"
            errors[kind] = max(errors[kind], abs(seen[name] - value) / max(abs(value), floors[kind]))
    apart = max(float(np.abs(result.weights[n] - w).max()) for n, w in reference.weights.items())
    return Difference(**errors, weights=apart / reference.largest_change)


def _comparable(metrics: dict[str, float]) -> dict[str, float]:
    """Without the learning rates: under expert parallelism experts are a parameter group of their own."""
    return {name: value for name, value in metrics.items() if not name.startswith("lr-pg_")}


def assert_equal(result: Result, reference: Result, precision: str) -> None:
    """Fail when ``result`` differs from ``reference`` by more than rounding in ``precision``."""
    seen = difference(result, reference, loss_floor=LOSS_FLOOR[precision])
    allowed = asdict(TOLERANCES[precision])
    assert {name: value for name, value in asdict(seen).items() if value > allowed[name]} == {}
    assert len(result.canary) == len(CANARY) - 1
    assert np.abs(np.subtract(result.canary, reference.canary)).max() <= allowed["metrics"]
