"""Assertions of ``--ci-test``: what must hold for a healthy model at the start of a run."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path

import torch

from slime.backends.megatron_utils.parallel import is_main_rank
from slime.utils.atomic_file import replacing

_GRAD_NORM_TOLERANCE = 0.01


def check_rollout(args: Namespace, rollout_id: int, metrics: dict[str, float]) -> None:
    """Check means over the rollout: log-probs in (-1, 0), entropy in (0, 1), reference equal to actor at rollout 0.

    Raises AssertionError. No-op without ``--ci-test``, and off the last pipeline stage, where there are no metrics.
    """
    if not args.ci_test or not metrics:
        return
    log_probs, ref = metrics.get("rollout/log_probs"), metrics.get("rollout/ref_log_probs")
    if rollout_id == 0 and log_probs is not None and ref is not None and _kl_checks(args):
        assert abs(log_probs - ref) < 1e-8, f"actor and reference differ before training: {log_probs} and {ref}"
    if log_probs is not None:
        assert -1 < log_probs < 0, f"mean log-prob {log_probs} is outside of (-1, 0)"
    entropy = metrics.get("rollout/entropy")
    if entropy is not None:
        assert 0 < entropy < 1, f"mean entropy {entropy} is outside of (0, 1)"


def check_steps(args: Namespace, rollout_id: int, steps: list[dict[str, float]], role: str = "actor") -> None:
    """Check the optimiser steps' metrics and compare or record gradient norms. Raises AssertionError."""
    for step_id, metrics in enumerate(steps):
        if args.ci_test:
            _check_step(args, rollout_id, step_id, metrics)
        _compare_grad_norm(args, role, rollout_id, step_id, metrics["grad_norm"])


def _check_step(args: Namespace, rollout_id: int, step_id: int, metrics: dict[str, float]) -> None:
    where = f"rollout {rollout_id}, step {step_id}"
    threshold = args.ci_train_rollout_logprob_abs_diff_threshold
    difference = metrics.get("train_rollout_logprob_abs_diff")
    if difference is not None:
        assert difference <= threshold, (
            f"{where}: trainer and engine log-probs differ by {difference} on average; "
            f"--ci-train-rollout-logprob-abs-diff-threshold is {threshold}"
        )
    mtp_loss = metrics.get("mtp_loss")
    if mtp_loss is not None:
        assert 0 < mtp_loss < 1, f"{where}: the loss of MTP layers is {mtp_loss}, not in (0, 1)"
    if args.ci_disable_kl_checker:
        return
    other_policy = args.use_rollout_logprobs or args.keep_old_actor
    if step_id == 0 and "ppo_kl" in metrics and "pg_clipfrac" in metrics and not other_policy:
        assert abs(metrics["ppo_kl"]) < 1e-8, (
            f"{where}: the policy is not the old policy yet, ppo_kl {metrics['ppo_kl']}"
        )
    if rollout_id == 0 and step_id == 0 and "kl_loss" in metrics and _kl_checks(args):
        assert abs(metrics["kl_loss"]) < 1e-8, (
            f"{where}: the policy is the reference, but kl_loss is {metrics['kl_loss']}"
        )


def _kl_checks(args: Namespace) -> bool:
    return not args.ci_disable_kl_checker and not args.use_rollout_routing_replay


def _compare_grad_norm(args: Namespace, role: str, rollout_id: int, step_id: int, grad_norm: float) -> None:
    fields = {"role": role, "rollout_id": rollout_id, "step_id": step_id}
    if (template := args.ci_save_grad_norm) and is_main_rank():
        path = Path(template.format(**fields))
        with replacing(path) as temporary:
            torch.save(grad_norm, temporary)
    if template := args.ci_load_grad_norm:
        expected = float(torch.load(template.format(**fields), weights_only=True))
        assert math.isclose(grad_norm, expected, rel_tol=_GRAD_NORM_TOLERANCE, abs_tol=_GRAD_NORM_TOLERANCE), (
            f"rollout {rollout_id}, step {step_id}: gradient norm {grad_norm}, --ci-load-grad-norm has {expected}"
        )
