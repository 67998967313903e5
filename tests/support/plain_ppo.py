"""PPO's critic the slow, obvious way: transformers, loops in float64, one sample at a time, plain SGD.

Written from the formulas, sharing no code with slime. The critic's tests compare values, losses and gradients with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.support.plain_grpo import load


def values_of(model: torch.nn.Module, head: tuple[Tensor, Tensor], tokens: list[int], response: int) -> Tensor:
    """Return the values [response] of the states in which the response tokens were chosen."""
    weight, bias = head
    hidden = model.model(torch.tensor([tokens])).last_hidden_state[0]
    states = hidden[len(tokens) - response - 1 : len(tokens) - 1]
    return states @ weight[0] + bias[0]


def gae(rewards: list[float], values: list[float], gamma: float, lambd: float) -> tuple[list[float], list[float]]:
    """Return (advantages, returns) of the actions: A_t = sum_k (gamma lambda)^k delta_(t+k), each sum by itself."""
    length = len(values)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < length else 0.0) - values[t] for t in range(length)]
    advantages = [sum((gamma * lambd) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def train_critic(
    args: Any, checkpoint: str, head: tuple[Tensor, Tensor], data: dict[str, list[Any]]
) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Return (old values per sample, per step {"value_loss", "value_clipfrac", "grads", "head_grads", "grad_norm"})."""
    model = load(checkpoint)
    weight, bias = (t.clone().requires_grad_(True) for t in head)
    count, batch = len(data["tokens"]), args.global_batch_size
    with torch.no_grad():
        old = [values_of(model, (weight, bias), data["tokens"][i], data["response_lengths"][i]) for i in range(count)]
    returns = []
    for i in range(count):
        trained = [t for t, on in enumerate(data["loss_masks"][i]) if on]
        rewards = [0.0] * (len(trained) - 1) + [data["rewards"][i]]
        found = torch.zeros(data["response_lengths"][i])
        found[trained] = torch.tensor(gae(rewards, old[i].double()[trained].tolist(), args.gamma, args.lambd)[1])
        returns.append(found)
    steps = []
    for start in range(0, count, batch):
        loss = clipped = torch.zeros(())
        for i in range(start, start + batch):
            mask = torch.tensor(data["loss_masks"][i], dtype=torch.float32)
            new = values_of(model, (weight, bias), data["tokens"][i], data["response_lengths"][i])
            near = old[i] + (new - old[i]).clamp(-args.value_clip, args.value_clip)
            worst = torch.maximum((near - returns[i]) ** 2, (new - returns[i]) ** 2)
            weigh = mask / max(data["rollout_mask_sums"][i], 1) / batch
            loss = loss + (worst * weigh).sum()
            clipped = clipped + (((new - old[i]).abs() > args.value_clip) * weigh).sum().detach()
        trained = {name: p for name, p in model.named_parameters() if "lm_head" not in name}
        grads = torch.autograd.grad(loss, [*trained.values(), weight, bias])
        with torch.no_grad():
            for p, g in zip([*trained.values(), weight, bias], grads, strict=True):
                p -= args.lr * g
        norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt().item()
        steps.append(
            {
                "value_loss": loss.item(),
                "value_clipfrac": clipped.item(),
                "grad_norm": norm,
                "grads": dict(zip(trained, grads[:-2], strict=True)),
                "head_grads": grads[-2:],
            }
        )
    return old, steps
