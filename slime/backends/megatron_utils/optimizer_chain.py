"""The optimisers of a chain in checkpoints: that of routed experts, and that of the rest.

Megatron keeps one optimiser for each. What is saved of their parameters is found by the parameters' names, whichever
optimiser and rank they are in; what all parameters share (hyper-parameters, the number of steps) is saved by rank 0 for
each optimiser. Import after ``import_megatron()``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

EXPERTS = 1
"""The place of the experts' optimiser in the chain."""


def check_optimizers(saved: dict[Any, Any], optimizer: Any, directory: Path) -> None:
    """Raise ValueError for the state of another number of optimisers than ``optimizer`` chains.

    That of one for experts and the rest (as Megatron saves where it does not divide experts) will do for two.
    """
    held, own = len(_parts(saved)), len(optimizer.chained_optimizers)
    if held == own or (held == 1 and own == EXPERTS + 1 and "param_state_sharding_type" in saved):
        return
    raise ValueError(
        f"checkpoint {directory} has the state of {held} optimizers, this run has {own}: routed experts have one of "
        "their own. Resume the model that was saved, with the same parameters frozen, or go on without that state with "
        "--no-load-optim"
    )


def for_chain(loaded: dict[Any, Any], optimizer: Any) -> dict[Any, Any]:
    """Return the loaded state for ``optimizer``: what one optimiser shared is said of each of the chain.

    The groups of the two differ in their names alone: ``is_expert_parallel`` is a part of it.
    """
    shared = {key: value for key, value in loaded.items() if not isinstance(key, int)}
    if len(optimizer.chained_optimizers) == 1 or not shared:
        return loaded
    chain = {}
    for place in range(len(optimizer.chained_optimizers)):
        groups = [{**group, "is_expert_parallel": place == EXPERTS} for group in shared["optimizer"]["param_groups"]]
        inner = {**shared["optimizer"], "param_groups": groups}
        chain[place] = {**shared, "optimizer": inner, **loaded.get(place, {})}
    return chain


def complete_steps(state: dict[Any, Any], device: torch.device) -> None:
    """Fill in the number of steps where an optimiser holds no parameter on this rank, in place. Collective.

    All optimisers step together. A rank without experts, or without a share of some parameters, knows from the others
    how often; it may be rank 0, which speaks for all.
    """
    parts = _parts(state)
    own = max((_steps(part) for part in parts), default=0)
    steps = torch.tensor(own, device=device)
    dist.all_reduce(steps, op=dist.ReduceOp.MAX)
    count = int(steps.item())
    for part in parts:
        if not part.get("param_state", True):
            del part["param_state"]  # nothing of this rank's is what all ranks save alike, and would differ
        inner = part.get("optimizer", part)
        if "state" in inner:
            if any("betas" in group for group in inner["param_groups"]):
                inner["state"].setdefault("common_step", torch.tensor(float(count)))
        elif any("step" in group for group in inner["param_groups"]):
            for group in inner["param_groups"]:
                group["step"] = count


def _parts(state: dict[Any, Any]) -> list[dict[Any, Any]]:
    """The states of the optimisers: those of a chain have numbers as keys."""
    return [value for key, value in sorted(state.items(), key=str) if isinstance(key, int)] or [state]


def _steps(part: dict[Any, Any]) -> int:
    inner = part.get("optimizer", part)
    found = [group.get("step") or 0 for group in inner["param_groups"]]
    found.append(inner.get("state", {}).get("common_step", 0))
    return int(max(found))
