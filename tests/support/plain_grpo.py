"""GRPO and its relatives the slow, obvious way: transformers, autograd, one sample at a time, plain SGD.

Written from the formulas, sharing no code with slime. The trainer's tests compare losses and gradients with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def load(checkpoint: str) -> torch.nn.Module:
    """Return the transformers model of a checkpoint in fp32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )


def token_log_probs(
    model: torch.nn.Module, tokens: list[int], response: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies [response] of the response tokens."""
    logits = model(torch.tensor([tokens])).logits[0].double() / temperature
    all_log_probs = F.log_softmax(logits, dim=-1)
    predicting = all_log_probs[len(tokens) - response - 1 : -1]
    chosen = predicting.gather(1, torch.tensor(tokens[-response:])[:, None])[:, 0]
    return chosen, -(predicting.exp() * predicting).sum(-1)


def sample_loss(
    args: Any,
    new: Tensor,
    entropy: Tensor,
    old: Tensor,
    ref: Tensor | None,
    rollout: Tensor,
    reward: float,
    mask: Tensor,
) -> dict[str, Tensor]:
    """Return per-token terms [response] of one sample: the loss and the metrics that are averaged like it."""
    advantage = reward
    log_ratio = new - old
    if args.advantage_estimator == "gspo":
        log_ratio = ((log_ratio * mask).sum() / mask.sum().clamp(min=1)).expand_as(new)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
    if args.advantage_estimator == "cispo":
        policy = -clipped.detach() * advantage * new
        clip_fraction = (clipped != ratio).double()
    else:
        policy = torch.maximum(-ratio * advantage, -clipped * advantage)
        clip_fraction = (-clipped * advantage > -ratio * advantage).double()
        if args.eps_clip_c is not None and advantage < 0:
            policy = torch.minimum(torch.full_like(policy, -args.eps_clip_c * advantage), policy)
    terms: dict[str, Tensor] = {}
    if args.use_tis:
        weight = (old - rollout).exp()
        policy = policy * weight.clamp(args.tis_clip_low, args.tis_clip)
        terms["tis"] = weight
        terms["tis_abs"] = (weight - 1).abs()
        terms["ois"] = ratio.detach()
    terms.update(pg_loss=policy, pg_clipfrac=clip_fraction, ppo_kl=-log_ratio, entropy_loss=entropy)
    terms["train_rollout_logprob_abs_diff"] = (old - rollout).abs()
    loss = policy - args.entropy_coef * entropy
    if args.use_kl_loss:
        d = new - ref
        kl = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d, "low_var_kl": ((-d).exp() - 1 + d).clamp(-10, 10)}
        terms["kl_loss"] = kl[args.kl_loss_type]
        loss = loss + args.kl_loss_coef * terms["kl_loss"]
    terms["loss"] = loss
    return terms


def train(
    args: Any,
    checkpoint: str | torch.nn.Module,
    ref_checkpoint: str | None,
    data: dict[str, list[Any]],
    also: Callable[[range], dict[str, Tensor]] | None = None,
) -> list[dict[str, Any]]:
    """Do the optimizer steps of one rollout with SGD of ``args.lr``, on a checkpoint or on what a model has to train.

    ``also`` is called with the samples of a step after their forwards and returns metrics, and under "loss" what is
    added to the loss. Returns per step {"metrics", "grads" by parameter name, "grad_norm"}; samples are taken in the
    order of ``data``.
    """
    model = load(checkpoint) if isinstance(checkpoint, str) else checkpoint
    ref_model = load(ref_checkpoint) if ref_checkpoint else None
    count, batch, temperature = len(data["tokens"]), args.global_batch_size, args.rollout_temperature

    def log_probs(m: torch.nn.Module, i: int) -> tuple[Tensor, Tensor]:
        return token_log_probs(m, data["tokens"][i], data["response_lengths"][i], temperature)

    with torch.no_grad():
        old = [log_probs(model, i)[0] for i in range(count)]
        ref = [log_probs(ref_model, i)[0] if ref_model else None for i in range(count)]
    steps = []
    for start in range(0, count, batch):
        indices = range(start, start + batch)
        totals: dict[str, Tensor] = {}
        tokens = sum(sum(data["loss_masks"][i]) for i in indices)
        trained_samples = sum(any(data["loss_masks"][i]) for i in indices)
        for i in indices:
            mask = torch.tensor(data["loss_masks"][i], dtype=torch.float64)
            rollout = torch.tensor(data["rollout_log_probs"][i], dtype=torch.float32).double()
            new, entropy = log_probs(model, i)
            terms = sample_loss(args, new, entropy, old[i], ref[i], rollout, data["rewards"][i], mask)
            weight = 1 / tokens if args.calculate_per_token_loss else 1 / max(data["rollout_mask_sums"][i], 1) / batch
            of_policy = 1 / args.pg_loss_length / batch if args.pg_loss_length is not None else weight  # Dr. GRPO
            for name, values in terms.items():
                part = (values * mask).sum() * (of_policy if name == "pg_loss" else weight)
                if name == "loss":
                    part = part + (terms["pg_loss"] * mask).sum() * (of_policy - weight)
                totals[name] = totals.get(name, torch.zeros(())) + part
        further = also(indices) if also else {}
        model.zero_grad()
        (totals["loss"] + further.pop("loss", 0.0)).backward()
        totals.update(further)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        grads = {name: p.grad.clone() for name, p in trained.items()}
        with torch.no_grad():
            for p in trained.values():
                p -= args.lr * p.grad
        norm = torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt().item()
        # What is measured is a mean over what is trained; what is minimized is divided by the batch.
        share = 1.0 if args.calculate_per_token_loss else trained_samples / batch
        metrics = {
            name: value.item() / (1.0 if name in ("loss", "pg_loss") else share) for name, value in totals.items()
        }
        steps.append({"metrics": metrics, "grads": grads, "grad_norm": norm})
    return steps
