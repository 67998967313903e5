"""The trainer's plugin functions: called as documented, and what is said of those that return something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slime.backends.megatron_utils.model.provider import model_provider
from slime.backends.megatron_utils.train.data import per_sample_columns
from slime.backends.megatron_utils.train.hooks import CONTRACTS, checked_loss, load_trainer_hooks, optional_function
from slime.backends.megatron_utils.train.loss import (
    compute_advantages_and_returns,
    loss_function,
    sft_loss_function,
    vanilla_tis_function,
)
from slime.batching.ragged_tensor import RaggedTensor
from tests.support.arguments import run_args
from tests.unit.backends.megatron_utils.test_loss import make_args, make_batch

HERE = f"{__name__}."
RETURNS: dict[str, Any] = {}
"""Results of the functions below in the test that is running."""


def whatever(*args: Any, **kwargs: Any) -> Any:
    return RETURNS["value"](*args, **kwargs)


def two(first: Any, second: Any) -> Any:
    return RETURNS["value"]


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_function_with_other_parameters_is_refused_at_start(name: str) -> None:
    right = load_trainer_hooks(run_args(**{name: HERE + "whatever"}))
    assert right is not None
    if name == "custom_advantage_function_path":
        return
    with pytest.raises(TypeError, match=rf"--{name.replace('_', '-')} .*two.* cannot be called as the flag's function"):
        load_trainer_hooks(run_args(**{name: HERE + "two"}))


def test_contracts_name_their_flags() -> None:
    for name, contract in CONTRACTS.items():
        assert contract.flag == f"--{name.replace('_', '-')}"


def test_what_a_hook_raises_says_where_it_comes_from() -> None:
    RETURNS["value"] = lambda args: 1 / 0
    hooks = load_trainer_hooks(run_args(custom_megatron_init_path=HERE + "whatever"))
    with pytest.raises(ZeroDivisionError) as error:
        hooks.after_megatron_init(None)
    assert any("in --custom-megatron-init-path" in note for note in error.value.__notes__)


def test_the_passing_hooks_are_called_with_what_the_contract_says() -> None:
    seen = []
    RETURNS["value"] = lambda *args, **kwargs: seen.append((args, kwargs))
    hooks = load_trainer_hooks(run_args(**dict.fromkeys(CONTRACTS, HERE + "whatever")))
    hooks.after_megatron_init("args")
    hooks.before_log_prob("args", "model", "ref_")
    hooks.before_train_step("args", 1, 2, "model", "optimizer", "scheduler")
    assert [len(args) for args, _ in seen] == [1, 3, 6]


def custom_loss(value: Any) -> Any:
    RETURNS["value"] = value if callable(value) else lambda *_: value
    args = make_args(loss_type="custom_loss", custom_loss_function_path=HERE + "whatever")
    batch, logits = make_batch()
    return loss_function(args, batch, 1, logits)


def test_custom_loss() -> None:
    loss, report = custom_loss(sft_loss_function)
    batch, logits = make_batch()
    expected, _ = loss_function(make_args(loss_type="sft_loss"), batch, 1, logits)
    assert loss == expected
    assert report["keys"] == ["loss"]
    assert report["mismatch"].shape == (3, 5)  # the columns are there, so they are compared


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"returned None; expected \(loss, metrics\)"),
        ((torch.ones(3), {}), r"a tensor of shape \(3,\); expected a loss that is a tensor with one number"),
        ((torch.ones(()), {}), "expected a loss that depends on the logits; was it detached"),
        ((torch.ones((), requires_grad=True), []), "expected metrics that are a dict"),
        ((torch.ones((), requires_grad=True), {"x": torch.ones(2)}), "metric 'x': a tensor of shape .*one number per"),
    ],
)
def test_custom_loss_that_returns_something_else(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"--custom-loss-function-path .*whatever.*{message}"):
        custom_loss(value)


def policy_loss(**flags: Any) -> Any:
    batch, logits = make_batch()
    return loss_function(make_args(**flags), batch, 1, logits)


def tis(value: Any) -> Any:
    RETURNS["value"] = value if callable(value) else lambda **_: value
    return policy_loss(use_tis=True, custom_tis_function_path=HERE + "whatever")


def test_custom_tis() -> None:
    assert tis(vanilla_tis_function)[0] == policy_loss(use_tis=True)[0]


TOKENS = torch.ones(8, requires_grad=True)
MASKS = [torch.ones(3), torch.ones(4), torch.ones(1)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (TOKENS, r"returned a tensor of shape \(8,\); expected \(pg_loss, loss_masks, metrics\)"),
        ((TOKENS.sum(), MASKS, {}), r"a tensor of shape \(\); expected a pg_loss of shape \(8,\)"),
        ((TOKENS, MASKS[:2], {}), r"loss_masks \[\(3,\), \(4,\)\]; expected .*\(1,\)\]: one per sample"),
        ((TOKENS, None, {}), "loss_masks None; expected"),
        ((TOKENS, MASKS, {"x": TOKENS.mean()}), "metric 'x': .*; expected one value per local token"),
        ((TOKENS, MASKS, None), "returned None; expected metrics that are a dict"),
        ((TOKENS.detach(), MASKS, {}), "expected a pg_loss that depends on the one it was given; was it detached"),
    ],
)
def test_custom_tis_that_returns_something_else(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=rf"--custom-tis-function-path .*whatever.*{message}"):
        tis(value)


def reducer(value: Any) -> Any:
    RETURNS["value"] = lambda *_: value
    return policy_loss(custom_pg_loss_reducer_function_path=HERE + "whatever")


def test_custom_reducer() -> None:
    _, report = reducer(lambda values: values.sum() * 0 + 3)
    assert dict(zip(report["keys"], report["values"][1:], strict=True))["pg_loss"] == 3
    with pytest.raises(TypeError, match=r"--custom-pg-loss-reducer.* returned None; expected a function: per-token"):
        reducer(None)
    with pytest.raises(TypeError, match=r"a function that returns a tensor of shape \(8,\); expected .* one number"):
        reducer(lambda values: values)
    with pytest.raises(TypeError, match=r"a function that returns .* depends on the values; was it detached"):
        reducer(lambda values: torch.tensor(float(values.sum())))


def rollout_data() -> dict[str, Any]:
    return {
        "tokens": [torch.zeros(5), torch.zeros(3)], "total_lengths": [5, 3], "response_lengths": [3, 1],
        "loss_masks": [torch.ones(3), torch.ones(1)], "rewards": [1.0, 2.0], "sample_indices": [70, 71],
    }  # fmt: skip


def setting(name: str, column: Any) -> Any:
    def change(*args: Any) -> None:
        data = args[-1]
        data.update({key: [torch.ones(3), torch.ones(1)] for key in ("advantages", "returns")})
        data[name] = column

    return change


BAD_COLUMNS = [
    ("advantages", torch.ones(4), r"set advantages to a tensor of shape \(4,\); expected a list of 2 tensors"),
    ("returns", [torch.ones(3)], "set returns to a list of 1; expected a list of 2"),
    ("advantages", [torch.ones(3), torch.ones(2)], r"advantages of sample index 71 to .* \(2,\); expected 1 floating"),
    ("advantages", [torch.ones(3).long(), torch.ones(1)], "of sample index 70 to .*; expected 3 floating-point"),
]


@pytest.mark.parametrize(("name", "column", "message"), BAD_COLUMNS)
def test_columns_that_hooks_set_are_checked(name: str, column: Any, message: str) -> None:
    RETURNS["value"] = setting(name, column)
    path = HERE + "whatever"
    args = run_args(kl_coef=0, custom_advantage_function_path=path)
    with pytest.raises(ValueError, match=f"--custom-advantage-function-path .*{message}"):
        compute_advantages_and_returns(args, rollout_data())
    hooks = load_trainer_hooks(run_args(rollout_data_postprocess_path=path))
    with pytest.raises(ValueError, match=f"--rollout-data-postprocess-path .*{message}"):
        hooks.postprocess_rollout_data(args, 0, rollout_data())


def test_postprocessing_works_in_place_and_keeps_every_sample(caplog: pytest.LogCaptureFixture) -> None:
    hooks = load_trainer_hooks(run_args(rollout_data_postprocess_path=HERE + "whatever"))
    RETURNS["value"] = setting("mine", [1, 2])
    data = rollout_data()
    hooks.postprocess_rollout_data(run_args(), 0, data)
    assert data["mine"] == [1, 2]
    RETURNS["value"] = lambda *args: args[-1]
    hooks.postprocess_rollout_data(run_args(), 0, rollout_data())
    assert not caplog.records
    RETURNS["value"] = lambda *args: dict(args[-1])
    hooks.postprocess_rollout_data(run_args(), 0, rollout_data())
    assert "returned a dict of 6, which is not used: it changes rollout_data in place" in caplog.text
    RETURNS["value"] = lambda *args: args[-1].update(tokens=args[-1]["tokens"][:1])
    with pytest.raises(ValueError, match=r"left 1 of 2 samples.* set their loss_masks to 0"):
        hooks.postprocess_rollout_data(run_args(), 0, rollout_data())


def test_hooks_are_given_lists_of_tensors() -> None:
    columns = ("tokens", "loss_masks")

    def note(*args: Any) -> None:
        setting("mine", [1, 2])(*args)
        seen.append([type(args[-1][name]) for name in columns])
        assert [mask.tolist() for mask in args[-1]["loss_masks"]] == [[1, 1, 1], [1]]

    seen: list[list[type]] = []
    RETURNS["value"] = note
    path = HERE + "whatever"
    for call in (
        lambda data: load_trainer_hooks(run_args(rollout_data_postprocess_path=path)).postprocess_rollout_data(
            run_args(), 0, data
        ),
        lambda data: compute_advantages_and_returns(run_args(kl_coef=0, custom_advantage_function_path=path), data),
    ):
        data = rollout_data()
        call(data | {name: RaggedTensor.of(data[name]) for name in columns})
    assert seen == [[list, list]] * 2


def test_a_custom_loss_may_have_advantages_of_its_own_form() -> None:
    RETURNS["value"] = setting("advantages", [1.0, 2.0])
    hooks = load_trainer_hooks(run_args(rollout_data_postprocess_path=HERE + "whatever"))
    hooks.postprocess_rollout_data(run_args(loss_type="custom_loss"), 0, rollout_data())
    with pytest.raises(ValueError, match=r"set advantages of sample index 70 to float 1\.0"):
        hooks.postprocess_rollout_data(run_args(loss_type="policy_loss"), 0, rollout_data())


def test_advantages_from_torch_split_reach_the_loss() -> None:
    split = torch.arange(4.0).split([3, 1])
    assert isinstance(split, tuple)
    RETURNS["value"] = setting("advantages", split)
    data = rollout_data()
    args = run_args(kl_coef=0, custom_advantage_function_path=HERE + "whatever")
    compute_advantages_and_returns(args, data)
    assert per_sample_columns(data)["advantages"] is split


def test_a_metric_without_a_value_does_not_spoil_the_step() -> None:
    """Say a mean over tokens of which this micro-batch has none."""
    nothing = torch.zeros(0).mean()
    loss, report = custom_loss(lambda *inputs: (sft_loss_function(*inputs)[0], {"mine": nothing}))
    assert torch.isfinite(loss)
    assert report["values"][1].isnan()
    assert report["finite"]


@pytest.mark.parametrize("number", [1.5, 2, np.float32(1.5), torch.tensor([1.5])])
def test_metrics_of_a_custom_loss_are_numbers_of_any_kind(number: Any) -> None:
    hook = optional_function(run_args(custom_loss_function_path=HERE + "whatever"), "custom_loss_function_path")
    assert hook is not None
    _, metrics = checked_loss(hook, (torch.ones((), requires_grad=True), {"mine": number}))
    assert metrics == {"mine": number}


def staged(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    return RETURNS["value"](pre_process, post_process, vp_stage)


def unstaged(*, pre_process: bool, post_process: bool) -> Any:
    return RETURNS["value"](pre_process, post_process)


def reported(*, pre_process: bool, post_process: bool, args: Any, config: Any) -> Any:
    return RETURNS["value"](args, config)


@pytest.mark.parametrize("by", ["custom_model_provider_path", "spec"])
def test_a_model_provider_is_given_what_it_names(by: str) -> None:
    args = run_args(**{by: HERE + "reported" if by == "custom_model_provider_path" else [__name__, "reported"]})
    seen: list[Any] = []
    RETURNS["value"] = lambda *given: seen.append(given) or torch.nn.Identity()
    model_provider(args, "config")(pre_process=True, post_process=True)
    assert seen == [(args, "config")]


@pytest.mark.parametrize("by", ["custom_model_provider_path", "spec"])
@pytest.mark.parametrize(("name", "expected"), [("staged", (True, False, 1)), ("unstaged", (True, False))])
def test_model_providers_are_called_by_keyword_and_return_a_module(by: str, name: str, expected: tuple) -> None:
    value = HERE + name if by == "custom_model_provider_path" else [__name__, name]
    provider = model_provider(run_args(**{by: value}), None)
    seen: list[Any] = []
    RETURNS["value"] = lambda *stage: seen.append(stage) or torch.nn.Identity()
    assert isinstance(provider(pre_process=True, post_process=False, vp_stage=1), torch.nn.Identity)
    assert seen == [expected]
    RETURNS["value"] = lambda *stage: None
    flag = "--" + by.replace("_", "-")
    with pytest.raises(TypeError, match=rf"{flag} .*{name} returned NoneType; expected a torch.nn.Module"):
        provider(pre_process=True, post_process=False, vp_stage=None)
