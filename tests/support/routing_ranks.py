"""Ranks of the tests of routing replay: train, and record the experts that every router chose for every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.ranks import new_trainer
from tests.support.trainer import make_train_data
from tests.support.trainer_ranks import hf_gradients, train_once

PASS, FORWARD, RECOMPUTED = "log-prob pass", "training forward", "recomputation"


FAILURES: list[str] = []
"""The error of the next training step of this process."""


def fail_on_demand(*of_the_step: Any) -> None:
    """A ``--custom-megatron-before-train-step-hook-path``."""
    if FAILURES:
        raise RuntimeError(FAILURES.pop())


def engine_experts(
    data: dict[str, list[Any]], *, layers: int, experts: int, topk: int, seed: int = 11
) -> list[torch.Tensor]:
    """Return choices drawn blindly: per sample int32 [total_length - 1, layers, topk], distinct per token."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.rand(len(tokens) - 1, layers, experts, generator=generator).argsort(-1)[..., :topk].to(torch.int32)
        for tokens in data["tokens"]
    ]


def spied_routers(model: list[torch.nn.Module]) -> dict[int, dict[str, list[torch.Tensor]]]:
    """Return, filled as the model runs, per layer number and kind of run the routing maps in the order of the calls."""
    from megatron.core.transformer.moe.router import TopKRouter

    seen: dict[int, dict[str, list[torch.Tensor]]] = {}
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                runs = seen[module.layer_number] = {PASS: [], FORWARD: [], RECOMPUTED: []}
                module.register_forward_hook(_writing_to(runs))
    return seen


def _writing_to(runs: dict[str, list[torch.Tensor]]) -> Callable[..., None]:
    def write(module: torch.nn.Module, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        kind = PASS if not module.training else RECOMPUTED if in_backward else FORWARD
        runs[kind].append(output[1].clone())

    return write


def train_and_spy(checkpoint: str, scenarios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Train one rollout per scenario; return reports, routing maps, and the gradients of the last step when asked for.

    A scenario is {"args": overrides, "engine": whether the data comes with engine_experts, "gradients": bool,
    "fails": what an earlier rollout, with experts of its own, fails with before anything is trained}.
    """
    results = []
    for scenario in scenarios:
        trainer, _ = new_trainer(checkpoint, **scenario["args"])
        seen = spied_routers(trainer.model)
        data = make_train_data(seed=5, prompts=4, per_prompt=2)
        if scenario.get("engine"):
            args = trainer.args
            sizes = {"layers": args.num_layers, "experts": args.num_experts, "topk": args.moe_router_topk}
            if failure := scenario.get("fails"):
                FAILURES.append(failure)
                with pytest.raises(RuntimeError, match=failure):
                    train_once(trainer, 0, {**data, "rollout_routed_experts": engine_experts(data, **sizes, seed=12)})
                for runs in seen.values():
                    for maps in runs.values():
                        maps.clear()
            data["rollout_routed_experts"] = engine_experts(data, **sizes)
        report = train_once(trainer, 0, data)
        result = {"steps": report["steps"], "seen": seen}
        if scenario.get("gradients"):
            result["gradients"] = hf_gradients(trainer.model, trainer.args)
        results.append(result)
    return results
