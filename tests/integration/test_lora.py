"""Adapters are trained as PEFT would, under every layout, and leave the trainer whole."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import plain_grpo
from tests.support.distributed import run_distributed
from tests.support.lora_ranks import ALPHA, KL, RANK, SGD, write_random_adapter
from tests.support.trainer import make_train_data, tiny_checkpoint, trainer_args

pytestmark = pytest.mark.integration

DENSE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2}
SP: dict[str, Any] = {"sequence_parallel": True}
FULL: dict[str, Any] = {
    "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1,
}  # fmt: skip
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2": ("dense", TP2),
    "TP2+SP, recomputed": ("dense", {**TP2, **SP, **FULL}),
    "PP2": ("dense", {"pipeline_model_parallel_size": 2}),
    "CP2": ("dense", {"context_parallel_size": 2}),
    "DP2": ("dense", {}),
    "experts, EP2": ("experts", {"expert_model_parallel_size": 2}),
    "experts, TP2+SP, ETP2": ("experts", {**TP2, **SP}),
    "experts, TP2+SP, ETP1": ("experts", {**TP2, **SP, "expert_tensor_parallel_size": 1}),
}

# Two steps of Adam, whose second forward pass waits for parameters that are gathered while it runs.
ADAM: dict[str, Any] = {
    "optimizer": "adam", "use_distributed_optimizer": True, "lr": 1e-2, "clip_grad": 1.0, "global_batch_size": 4,
}  # fmt: skip
OVERLAPPED: dict[str, Any] = {"overlap_grad_reduce": True, "overlap_param_gather": True}
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("experts", ADAM),
    "experts, overlapped": ("experts", {**ADAM, **OVERLAPPED}),
    "experts, EP2, overlapped": ("experts", {**ADAM, **OVERLAPPED, "expert_model_parallel_size": 2}),
}


class Models:
    """Two tiny models, an adapter for each, and the checkpoint with it merged by brute force."""

    def __init__(self, folder: Path) -> None:
        self.paths = {
            "dense": tiny_checkpoint(folder / "dense", seed=0),
            "experts": tiny_checkpoint(
                folder / "experts", seed=1, family="qwen3_moe", tie_word_embeddings=True, mlp_only_layers=[1]
            ),
        }
        self.other = tiny_checkpoint(folder / "other", seed=2)
        self.adapters = {
            name: write_random_adapter(path, folder / f"{name}-adapter", DENSE) for name, path in self.paths.items()
        }
        self.merged = {name: self._merge(name, folder / f"{name}-merged") for name in self.paths}

    def adapter(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(Path(self.adapters[name]) / "adapter_model.safetensors")

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        return load_file(Path(self.merged[name]) / "model.safetensors")

    def _merge(self, name: str, out: Path) -> str:
        shutil.copytree(self.paths[name], out)
        adapter, weights = self.adapter(name), load_file(out / "model.safetensors")
        for key in list(weights):
            start = f"base_model.model.{key.removesuffix('.weight')}"
            if f"{start}.lora_A.weight" in adapter:
                product = adapter[f"{start}.lora_B.weight"] @ adapter[f"{start}.lora_A.weight"]
                weights[key] = weights[key] + ALPHA / RANK * product
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
        return str(out)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("lora"))


def _scenario(models: Models, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"checkpoint": models.paths[name], "adapter": models.adapters[name], "args": args}


@pytest.fixture(scope="module")
def on_two(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the findings of the last of two ranks, by layout; "life" has the states of a trainer."""
    folder = str(tmp_path_factory.mktemp("life"))
    life = {"checkpoint": models.paths["dense"], "other": models.other, "folder": folder}
    scenarios = [_scenario(models, name, args) for name, args in (LAYOUTS | STEPS).values()]
    arguments = {"scenarios": scenarios, "life": life}
    found = run_distributed("tests.support.lora_ranks:scenarios_and_life", 2, arguments, timeout=600)[-1]
    return {
        **dict(zip(LAYOUTS | STEPS, found["gradients"], strict=True)),
        "life": {**found["life"], "folder": folder},
    }


@pytest.fixture(scope="module")
def plain(models: Models) -> dict[str, dict[str, Any]]:
    """Metrics, and the gradients of the adapters: of W + s B A, whose gradient is G, dB = s G A' and dA = s B' G."""
    found = {}
    for name, path in models.paths.items():
        args = trainer_args(path, **SGD, **KL)
        step = plain_grpo.train(args, models.merged[name], path, make_train_data(seed=3))[0]
        weights, adapter, gradients = _by_expert(step["grads"]), models.adapter(name), {}
        for key in adapter:
            start = key.removesuffix(".lora_A.weight").removesuffix(".lora_B.weight")
            weight = weights[start.removeprefix("base_model.model.") + ".weight"]
            a, b = adapter[f"{start}.lora_A.weight"], adapter[f"{start}.lora_B.weight"]
            gradients[key] = ALPHA / RANK * (b.T @ weight if key.endswith("lora_A.weight") else weight @ a.T)
        found[name] = {"metrics": step["metrics"], "gradients": gradients}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_of_autograd(layout: str, plain: dict[str, dict[str, Any]], on_two: dict[str, Any]) -> None:
    expected, seen = plain[LAYOUTS[layout][0]], on_two[layout]
    for metric in ("loss", "pg_loss", "kl_loss"):
        assert seen["steps"][0][metric] == pytest.approx(expected["metrics"][metric], rel=1e-5, abs=2e-7), metric
    gradients = expected["gradients"]
    assert seen["gradients"].keys() == gradients.keys()
    norm = torch.stack([g.double().norm() for g in gradients.values()]).norm().item()
    assert seen["steps"][0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, gradient in gradients.items():
        difference = (seen["gradients"][name] - gradient).norm().item()
        assert difference <= 1e-5 * max(gradient.norm().item(), 1e-2 * norm), name


def test_gradients_are_those_of_peft(models: Models, plain: dict[str, dict[str, Any]]) -> None:
    import peft

    path, expected = models.paths["dense"], plain["dense"]
    model = peft.PeftModel.from_pretrained(plain_grpo.load(path), models.adapters["dense"], is_trainable=True)
    [step] = plain_grpo.train(trainer_args(path, **SGD, **KL), model, path, make_train_data(seed=3))
    assert step["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-5, abs=2e-7)
    found = {name.replace(".default.", "."): gradient for name, gradient in step["grads"].items()}
    assert found.keys() == expected["gradients"].keys()
    for name, gradient in found.items():
        difference = (expected["gradients"][name] - gradient).norm().item()
        assert difference <= 1e-5 * max(gradient.norm().item(), 1e-2 * step["grad_norm"]), name


def _by_expert(grads: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transformers stacks experts, gate above up: take them apart, under the names of the checkpoint."""
    found = {}
    for name, grad in grads.items():
        if name.endswith("experts.gate_up_proj"):
            for i, expert in enumerate(grad):
                start = name.removesuffix("gate_up_proj")
                found[f"{start}{i}.gate_proj.weight"], found[f"{start}{i}.up_proj.weight"] = expert.chunk(2)
        elif name.endswith("experts.down_proj"):
            start = name.removesuffix("down_proj")
            found.update({f"{start}{i}.down_proj.weight": expert for i, expert in enumerate(grad)})
        else:
            found[name] = grad
    return found


@pytest.mark.parametrize("overlapped", ["experts, overlapped", "experts, EP2, overlapped"])
def test_steps_see_the_parameters_of_the_step_before(overlapped: str, on_two: dict[str, Any]) -> None:
    seen, expected = on_two[overlapped], on_two["experts"]
    for step, other in zip(seen["steps"], expected["steps"], strict=True):
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)
    for name, tensor in expected["after"].items():
        torch.testing.assert_close(seen["after"][name], tensor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_adapter_is_read_and_merged(layout: str, models: Models, on_two: dict[str, Any]) -> None:
    name, seen = LAYOUTS[layout][0], on_two[layout]
    adapter, weights = models.adapter(name), models.weights(name)
    assert seen["read"].keys() == adapter.keys()
    assert all(torch.equal(seen["read"][key], tensor) for key, tensor in adapter.items())
    assert seen["merged"].keys() == weights.keys()
    for key, weight in weights.items():
        torch.testing.assert_close(seen["merged"][key], weight, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def life(on_two: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = on_two["life"]
    return found


def _largest(seen: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(seen, other, strict=True))


def test_new_adapters_change_nothing(life: dict[str, Any]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(life["at first"], life["base"], strict=True))
    assert life["start"] == 0
    assert all(".adapter." in name for name in life["trained"])
    assert len(life["trained"]) == 2 * len(DENSE) * 2


def test_the_reference_is_the_base(life: dict[str, Any]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(life["reference"], life["base"], strict=True))
    assert _largest(life["after a step"], life["base"]) > 1e-3
    assert life["bytes of copies"] == 0


def test_a_resumed_run_continues_exactly(life: dict[str, Any]) -> None:
    assert life["start again"] == 1
    assert all(torch.equal(life["loaded"][name], tensor) for name, tensor in life["saved"].items())
    assert all(torch.equal(life["resumed"][name], tensor) for name, tensor in life["uninterrupted"].items())


def test_a_checkpoint_has_the_adapters_alone(life: dict[str, Any]) -> None:
    files = [path for path in Path(life["folder"], "save").rglob("*") if path.is_file()]
    numbers = sum(tensor.numel() for tensor in life["saved"].values())
    base = sum(tensor.numel() for tensor in life["weights of the base"].values())
    # parameters and two moments of four bytes each, and the copy in PEFT's form
    assert 16 * numbers < sum(path.stat().st_size for path in files) < 16 * numbers + 4 * base
    assert all(torch.equal(life["imported"][name], tensor) for name, tensor in life["saved"].items())


def test_the_export_has_the_adapters_merged(life: dict[str, Any]) -> None:
    exported = load_file(Path(life["folder"], "hf", "model-00001-of-00001.safetensors"))
    assert exported.keys() == life["merged"].keys()
    for name, weight in life["weights of the base"].items():
        start = f"base_model.model.{name.removesuffix('.weight')}"
        expected = weight
        if f"{start}.lora_A.weight" in life["saved"]:
            b, a = life["saved"][f"{start}.lora_B.weight"], life["saved"][f"{start}.lora_A.weight"]
            expected = weight + ALPHA / RANK * (b @ a)
        torch.testing.assert_close(exported[name], expected, rtol=1e-6, atol=1e-6)
    assert _largest(life["log-probs of the export"], life["after a step"]) < 1e-5


def test_peft_computes_what_was_trained(models: Models, life: dict[str, Any]) -> None:
    """PEFT with the adapter of the checkpoint gives the trainer's log-probs."""
    import peft

    adapter = Path(life["folder"], "save", "iter_0000000", "adapter")
    model = peft.PeftModel.from_pretrained(plain_grpo.load(models.paths["dense"]), str(adapter))
    temperature, data = trainer_args(models.paths["dense"]).rollout_temperature, make_train_data(seed=5)
    with torch.no_grad():
        expected = [
            plain_grpo.token_log_probs(model, tokens, length, temperature)[0].float()
            for tokens, length in zip(data["tokens"], data["response_lengths"], strict=True)
        ]
    for found in life["after a step"]:
        same_length = [values for values in expected if values.shape == found.shape]
        assert min((found - values).abs().max() for values in same_length) < 1e-5


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another base", "belong to the base"),
        ("another rank", "--lora-rank 3, this run 5"),
        ("no adapters", "give --lora-rank 3 --lora-alpha 6"),
        ("conversion", "holds adapters alone (--lora-rank), and no whole model"),
        ("unknown targets", "there are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"),
    ],
)
def test_what_does_not_fit_is_refused(case: str, words: str, life: dict[str, Any]) -> None:
    assert words in life[case]
