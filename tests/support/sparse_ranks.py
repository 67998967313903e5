"""Ranks of ``tests/integration/test_sparse_attention.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.megatron_checks import logits_and_weights
from tests.support.megatron_model import model_args
from tests.support.model_families import LAYOUTS
from tests.support.ranks import new_trainer, switch_layout
from tests.support.trainer import make_train_data
from tests.support.trainer_ranks import hf_weights, train_once

FULL = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", 1)
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mla_up_proj", "layernorm")
RECOMPUTED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "full, CP2": ("cp2", FULL),
    "full, PP2": ("pp2", FULL),
    "full, PP2 x VPP2": ("pp2", (*FULL, "--num-layers-per-virtual-pipeline-stage", 2)),
    "selective, TP2+SP": ("tp2-sp", SELECTIVE),
    "selective, CP2": ("cp2", SELECTIVE),
}
TRAINED = {"adam_eps": 1e-3, "lr": 1e-2, "weight_decay": 0.5}


def recomputed(checkpoint: str, scratch: str) -> dict[str, Any]:
    """Return logits and gradients of this rank under every entry of RECOMPUTED."""
    results = {}
    for name, (layout, flags) in RECOMPUTED.items():
        flags = (*LAYOUTS[layout], *flags)
        switch_layout(model_args(checkpoint, *flags))
        results[name] = logits_and_weights(checkpoint, "", flags, Path(scratch) / name)
    return results


def resumed(checkpoint: str, save: str, layouts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train a rollout under the first of ``layouts`` and save, then another; load under each and train the other there.

    Return the weights before, after the first and after the second rollout, and the metrics of the second.
    """
    first, second = make_train_data(seed=0), make_train_data(seed=1)
    trainer, _ = new_trainer(checkpoint, save=save, **layouts[0], **TRAINED)
    before = hf_weights(trainer.model, trainer.args)
    train_once(trainer, 0, first)
    saved = hf_weights(trainer.model, trainer.args)
    trainer.save(0, force_sync=True)
    results = [{"before": before, "loaded": saved, **_train(trainer, second)}]
    for layout in layouts:
        trainer, _ = new_trainer(checkpoint, load=save, save=save, **layout, **TRAINED)
        loaded = hf_weights(trainer.model, trainer.args)
        results.append({"loaded": loaded, **_train(trainer, second)})
    return results


def _train(trainer: Any, data: dict[str, Any]) -> dict[str, Any]:
    steps = train_once(trainer, 1, data)["steps"]
    return {"steps": steps, "weights": hf_weights(trainer.model, trainer.args)}
