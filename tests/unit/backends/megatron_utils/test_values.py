"""The critic's values and their loss over packed rows, and values on their way to the actor. No Megatron."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.model.provider import freeze_parameters
from slime.backends.megatron_utils.model.value_head import ValueHead, put_value_head
from slime.backends.megatron_utils.train.cp_utils import get_sum_of_sample_mean
from slime.backends.megatron_utils.train.data import LossBatch
from slime.backends.megatron_utils.train.loss import get_values, loss_function, value_loss_function
from slime.backends.megatron_utils.train.values import add_external_columns
from tests.support.arguments import run_args

TOTAL, RESPONSE = [5, 3, 6], [2, 0, 5]


def a_batch() -> LossBatch:
    generator = torch.Generator().manual_seed(0)

    def draw(n: int) -> torch.Tensor:
        return torch.randn(n, generator=generator)

    return LossBatch(
        {
            "unconcat_tokens": [torch.arange(n) for n in TOTAL],
            "total_lengths": TOTAL,
            "response_lengths": RESPONSE,
            "loss_masks": [torch.tensor([1, 0]), torch.zeros(0, dtype=torch.int64), torch.ones(5, dtype=torch.int64)],
            "values": [draw(n) for n in RESPONSE],
            "returns": [draw(n) for n in RESPONSE],
            "global_batch_size": 3,
        }
    )


def lengths(batch: dict[str, Any]) -> dict[str, Any]:
    return {key: batch[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")}


def test_a_tokens_value_is_the_output_before_it_undivided_by_the_temperature() -> None:
    row = torch.arange(16.0).reshape(1, 16, 1)  # 5 + 3 + 6 positions and padding
    _, found = get_values(row, args=run_args(rollout_temperature=0.5), **lengths(a_batch()))
    assert [v.tolist() for v in found["values"]] == [[2, 3], [], [8, 9, 10, 11, 12]]
    with pytest.raises(ValueError, match="one value per position"):
        get_values(row.expand(1, 16, 2), args=None, **lengths(a_batch()))


@pytest.mark.parametrize("per_token", [False, True])
def test_the_loss_is_the_clipped_square_reduced_like_every_loss(per_token: bool) -> None:
    batch = a_batch()
    row = torch.randn(1, 14, 1, generator=torch.Generator().manual_seed(1)).requires_grad_(True)
    reduce = get_sum_of_sample_mean(TOTAL, RESPONSE, batch["loss_masks"], per_token)
    loss, metrics = value_loss_function(run_args(value_clip=0.3), batch, row, reduce)

    expected = clipped = 0.0
    starts = [2, 7, 8]
    for i, (start, count) in enumerate(zip(starts, RESPONSE, strict=True)):
        total = max(int(batch["loss_masks"][i].sum()), 1)
        for t in range(count):
            v, old, g = (
                float(row[0, start + t, 0].detach()),
                float(batch["values"][i][t]),
                float(batch["returns"][i][t]),
            )
            near = min(max(v, old - 0.3), old + 0.3)
            weight = float(batch["loss_masks"][i][t]) / (1 if per_token else total)
            expected += weight * max((near - g) ** 2, (v - g) ** 2)
            clipped += weight * (abs(v - old) > 0.3)
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-6)
    assert {name: float(value) for name, value in metrics.items()} == {
        "value_loss": pytest.approx(expected, rel=1e-6),
        "value_clipfrac": pytest.approx(clipped, rel=1e-6),
    }
    loss.backward()
    assert row.grad is not None
    assert set(row.grad[0, :, 0].nonzero().flatten().tolist()) <= {2, 8, 9, 10, 11, 12}  # 3 is masked
    assert row.grad.abs().sum() > 0
    assert batch.finite_samples.tolist() == [True, True, True]


def test_the_critics_arguments_choose_the_value_loss() -> None:
    batch = a_batch()
    args = run_args(loss_type="value_loss", value_clip=0.3)
    _, report = loss_function(args, batch, 1, torch.zeros(1, 14, 1))  # type: ignore[arg-type]
    assert report["keys"] == ["value_loss", "value_clipfrac"]


def config(**changes: Any) -> Any:
    return SimpleNamespace(**{"hidden_size": 512, "params_dtype": torch.float32, "sequence_parallel": False, **changes})


def test_the_value_head_starts_from_its_seed_alone() -> None:
    torch.manual_seed(5)
    head = ValueHead(config(), std=0.3, seed=1)
    torch.manual_seed(6)
    again, other = ValueHead(config(params_dtype=torch.bfloat16), std=0.3, seed=1), ValueHead(config(), std=0.3, seed=2)
    assert torch.equal(head.weight.bfloat16(), again.weight)
    assert not torch.equal(head.weight, other.weight)
    assert float(head.weight.detach().std()) == pytest.approx(0.3, rel=0.15)
    assert head.bias.tolist() == [0.0]
    parts = ValueHead(config(sequence_parallel=True), std=0.3, seed=1)
    assert parts.weight.sequence_parallel
    assert not hasattr(head.weight, "sequence_parallel")


def test_the_value_head_takes_the_place_of_the_output_layer() -> None:
    args = run_args(seed=1, init_method_std=None)
    model = torch.nn.Module()
    model.language_model = torch.nn.Module()
    with pytest.raises(ValueError, match="has no output_layer"):
        put_value_head(args, config(), model)  # type: ignore[arg-type]
    model.language_model.output_layer = torch.nn.Linear(2, 2)
    put_value_head(args, config(), model)  # type: ignore[arg-type]
    assert float(model.language_model.output_layer.weight.detach().std()) == pytest.approx(0.02, rel=0.15)  # type: ignore[arg-type]
    model.language_model.share_embeddings_and_output_weights = True  # type: ignore[assignment]
    with pytest.raises(ValueError, match="would not be called"):
        put_value_head(args, config(), model)  # type: ignore[arg-type]


def some_data() -> dict[str, Any]:
    masks = [torch.ones(n, dtype=torch.int32) for n in (2, 3)]
    return {
        "tokens": [torch.arange(4), torch.arange(4)],
        "total_lengths": [4, 4],
        "response_lengths": [2, 3],
        "loss_masks": masks,
        "sample_indices": [7, 9],
    }


def test_values_reach_the_actor_on_its_device() -> None:
    data = some_data()
    columns = {"values": [torch.zeros(2), torch.zeros(3)], "mine": ["a", "b"]}
    add_external_columns(data, columns, torch.device("cpu"))
    assert data["mine"] == ["a", "b"]
    assert [value.tolist() for value in data["values"]] == [[0, 0], [0, 0, 0]]
    del columns["values"]
    add_external_columns(data, {**columns, "theirs": [torch.zeros(2), "x"]}, torch.device("meta"))
    assert data["theirs"][0].is_meta


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([torch.zeros(2)], "values of 1 samples, this rank has 2"),
        ([torch.zeros(2), torch.zeros(2)], r"sample index 9: the critic sent \(2,\) values for 3"),
        ([torch.zeros(2), torch.full((3,), torch.inf)], "sample index 9: the critic's values are not finite"),
    ],
)
def test_values_that_cannot_be_right_are_refused(values: list[torch.Tensor], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        add_external_columns(some_data(), {"values": values}, torch.device("cpu"))


@pytest.mark.parametrize(
    "flags", [{"freeze_params_name_list": ["output_layer"]}, {"only_train_params_name_list": ["0.weight"]}]
)
def test_a_fresh_head_is_trained_whatever_is_frozen(flags: dict[str, list[str]]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model.output_layer = ValueHead(config(), std=0.1, seed=1)
    freeze_parameters(run_args(**flags), [model])  # type: ignore[arg-type]
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained >= {"output_layer.weight", "output_layer.bias"}
    assert ("0.bias" in trained) == ("freeze_params_name_list" in flags)
