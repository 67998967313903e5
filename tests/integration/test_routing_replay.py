"""Routing replay in the trainer: who decides where a token goes, in every pass, layout and recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import plain_grpo
from tests.support.distributed import run_distributed
from tests.support.routing_ranks import FORWARD, PASS, RECOMPUTED, engine_experts
from tests.support.trainer import PLAIN_SGD, make_train_data, tiny_checkpoint, trainer_args

LAYERS, EXPERTS, TOPK = 4, 8, 2
# Two optimizer steps of two or more micro-batches; what the first step changes sends most tokens elsewhere.
BASE: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "lr": 0.05}
RECORD: dict[str, Any] = {**BASE, "use_routing_replay": True, "use_rollout_routing_replay": False}
R3: dict[str, Any] = {**RECORD, "use_rollout_routing_replay": True}
# Adam's first step divides every gradient by itself, rounding included: layouts would drift apart.
SGD = {**PLAIN_SGD, "lr": 0.5}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
LAST_LAYERS = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
ONE: dict[str, dict[str, Any]] = {
    "off": {"args": BASE},
    "record": {"args": RECORD},
    "record, full recomputation": {"args": {**RECORD, **FULL}},
    "record, some layers recomputed": {"args": {**RECORD, **LAST_LAYERS}},
    "record, experts recomputed": {
        "args": {**RECORD, "recompute_granularity": "selective", "recompute_modules": ["moe"]}
    },
    "record, dynamic batches": {"args": {**RECORD, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 50}},
    "R3": {"args": R3, "engine": True},
    "R3, after a rollout that failed": {
        "args": {**R3, "custom_megatron_before_train_step_hook_path": "tests.support.routing_ranks.fail_on_demand"},
        "engine": True,
        "fails": "no such luck",
    },
    "record, SGD": {"args": {**RECORD, **SGD}},
    "R3, SGD": {"args": {**R3, **SGD}, "engine": True, "gradients": True},
}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP2 = {**PP2, "virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True}
SPLIT: dict[str, dict[str, Any]] = {
    "EP2": {"expert_model_parallel_size": 2, "micro_batch_size": 1},
    "TP2": TP2,
    "TP2 EP2": {**TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "CP2": {"context_parallel_size": 2},
    "PP2, full recomputation": {**PP2, **FULL},
    "VPP2, full recomputation": {**VPP2, **FULL},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("moe"),
        seed=0,
        family="qwen3_moe",
        tie_word_embeddings=True,
        num_hidden_layers=LAYERS,
        num_experts=EXPERTS,
    )


def launched(checkpoint: str, ranks: int, scenarios: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    """Per scenario, what each rank reports."""
    target = "tests.support.routing_ranks:train_and_spy"
    by_rank = run_distributed(target, ranks, {"checkpoint": checkpoint, "scenarios": list(scenarios.values())})
    return {name: [rank[i] for rank in by_rank] for i, name in enumerate(scenarios)}


@pytest.fixture(scope="module")
def alone(checkpoint: str) -> dict[str, Any]:
    return {name: ranks[0] for name, ranks in launched(checkpoint, 1, ONE).items()}


@pytest.fixture(scope="module")
def split(checkpoint: str) -> dict[str, list[Any]]:
    scenarios = {("record", name): {"args": {**RECORD, **SGD, **flags}} for name, flags in SPLIT.items()}
    scenarios |= {("R3", name): {"args": {**R3, **SGD, **flags}, "engine": True} for name, flags in SPLIT.items()}
    return launched(checkpoint, 2, scenarios)


def moved(before: list[torch.Tensor], after: list[torch.Tensor]) -> int:
    """Count the pairs of token and expert that differ between two runs over the same micro-batches."""
    assert len(before) == len(after) > 0
    return sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))


def test_without_replay_tokens_change_experts(alone: dict[str, Any]) -> None:
    for layer in alone["off"]["seen"].values():
        assert moved(layer[PASS][:2], layer[FORWARD][:2]) == 0  # first step: the weights of the pass
        assert moved(layer[PASS][2:], layer[FORWARD][2:]) > 100  # after one update


@pytest.mark.parametrize("name", [name for name in ONE if name.startswith("record")])
def test_training_goes_where_the_log_prob_pass_went(name: str, alone: dict[str, Any]) -> None:
    run = alone[name]
    assert len(run["seen"]) == LAYERS
    for number, layer in run["seen"].items():
        assert moved(layer[PASS], layer[FORWARD]) == 0
        recomputed = "recompute" in name or "recomputation" in name
        if recomputed and not ("some layers" in name and number > 2):
            assert moved(layer[PASS], layer[RECOMPUTED]) == 0
        else:
            assert not layer[RECOMPUTED]
    first, second = run["steps"]
    assert first["routing_replay_differing"] == 0
    assert second["routing_replay_differing"] > 0.5


def test_replay_changes_nothing_but_the_experts(alone: dict[str, Any]) -> None:
    numbers = ("loss", "grad_norm", "pg_loss", "ppo_kl")
    # The same weights choose the same experts: bit-equal to a step without replay.
    assert [alone["record"]["steps"][0][n] for n in numbers] == [alone["off"]["steps"][0][n] for n in numbers]
    assert alone["record"]["steps"][1]["loss"] != alone["off"]["steps"][1]["loss"]
    for name in ONE:
        if "recompute" in name or "recomputation" in name:
            for step, expected in zip(alone[name]["steps"], alone["record"]["steps"], strict=True):
                assert [step[n] for n in numbers] == [expected[n] for n in numbers], name


def test_engines_decide_in_both_passes(alone: dict[str, Any]) -> None:
    data = make_train_data(seed=5, prompts=4, per_prompt=2)
    experts = engine_experts(data, layers=LAYERS, experts=EXPERTS, topk=TOPK)
    for number, layer in alone["R3"]["seen"].items():
        for i in range(4):  # micro-batches of two samples, one after the other
            expected = []
            for sample in (2 * i, 2 * i + 1):
                chosen = torch.zeros(len(experts[sample]) + 1, EXPERTS, dtype=torch.bool)
                chosen[:-1].scatter_(1, experts[sample][:, number - 1].long(), True)
                expected.append(chosen)
            rows = torch.cat(expected)
            reported = rows.any(dim=1)  # of the last token of a sample the engine says nothing
            for runs in (layer[PASS], layer[FORWARD]):
                assert torch.equal(runs[i][: len(rows)][reported], rows[reported])
                assert (runs[i].sum(dim=1) == TOPK).all()
    # Eight experts, two of them drawn blindly: three quarters are not what the router wants.
    assert alone["R3"]["steps"][0]["routing_replay_differing"] == pytest.approx(1 - TOPK / EXPERTS, abs=0.05)


def test_a_rollout_that_failed_leaves_no_choices_behind(alone: dict[str, Any]) -> None:
    """The engines' experts of the next one decide, though its micro-batches are called the same."""
    run, expected = alone["R3, after a rollout that failed"], alone["R3"]
    assert run["steps"] == expected["steps"]
    for number, layer in expected["seen"].items():
        for kind in (PASS, FORWARD):
            assert moved(run["seen"][number][kind], layer[kind]) == 0


class _ToldRouter(torch.nn.Module):
    """A router of transformers whose experts are given; it only weighs them."""

    def __init__(self, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.experts = torch.empty(0)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden.reshape(-1, hidden.size(-1)) @ self.weight.T
        weights = logits.exp().gather(1, self.experts)
        return logits, weights / weights.sum(dim=1, keepdim=True), self.experts


def test_losses_and_gradients_against_plain_torch(
    checkpoint: str, alone: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_train_data(seed=5, prompts=4, per_prompt=2)
    experts = engine_experts(data, layers=LAYERS, experts=EXPERTS, topk=TOPK)
    reported = {tuple(tokens): chosen for tokens, chosen in zip(data["tokens"], experts, strict=True)}
    load = plain_grpo.load

    def with_told_routers(path: str) -> torch.nn.Module:
        model: Any = load(path)
        routers = []
        for layer in model.model.layers:
            layer.mlp.gate = _ToldRouter(layer.mlp.gate.weight)
            routers.append(layer.mlp.gate)

        def tell(module: Any, inputs: Any) -> None:
            chosen = reported[tuple(inputs[0][0].tolist())].long()
            for number, router in enumerate(routers):
                router.experts = torch.cat([chosen[:, number], torch.tensor([[0, 1]])])

        model.register_forward_pre_hook(tell)
        return model

    monkeypatch.setattr(plain_grpo, "load", with_told_routers)
    args = trainer_args(checkpoint, **ONE["R3, SGD"]["args"])
    expected = plain_grpo.train(args, checkpoint, None, data)
    run = alone["R3, SGD"]
    for step, plain in zip(run["steps"], expected, strict=True):
        assert step["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
        for metric, value in plain["metrics"].items():
            assert step[metric] == pytest.approx(value, rel=1e-4, abs=2e-6), metric
    routers = [name for name in run["gradients"] if name.endswith("mlp.gate.weight")]
    assert len(routers) == LAYERS
    for name in routers:  # probabilities of the given experts still teach the router
        grad = expected[-1]["grads"][name]
        assert grad.abs().max() > 1e-4
        assert (run["gradients"][name] - grad).abs().max() < 1e-4 * grad.abs().max() + 1e-6


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("source", ["record", "R3"])
def test_every_layout_replays_the_same(source: str, name: str, alone: dict[str, Any], split: dict[str, Any]) -> None:
    ranks = split[(source, name)]
    for rank in ranks:
        for layer in rank["seen"].values():
            assert moved(layer[PASS], layer[FORWARD]) == 0
            if "recomputation" in name:
                assert moved(layer[PASS], layer[RECOMPUTED]) == 0
    for i, expected in enumerate(alone[f"{source}, SGD"]["steps"]):
        steps = [rank["steps"][i] for rank in ranks]
        for step in steps:
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            if source == "R3":  # whole choices are given, so that no tie or rounding can tip one
                assert step["routing_replay_differing"] == pytest.approx(expected["routing_replay_differing"], abs=5e-3)
        assert steps[-1]["loss"] == pytest.approx(expected["loss"], rel=1e-4, abs=1e-6)
