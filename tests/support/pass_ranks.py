"""Ranks of ``tests/integration/test_trainer_passes.py``: passes with other weights, and passes left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.support.ranks import error_of, new_trainer
from tests.support.trainer import make_train_data
from tests.support.trainer_ranks import parameters, train_once

HERE = "tests.support.pass_ranks."
TOP_P_LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {},
    "TP2+SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "CP2": {"context_parallel_size": 2, "micro_batch_size": 2},
}
SEEN: dict[str, Any] = {}


def note_columns(args: Any, rollout_id: int, data: dict[str, Any]) -> None:
    """A ``--rollout-data-postprocess-path``: keep what the passes made, by sample index."""
    indices = list(data["sample_indices"])
    SEEN["columns"] = {
        name: {index: values.clone() for index, values in zip(indices, column, strict=True)}
        for name, column in data.items()
        if name.endswith(("log_probs", "advantages", "opd_reverse_kl"))
    }


def note_parameters(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """A ``--custom-megatron-before-train-step-hook-path``: keep what the first step begins with."""
    if step_id == 0:
        SEEN["parameters"] = [p.detach().clone() for chunk in model for p in chunk.parameters()]


def exp_of_log_probs(args: Any, data: dict[str, Any]) -> None:
    """A ``--custom-advantage-function-path`` that works with the old log-probs."""
    data["advantages"] = data["returns"] = [values.exp() for values in data["log_probs"]]


def exp_of_them(args: Any, rollout_id: int, data: dict[str, Any]) -> None:
    """A ``--rollout-data-postprocess-path`` that does the same."""
    exp_of_log_probs(args, data)


def old_log_probs_loss(args: Any, batch: dict[str, Any], logits: torch.Tensor, reduce: Any) -> Any:
    """A ``--custom-loss-function-path`` that reads the old log-probs."""
    return logits.sum() * 0 + reduce(torch.cat(batch["log_probs"])), {}


def pass_scenarios(
    checkpoint: str, folder: str, reference: str, teacher: str, deeper: str, skips: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Everything in one launch; the test module says what each entry must be."""
    return {
        "roles": _roles(checkpoint, folder, reference, teacher),
        "teacher of another depth": _refused(checkpoint, opd_teacher_load=deeper),
        "teacher of a step that is not there": _refused(
            checkpoint, opd_teacher_load=f"{folder}/save", opd_teacher_ckpt_step=7
        ),
        "skips": _skips(checkpoint, skips),
        "masks": [_with_top_p(checkpoint, layout) for layout in TOP_P_LAYOUTS.values()],
    }


def top_p_data() -> dict[str, list[Any]]:
    """Return a rollout whose tokens were sampled among 1 to 40 others; masked ones have no top-p set."""
    data = make_train_data(seed=5)
    rng = np.random.default_rng(5)
    data["rollout_top_p_token_ids"], data["rollout_top_p_token_offsets"] = [], []
    for tokens, response, mask in zip(data["tokens"], data["response_lengths"], data["loss_masks"], strict=True):
        masks = [
            sorted({*rng.choice(256, rng.integers(0, 40), replace=False).tolist(), token}) if trained else []
            for token, trained in zip(tokens[-response:], mask, strict=True)
        ]
        data["rollout_top_p_token_ids"].append([token for kept_ids in masks for token in kept_ids])
        data["rollout_top_p_token_offsets"].append([0, *np.cumsum([len(kept_ids) for kept_ids in masks]).tolist()])
    return data


def _with_top_p(checkpoint: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Train two steps on masks; return the report, the old log-probs and what the door says without them."""
    settings = {
        "rollout_top_p": 0.9, "global_batch_size": 4, "entropy_coef": 0.01, "use_kl_loss": True, "lr": 1e-2,
        "adam_eps": 1e-3,  # Adam divides by the gradient's size: rounding of tiny ones would be as large as a step
        "rollout_data_postprocess_path": HERE + "note_columns",
    }  # fmt: skip
    trainer, _ = new_trainer(checkpoint, with_ref=True, load=checkpoint, **settings, **layout)
    found = {"report": train_once(trainer, 0, top_p_data()), **SEEN["columns"]}
    return {**found, "without": error_of(lambda: train_once(trainer, 1, make_train_data(seed=5)))}


def _roles(checkpoint: str, folder: str, reference: str, teacher: str) -> dict[str, Any]:
    """Reference, teacher and old weights in one run of the overlapped loop, then a restart."""
    settings = {
        "global_batch_size": 4, "overlap_grad_reduce": True, "overlap_param_gather": True, "save": f"{folder}/save",
        "ref_load": reference, "use_kl_loss": True, "kl_loss_coef": 0.1, "lr": 1e-2, "keep_old_actor": True,
        "update_weights_interval": 1, "use_opd": True, "opd_type": "megatron", "opd_kl_coef": 0.5,
        "opd_teacher_load": teacher, "rollout_data_postprocess_path": HERE + "note_columns",
        "custom_megatron_before_train_step_hook_path": HERE + "note_parameters",
    }  # fmt: skip
    trainer, _ = new_trainer(checkpoint, with_ref=True, load=checkpoint, **settings)
    found: dict[str, Any] = {"rollouts": []}
    trainer.weights_synced(synchronous_loop=False)
    for rollout_id in range(3):
        before = [p.detach().clone() for chunk in trainer.model for p in chunk.parameters()]
        trainer.export_hf(f"{folder}/hf-{rollout_id}")
        report = train_once(trainer, rollout_id, make_train_data(seed=rollout_id))
        restored = all(map(torch.equal, before, SEEN["parameters"]))
        found["rollouts"].append({**report, **SEEN["columns"], "restored": restored})
        trainer.save(rollout_id, force_sync=True)
        if rollout_id == 1:
            trainer.offload()
        trainer.weights_synced(synchronous_loop=False)
        if rollout_id == 1:
            trainer.onload()
    found["copies"] = {tag: len(trainer._backup._copies[tag]) for tag in trainer._backup.tags}
    found["tensors"] = len(before)

    restart = {**settings, "opd_teacher_load": f"{folder}/save", "opd_teacher_ckpt_step": 0}
    trainer, found["start"] = new_trainer(checkpoint, with_ref=True, load=f"{folder}/save", ckpt_step=1, **restart)
    trainer.weights_synced(synchronous_loop=False)
    found["resumed"] = {**train_once(trainer, 2, make_train_data(seed=2)), **SEEN["columns"]}
    return found


def _refused(checkpoint: str, **settings: Any) -> str:
    try:
        new_trainer(checkpoint, load=checkpoint, use_opd=True, opd_type="megatron", opd_kl_coef=1.0, **settings)
    except Exception as error:  # noqa: BLE001 -- the test says which it must be
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    return "accepted"


def _skips(checkpoint: str, scenarios: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Train each scenario with the log-prob pass made and left out; return what the rule says and what comes of both.

    ``rollouts`` trains several rollouts, with a weight sync after each.
    """
    from slime.backends.megatron_utils.train import logprob_passes as passes

    rule = passes.old_log_probs_equal_current
    found: dict[str, dict[str, Any]] = {}
    for name, scenario in scenarios.items():
        found[name] = {}
        asked: list[bool] = []
        for skip in (False, True):

            def answer(args: Any, data: Any, skip: bool = skip, asked: list[bool] = asked) -> bool:
                asked.append(rule(args, data))
                return skip

            passes.old_log_probs_equal_current = answer  # type: ignore[assignment]
            try:
                found[name]["skipped" if skip else "made"] = _trained(checkpoint, **scenario)
            finally:
                passes.old_log_probs_equal_current = rule
        found[name]["rule"] = asked
    return found


def _trained(checkpoint: str, rollouts: int = 1, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    try:
        trainer, _ = new_trainer(checkpoint, load=checkpoint, **settings)
        for rollout_id in range(rollouts):
            report = train_once(trainer, rollout_id, make_train_data(seed=rollout_id))
            trainer.weights_synced(synchronous_loop=False)
    except Exception as error:  # noqa: BLE001 -- that it fails without the pass is what is asked
        return {"error": f"{type(error).__name__}: {error}"}
    gradients = [p.main_grad.clone() for chunk in trainer.model for p in chunk.parameters()]
    return {**report, "parameters": parameters(trainer), "gradients": gradients}
