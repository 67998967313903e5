"""The losses of routers and the biases of experts: against loops in float64, and equal in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.balancing_ranks import RATE, SEED, with_biases
from tests.support.distributed import run_distributed
from tests.support.float64 import as_float64
from tests.support.trainer import make_train_data, tiny_checkpoint

EXPERTS, TOPK, LAYERS = 8, 2, (1, 3, 4)  # the second layer is dense
# Two optimizer steps of two micro-batches of two samples. SGD: Adam's first steps divide gradients by themselves.
BASE: dict[str, Any] = {"global_batch_size": 4, "micro_batch_size": 2, "lr": 0.5}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SEQ = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.7}
EVERY: dict[str, Any] = {
    "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.6],
    "moe_z_loss_coeff": 0.02,
}
PLAIN: dict[str, dict[str, Any]] = {
    "aux": {**BASE, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.7},
    "seq": {**BASE, **SEQ},
    "z": {**BASE, "moe_z_loss_coeff": 0.05},
    "every, per token": {**BASE, **EVERY, "calculate_per_token_loss": True},
}
SAME: dict[str, dict[str, Any]] = {
    "padded": {"data_pad_size_multiplier": 64},
    "full recomputation": FULL,
    "some layers recomputed": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    "experts recomputed": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "record": {"use_routing_replay": True, "use_rollout_routing_replay": False},
}
ALONE = {
    "every": {**BASE, **EVERY},
    **{f"every, {name}": {**BASE, **EVERY, **flags} for name, flags in SAME.items()},
    "nothing": BASE,
    "seq, packed": {**BASE, **SEQ, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 96},
    "singles": {**BASE, **EVERY, "micro_batch_size": 1},
    "per layer": {**BASE, **EVERY, "moe_per_layer_logging": True},
}
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2: dict[str, Any] = {"pipeline_model_parallel_size": 2}
SPLIT: dict[str, dict[str, Any]] = {
    "TP2+SP": TP2,
    "TP2+SP, per token": {**TP2, "calculate_per_token_loss": True},
    "TP2+SP x EP2, ETP1": {**TP2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
    "CP2": {"context_parallel_size": 2},
    "CP2, per token": {"context_parallel_size": 2, "calculate_per_token_loss": True},
    "PP2, full recomputation": {**PP2, **FULL},
    "PP2 x VPP2": {**PP2, "virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True},
    "CP2 x EP2, full recomputation": {"context_parallel_size": 2, "expert_model_parallel_size": 2, **FULL},
    "DP2, singles": {"micro_batch_size": 1},
    "EP2, singles, record": {
        "expert_model_parallel_size": 2, "micro_batch_size": 1,
        "use_routing_replay": True, "use_rollout_routing_replay": False,
    },
    "EP2, singles": {"expert_model_parallel_size": 2, "micro_batch_size": 1},
    "EP2, singles, per token": {
        "expert_model_parallel_size": 2, "micro_batch_size": 1, "calculate_per_token_loss": True
    },
}  # fmt: skip
QUICK = ("TP2+SP x EP2, ETP1", "CP2, per token", "PP2 x VPP2", "DP2, singles", "EP2, singles, record")
METRICS = ("load_balancing_loss", "seq_load_balancing_loss", "z_loss")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    fields = {"num_hidden_layers": 4, "num_experts": EXPERTS, "mlp_only_layers": [1]}
    folder = tmp_path_factory.mktemp("moe")
    return as_float64(tiny_checkpoint(folder / "fp32", seed=0, family="qwen3_moe", **fields), folder / "float64")


def launched(checkpoint: str, ranks: int, scenarios: dict[str, dict[str, Any]], *, plain: bool = False) -> Any:
    arguments = {"checkpoint": checkpoint, "scenarios": scenarios, "plain": plain}
    return run_distributed("tests.support.balancing_ranks:train_balanced", ranks, arguments, fresh=True)


@pytest.fixture(scope="module")
def plain(checkpoint: str) -> dict[str, Any]:
    return launched(checkpoint, 1, PLAIN, plain=True)[0]


@pytest.fixture(scope="module")
def alone(checkpoint: str, plain: dict[str, Any]) -> dict[str, Any]:
    singles = {
        "singles, per token": {**ALONE["singles"], "calculate_per_token_loss": True},
        "singles, record": {**ALONE["singles"], **SAME["record"]},
    }
    return {**plain, **launched(checkpoint, 1, {**ALONE, **singles})[0]}


@pytest.fixture(scope="module")
def split(checkpoint: str) -> list[dict[str, Any]]:
    return launched(checkpoint, 2, {name: {**BASE, **EVERY, **SPLIT[name]} for name in QUICK})


@pytest.fixture(scope="module")
def split_further(checkpoint: str) -> list[dict[str, Any]]:
    return launched(checkpoint, 2, {name: {**BASE, **EVERY, **SPLIT[name]} for name in SPLIT if name not in QUICK})


def of_single_experts(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what transformers keeps for all experts of a layer at once by the names of checkpoints."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, kind = name.rpartition(".")
        for e, weight in enumerate(tensor) if prefix.endswith(".experts") else ():
            if kind == "gate_up_proj":
                found[f"{prefix}.{e}.gate_proj.weight"], found[f"{prefix}.{e}.up_proj.weight"] = np.split(weight, 2)
            else:
                found[f"{prefix}.{e}.{kind}.weight"] = weight
        if not prefix.endswith(".experts"):
            found[name] = tensor
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_losses_and_gradients_against_loops(name: str, plain: dict[str, Any]) -> None:
    run = plain[name]
    for step, expected in zip(run["steps"], run["plain"], strict=True):
        assert {metric for metric in METRICS if metric in step} == {m for m in METRICS if m in expected["metrics"]}
        for metric, value in expected["metrics"].items():
            if metric != "train_rollout_logprob_abs_diff":  # the engine's log-probs are kept in fp32
                assert step[metric] == pytest.approx(value, rel=1e-10, abs=1e-11), metric
        assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-10)
    expected_grads = of_single_experts(run["plain"][-1]["grads"])
    assert run["gradients"].keys() == expected_grads.keys()
    for parameter, gradient in run["gradients"].items():
        assert gradient.dtype == np.float64
        assert np.allclose(gradient, expected_grads[parameter], rtol=1e-9, atol=1e-12), parameter


def test_the_losses_are_felt(alone: dict[str, Any]) -> None:
    without = alone["nothing"]["gradients"]
    for name in ("aux", "seq", "z", "every"):
        for layer in LAYERS:
            parameter = f"model.layers.{layer - 1}.mlp.gate.weight"
            apart = np.linalg.norm(alone[name]["gradients"][parameter] - without[parameter])
            assert apart > 0.1 * np.linalg.norm(without[parameter]), (name, parameter)


def assert_same(run: dict[str, Any], expected: dict[str, Any]) -> None:
    for step, other in zip(run["steps"], expected["steps"], strict=True):
        for metric in (*METRICS, "grad_norm", "loss"):
            if metric in step:  # the loss is known on the last stage alone
                assert step[metric] == pytest.approx(other[metric], rel=1e-10, abs=1e-12), metric
        assert set(METRICS) <= step.keys()
    for parameter, gradient in run["gradients"].items():
        assert np.allclose(gradient, expected["gradients"][parameter], rtol=1e-9, atol=1e-12), parameter


@pytest.mark.parametrize("name", SAME)
def test_neither_padding_nor_recomputation_matters(name: str, alone: dict[str, Any]) -> None:
    if name != "record":
        assert_same(alone[f"every, {name}"], alone["every"])
        return
    # Replay changes where the second step sends tokens, and so its hidden states, but not what is balanced.
    first, expected = alone["every, record"]["steps"][0], alone["every"]["steps"][0]
    assert [first[metric] for metric in (*METRICS, "grad_norm")] == [expected[m] for m in (*METRICS, "grad_norm")]


def test_the_loss_of_sequences_does_not_depend_on_micro_batches(alone: dict[str, Any]) -> None:
    packed, expected = alone["seq, packed"], alone["seq"]
    for step, other in zip(packed["steps"], expected["steps"], strict=True):
        for metric in ("seq_load_balancing_loss", "grad_norm"):
            assert step[metric] == pytest.approx(other[metric], rel=1e-10)
    aux = [alone[name]["steps"][0]["load_balancing_loss"] for name in ("every", "singles")]
    assert abs(aux[0] - aux[1]) > 1e-3  # the other one does


@pytest.mark.parametrize("name", QUICK)
def test_layouts_balance_the_same(name: str, alone: dict[str, Any], split: list[dict[str, Any]]) -> None:
    assert_layout(name, alone, split)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in SPLIT if name not in QUICK])
def test_more_layouts_balance_the_same(name: str, alone: dict[str, Any], split_further: list[dict[str, Any]]) -> None:
    assert_layout(name, alone, split_further)


def assert_layout(name: str, alone: dict[str, Any], split: list[dict[str, Any]]) -> None:
    size = "singles" if "singles" in name else "every"
    of_all = next((f", {kind}" for kind in ("per token", "record") if kind in name), "")
    expected = alone[size + of_all]
    for rank in split:
        assert_same(rank[name], expected)


@pytest.fixture(scope="module")
def dense_first(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """A model whose first half has no experts, and what one process makes of it."""
    folder = tmp_path_factory.mktemp("dense first")
    fields = {"num_hidden_layers": 4, "num_experts": EXPERTS, "mlp_only_layers": [0, 1]}
    fp32 = tiny_checkpoint(folder / "fp32", seed=0, family="qwen3_moe", **fields)
    path = as_float64(fp32, folder / "float64")
    flags = {**BASE, **EVERY, "micro_batch_size": 1}
    return path, launched(path, 1, {"alone": flags})[0]["alone"]


def dense_stage(checkpoint: str, ranks: int, **flags: Any) -> list[dict[str, Any]]:
    scenario = {**BASE, **EVERY, **PP2, "micro_batch_size": 1, **flags}
    return [rank["split"] for rank in launched(checkpoint, ranks, {"split": scenario})]


def test_a_pipeline_stage_may_have_no_experts(dense_first: tuple[str, dict[str, Any]]) -> None:
    path, alone = dense_first
    for rank in dense_stage(path, 2):
        assert_same(rank, alone)


@pytest.mark.soak
def test_a_pipeline_stage_may_have_no_experts_where_they_are_divided(dense_first: tuple[str, dict[str, Any]]) -> None:
    path, alone = dense_first
    for rank in dense_stage(path, 4, expert_model_parallel_size=2):
        assert_same(rank, alone)


def test_layers_are_distinguished(alone: dict[str, Any]) -> None:
    for step in alone["per layer"]["steps"]:
        for metric in METRICS:
            values = [step.pop(f"moe/{metric}_layer_{layer - 1}") for layer in LAYERS]
            assert len(set(values)) == len(LAYERS)
            assert sum(values) / len(LAYERS) == pytest.approx(step[metric], rel=1e-12)
        assert not [name for name in step if name.startswith("moe/")]


BIASED: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": {"data_pad_size_multiplier": 64},
    "old policy first": {"use_rollout_entropy": True},
    "full recomputation": FULL,
    "spoilt": {"rollout_data_postprocess_path": "tests.support.trainer_ranks.spoil_one_advantage"},
    "spoilt, skipped": {
        "rollout_data_postprocess_path": "tests.support.trainer_ranks.spoil_one_advantage",
        "check_for_nan_in_loss_and_grad": False,
    },
}  # fmt: skip
BIASED_SPLIT: dict[str, dict[str, Any]] = {
    "TP2+SP": TP2,
    "CP2": {"context_parallel_size": 2},
    "PP2, full recomputation": {**PP2, **FULL},
    "EP2": {"expert_model_parallel_size": 2, "micro_batch_size": 1},
}


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("biases")
    fields = {"num_hidden_layers": 4, "num_experts": EXPERTS, "mlp_only_layers": [1]}
    path = with_biases(tiny_checkpoint(folder / "model", seed=0, family="qwen3_moe", **fields), LAYERS, EXPERTS)
    found = {}
    for ranks, scenarios in ((1, BIASED), (2, BIASED_SPLIT)):
        arguments = {"checkpoint": path, "scenarios": {n: {**BASE, "lr": 1e-4, **f} for n, f in scenarios.items()}}
        by_rank = run_distributed("tests.support.balancing_ranks:biased", ranks, arguments)
        found.update({name: [rank[name] for rank in by_rank] for name in scenarios})
    return found


@pytest.mark.parametrize("name", ["plain", "padded"])
def test_biases_follow_the_tokens_of_samples(name: str, biased: dict[str, list[Any]]) -> None:
    run = biased[name][0]
    lengths = [len(tokens) for tokens in make_train_data(seed=SEED)["tokens"]]
    assert sorted(run["maps"]) == list(LAYERS)
    for number, maps in run["maps"].items():
        assert len(maps) == 4
        for step in range(2):
            counts = torch.zeros(EXPERTS)
            for batch in (2 * step, 2 * step + 1):
                counts += maps[batch][: lengths[2 * batch] + lengths[2 * batch + 1]].sum(dim=0)
            before, after = (run["biases"][i][number] for i in (step, step + 1))
            assert torch.equal(after, before + RATE * torch.sign(counts.mean() - counts))
    assert run["left over"] == 0
    padding = sum(int(maps[0].sum()) for maps in run["maps"].values()) - 3 * TOPK * (lengths[0] + lengths[1])
    assert padding > 0  # the rows that must not count


@pytest.mark.parametrize("name", ["padded", "old policy first", "full recomputation", *BIASED_SPLIT])
def test_biases_are_the_same_in_every_layout(name: str, biased: dict[str, list[Any]]) -> None:
    expected = biased["plain"][0]["biases"]
    seen: set[int] = set()
    for rank in biased[name]:
        assert len(rank["biases"]) == 3
        for step, biases in enumerate(rank["biases"]):
            seen |= biases.keys()
            for number, bias in biases.items():
                assert torch.equal(bias, expected[step][number]), (step, number)
    assert seen == set(LAYERS)


def test_biases_stay_where_a_step_is_not_made(biased: dict[str, list[Any]]) -> None:
    stopped, skipped = biased["spoilt"][0], biased["spoilt, skipped"][0]
    assert stopped["steps"] == ["NonFiniteError"]
    assert skipped["steps"][0]["skipped_step"] == 1
    for run in (stopped, skipped):
        for number in LAYERS:
            assert torch.equal(run["biases"][1][number], run["biases"][0][number])
    assert not torch.equal(skipped["biases"][2][1], skipped["biases"][1][1])  # the second step is made


def test_the_fixture_has_room_for_mistakes(tmp_path: Path) -> None:
    """Samples of a micro-batch differ in length, so that means over tokens and over samples differ."""
    lengths = [len(tokens) for tokens in make_train_data(seed=SEED)["tokens"]]
    assert len(lengths) == 8
    assert all(abs(a - b) > 2 for a, b in zip(lengths[::2], lengths[1::2], strict=True))
