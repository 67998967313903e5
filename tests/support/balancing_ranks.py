"""Ranks of the balancing tests, and the losses of routers the slow, obvious way, in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support import float64, plain_grpo
from tests.support.ranks import arrays, new_trainer
from tests.support.trainer import make_train_data, trainer_args

SEED = 5


def one_layer(logits: list[torch.Tensor], topk: int) -> torch.Tensor:
    """Return E * sum_e f_e P_e over the tokens of ``logits`` (per sample [tokens, experts]), loop by loop."""
    tokens = [row for sample in logits for row in sample]
    experts = len(tokens[0])
    chosen = [0] * experts
    scores: list[Any] = [0.0] * experts
    for row in tokens:
        parts = row.exp() / row.exp().sum()
        for e in sorted(range(experts), key=lambda e: -parts[e].item())[:topk]:
            chosen[e] += 1
        scores = [score + part for score, part in zip(scores, parts, strict=True)]
    total = len(tokens)
    return experts * sum(chosen[e] / (topk * total) * scores[e] / total for e in range(experts))


class PlainBalancing:
    """Further terms of a step's loss for ``plain_grpo.train``: from the hidden states that its model's routers see."""

    def __init__(self, args: Any, micro_batch_size: int) -> None:
        self.args, self.size = args, micro_batch_size
        self.seen: list[list[torch.Tensor]] = []  # per forward with gradients, logits [tokens, experts] per layer

    def watch(self, model: Any) -> Any:
        """Note the logits of every forward of ``model`` that keeps a graph."""

        def begin(module: Any, inputs: Any) -> None:
            if torch.is_grad_enabled():
                self.seen.append([])

        def note(module: Any, inputs: Any) -> None:
            if torch.is_grad_enabled():
                hidden = inputs[0].reshape(-1, inputs[0].size(-1))
                self.seen[-1].append(hidden @ module.weight.T)

        model.register_forward_pre_hook(begin)
        for layer in model.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_pre_hook(note)
        return model

    def __call__(self, indices: range) -> dict[str, torch.Tensor]:
        samples, self.seen = self.seen, []
        assert len(samples) == len(indices)
        topk, layers = self.args.moe_router_topk, range(len(samples[0]))
        groups = [samples[i : i + self.size] for i in range(0, len(samples), self.size)]
        found: dict[str, list[Any]] = {"load_balancing_loss": [], "seq_load_balancing_loss": [], "z_loss": []}
        for n in layers:
            by_group = [[sample[n] for sample in group] for group in groups]
            found["load_balancing_loss"].append(sum(one_layer(g, topk) for g in by_group) / len(groups))
            found["seq_load_balancing_loss"].append(sum(one_layer([s[n]], topk) for s in samples) / len(samples))
            means = []
            for group in by_group:
                squares = [row.exp().sum().log() ** 2 for sample in group for row in sample]
                means.append(sum(squares) / len(squares))
            found["z_loss"].append(sum(means) / len(means))
        kinds, values = self.args.moe_router_load_balancing_type, getattr(self.args, "moe_aux_loss_coeff", 0.0)
        pairs = dict(zip(kinds, values, strict=True) if isinstance(kinds, list) else [(kinds, values)])
        weights = {
            "load_balancing_loss": pairs.get("aux_loss", 0.0),
            "seq_load_balancing_loss": pairs.get("seq_aux_loss", 0.0),
            "z_loss": getattr(self.args, "moe_z_loss_coeff", None) or 0.0,
        }
        terms: dict[str, Any] = {name: sum(found[name]) / len(layers) for name, weight in weights.items() if weight}
        terms["loss"] = sum(weight * sum(found[name]) for name, weight in weights.items())
        return terms


def train_balanced(checkpoint: str, scenarios: dict[str, dict[str, Any]], *, plain: bool) -> dict[str, dict[str, Any]]:
    """Train a rollout per scenario in float64; return its steps and last gradients, and with ``plain`` what must be."""
    float64.enable()
    from tests.support.trainer_ranks import gradients

    results = {}
    for name, flags in scenarios.items():
        results[name] = gradients(checkpoint, [{"args": flags, "data": {"seed": SEED}}])[0]
        results[name]["gradients"] = arrays(results[name]["gradients"])
        if plain:
            results[name]["plain"] = [{**step, "grads": arrays(step["grads"])} for step in _plain(checkpoint, flags)]
    return results


def _plain(checkpoint: str, flags: dict[str, Any]) -> list[dict[str, Any]]:
    args = trainer_args(checkpoint, **flags)
    balancing = PlainBalancing(args, flags["micro_batch_size"])
    load = plain_grpo.load
    plain_grpo.load = lambda path: balancing.watch(load(path))
    try:
        return plain_grpo.train(args, checkpoint, None, make_train_data(seed=SEED), balancing)
    finally:
        plain_grpo.load = load


def with_biases(checkpoint: str, layers: tuple[int, ...], experts: int) -> str:
    """Give the routers of a tiny checkpoint biases, and it the name of a family that has them; return its path."""
    path = Path(checkpoint)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    for number in layers:
        name = f"model.layers.{number - 1}.mlp.gate.e_score_correction_bias"
        tensors[name] = 0.1 * torch.randn(experts, generator=generator)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "model_type": "glm4_moe"}))
    return checkpoint


BIASES: list[dict[int, torch.Tensor]] = []
RATE = 0.02


def biased(checkpoint: str, scenarios: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Train a rollout with biases of experts per scenario; return, by layer number, what became of them on this rank.

    "biases": layer -> [experts] before each step and at the end. "maps": layer -> the routing maps
    [rows, experts] of the forwards that keep a graph, in order. "steps": the reports.
    """
    from tests.support.trainer_ranks import train_once

    results = {}
    for name, flags in scenarios.items():
        trainer, _ = new_trainer(
            checkpoint,
            moe_router_score_function="sigmoid",
            moe_router_enable_expert_bias=True,
            moe_router_bias_update_rate=RATE,
            qk_layernorm=True,
            custom_megatron_before_train_step_hook_path="tests.support.balancing_ranks.note_biases",
            **flags,
        )
        routers = _routers(trainer.model)
        maps: dict[int, list[torch.Tensor]] = {number: [] for number in routers}
        for number, router in routers.items():
            router.register_forward_hook(_writing_to(maps[number]))
        BIASES.clear()
        try:
            steps = train_once(trainer, 0, make_train_data(seed=SEED))["steps"]
        except RuntimeError as error:
            steps = [type(error).__name__]
        note_biases(None, 0, 0, trainer.model, None, None)
        left = [float(router.local_tokens_per_expert.sum()) for router in routers.values()]
        results[name] = {"biases": list(BIASES), "maps": maps, "steps": steps, "left over": sum(left)}
    return results


def note_biases(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, scheduler: Any) -> None:
    """Hook before every step."""
    BIASES.append({number: router.expert_bias.clone() for number, router in _routers(model).items()})


def _writing_to(maps: list[torch.Tensor]) -> Any:
    def write(module: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            maps.append(output[1].clone())

    return write


def _routers(model: list[torch.nn.Module]) -> dict[int, Any]:
    from megatron.core.transformer.moe.router import TopKRouter

    modules = [module for chunk in model for module in chunk.modules() if isinstance(module, TopKRouter)]
    return {int(router.layer_number): router for router in modules}
