"""Small decisions of the trainer: when a pass is skipped, CI assertions, hooks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.state.optimizer import (
    allocate_adam_state,
    choose_adam_kernel,
    reset_optimizer_states,
)
from slime.backends.megatron_utils.train import train_metrics as reporting
from slime.backends.megatron_utils.train.data import steps_of
from slime.backends.megatron_utils.train.hooks import load_trainer_hooks
from slime.backends.megatron_utils.train.logprob_passes import old_log_probs_equal_current
from slime.backends.megatron_utils.train.train_metrics import train_step
from slime.backends.megatron_utils.train.train_step import align_loss_scales
from slime.backends.megatron_utils.train.trainer import MegatronTrainer
from slime.utils import accelerator
from tests.support.arguments import run_args


def skips(steps: int = 1, **overrides: Any) -> bool:
    args = run_args(**{"loss_type": "policy_loss", "advantage_estimator": "grpo", **overrides})
    return old_log_probs_equal_current(args, {"num_microbatches": [2] * steps})


def test_the_pass_is_skipped_for_one_on_policy_step() -> None:
    assert skips()
    assert skips(use_tis=True, use_kl_loss=True, entropy_coef=0.1)
    assert skips(advantage_estimator="gspo", get_mismatch_metrics=True)
    assert skips(advantage_estimator="ppo", use_critic=True)


@pytest.mark.parametrize(
    "reason",
    [
        {"steps": 2},
        {"loss_type": "custom_loss"},
        {"kl_coef": 0.1},
        {"keep_old_actor": True},
        {"use_opd": True},
        {"use_routing_replay": True},
        {"custom_advantage_function_path": "a.b"},
        {"rollout_data_postprocess_path": "a.b"},
        {"custom_megatron_before_log_prob_hook_path": "a.b"},
        {"custom_megatron_before_train_step_hook_path": "a.b"},
        {"use_rollout_entropy": True},
        {"save_debug_train_data": "{rollout_id}.pt"},
        {"ci_test": True},
        {"profile_target": ["train_overall", "train_log_probs"]},
        {"hidden_dropout": 0.1},
        {"attention_dropout": 0.1},
        {"moe_input_jitter_eps": 0.01},
    ],
)
def test_the_pass_is_not_skipped_when_something_reads_it(reason: dict[str, Any]) -> None:
    assert not skips(**reason)


def test_engine_routing_does_not_need_the_pass() -> None:
    assert skips(use_routing_replay=True, use_rollout_routing_replay=True)


def test_steps_are_cut_out_of_the_micro_batches() -> None:
    data = {"num_microbatches": [2, 1], "micro_batch_indices": [[0], [1, 2], [3]]}
    assert steps_of(data) == [[[0], [1, 2]], [[3]]]


def test_ci_assertions() -> None:
    args = run_args(ci_test=True, ci_train_rollout_logprob_abs_diff_threshold=0.1)
    good = {"grad_norm": 1.0, "ppo_kl": 0.0, "pg_clipfrac": 0.0, "kl_loss": 0.0, "train_rollout_logprob_abs_diff": 0.05}
    good["mtp_loss"] = 0.9
    reporting.check_steps(args, 0, [good, {**good, "ppo_kl": 0.3, "kl_loss": 0.3}])
    for name, value in {
        "train_rollout_logprob_abs_diff": 0.11,
        "ppo_kl": 1e-3,
        "kl_loss": 1e-3,
        "mtp_loss": 1.1,
    }.items():
        with pytest.raises(AssertionError):
            reporting.check_steps(args, 0, [{**good, name: value}])
    reporting.check_steps(args, 3, [{**good, "kl_loss": 0.2}])  # training has moved the policy by then
    old = run_args(**{**vars(args), "keep_old_actor": True})
    reporting.check_steps(old, 3, [{**good, "ppo_kl": 1e-3}])  # the old policy is that of the engines
    args.ci_disable_kl_checker = True
    reporting.check_steps(args, 0, [{**good, "ppo_kl": 1e-3, "kl_loss": 1e-3}])
    reporting.check_steps(run_args(ci_test=False), 0, [{**good, "ppo_kl": 1.0}])


def test_ci_assertions_where_policies_differ_on_purpose() -> None:
    off = {"grad_norm": 1.0, "ppo_kl": 1e-3, "pg_clipfrac": 0.0}
    for flag in ("use_rollout_logprobs", "keep_old_actor"):
        reporting.check_steps(run_args(ci_test=True, **{flag: True}), 0, [off])
    replayed = run_args(ci_test=True, use_rollout_routing_replay=True)
    reporting.check_steps(replayed, 0, [{**off, "ppo_kl": 0.0, "kl_loss": 1e-3}])  # the reference routes for itself
    with pytest.raises(AssertionError, match="ppo_kl"):
        reporting.check_steps(replayed, 0, [off])


def test_ci_rollout_assertions() -> None:
    args = run_args(ci_test=True)
    reporting.check_rollout(args, 0, {"rollout/log_probs": -0.5, "rollout/ref_log_probs": -0.5, "rollout/entropy": 0.5})
    for metrics in (
        {"rollout/log_probs": -0.5, "rollout/ref_log_probs": -0.6},
        {"rollout/log_probs": -1.5},
        {"rollout/log_probs": 0.0},
        {"rollout/entropy": 1.2},
    ):
        with pytest.raises(AssertionError):
            reporting.check_rollout(args, 0, metrics)


def test_gradient_norms_are_recorded_and_compared(tmp_path: Path) -> None:
    template = str(tmp_path / "{role}_{rollout_id}_{step_id}.pt")
    reporting.check_steps(run_args(ci_save_grad_norm=template), 2, [{"grad_norm": 1.5}, {"grad_norm": 4.0}])
    assert torch.load(tmp_path / "actor_2_1.pt", weights_only=True) == 4.0
    load = run_args(ci_load_grad_norm=template)
    reporting.check_steps(load, 2, [{"grad_norm": 1.51}, {"grad_norm": 3.97}])
    with pytest.raises(AssertionError, match=r"rollout 2, step 1.*3\.9.*4\.0"):
        reporting.check_steps(load, 2, [{"grad_norm": 1.5}, {"grad_norm": 3.9}])


def test_a_wrong_hook_path_fails_at_start() -> None:
    with pytest.raises((ImportError, AttributeError, ValueError), match="no_such_function"):
        load_trainer_hooks(run_args(custom_tis_function_path="math.no_such_function"))
    hooks = load_trainer_hooks(run_args(custom_megatron_init_path="math.sqrt"))
    assert hooks.after_megatron_init is not None
    assert hooks.before_log_prob is None


@pytest.mark.parametrize("samples", [8, 12, 4, 9])
def test_no_place_on_the_step_axis_is_used_twice(samples: int) -> None:
    """Samples that do not fill a step wait for the next rollout, so rollouts make different numbers of steps."""
    args = run_args(rollout_batch_size=samples, n_samples_per_prompt=1, global_batch_size=4)
    places, waiting = [], 0
    for rollout_id in range(9):
        steps, waiting = divmod(waiting + samples, 4)
        places += [train_step(args, rollout_id, step_id, steps) for step_id in range(steps)]  # type: ignore[arg-type]
    assert len(places) == 9 * samples // 4
    assert places == sorted(set(places))
    if samples % 4 == 0:
        assert places == list(range(len(places)))  # without anything carried over the axis has no gaps


def test_checkpoints_for_the_way_back_are_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    trainer = MegatronTrainer(run_args(save_hf="exports/{rollout_id}"))  # type: ignore[arg-type]
    trainer._offloader = SimpleNamespace(offloaded=False)  # type: ignore[assignment]
    trainer._saver = SimpleNamespace(  # type: ignore[assignment]
        save=lambda rollout_id, state, force_sync: done.append((rollout_id, force_sync)),
        finish=lambda: done.append("published"),
    )
    trainer._state = None  # type: ignore[assignment]
    trainer._profiling = SimpleNamespace(end=lambda: done.append("recorded"))  # type: ignore[assignment]
    monkeypatch.setattr(trainer, "export_hf", done.append)
    trainer.save(3)
    trainer.save(4, force_sync=True, export=False)
    trainer.finish_saving()
    trainer.finish()
    assert done == [(3, False), "exports/3", (4, True), "published", "published", "recorded"]


def test_moments_are_forgotten_and_weights_that_lie_beside_them_are_not() -> None:
    """As optimizers that work on the host, or with rounded weights, keep them."""
    weight = torch.nn.Parameter(torch.ones(3))
    adam = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    adam.step()
    state = adam.state[weight]
    state["master_param"] = weight
    before = weight.detach().clone()
    reset_optimizer_states(SimpleNamespace(optimizer=adam))
    assert torch.equal(weight, before)
    assert [float(state[name].sum()) for name in ("step", "exp_avg", "exp_avg_sq")] == [0.0] * 3


def stepped_adam(device: str = "cpu", **options: Any) -> torch.optim.AdamW:
    parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 5, device=device) * (i + 1)) for i in range(2)]
    adam = torch.optim.AdamW(parameters, lr=0.1, **options)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = parameter.detach().square() + 0.1
        adam.step()
    return adam


def step_once_more(adam: torch.optim.AdamW) -> list[torch.Tensor]:
    for parameter in adam.param_groups[0]["params"]:
        parameter.grad = parameter.detach() - 0.3
    adam.step()
    return [parameter.detach().clone() for parameter in adam.param_groups[0]["params"]]


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_adam_makes_no_copies_of_its_moments_on_cuda(device_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of the run that saved the state does not matter."""
    monkeypatch.setattr(accelerator, "device_type", lambda: device_type)
    expected = step_once_more(stepped_adam(foreach=False))
    for saved in (stepped_adam(), stepped_adam(fused=True), stepped_adam(foreach=True)):
        adam = stepped_adam()
        adam.load_state_dict(saved.state_dict())
        choose_adam_kernel(SimpleNamespace(optimizer=adam))
        (group,) = adam.param_groups
        assert (group["fused"], group["foreach"]) == (True if device_type == "cuda" else None, None)
        torch.testing.assert_close(step_once_more(adam), expected)
        assert {float(state["step"]) for state in adam.state.values()} == {3.0}


def test_the_number_of_steps_is_where_the_kernel_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    parameter = torch.nn.Parameter(torch.empty(3, device="meta"))
    adam = torch.optim.AdamW([parameter])
    adam.state[parameter]["step"] = torch.zeros(())
    monkeypatch.setattr(accelerator, "device_type", lambda: "cuda")
    choose_adam_kernel(SimpleNamespace(optimizer=adam))
    assert adam.state[parameter]["step"].device.type == "meta"


@pytest.mark.gpu
def test_a_step_of_adam_takes_no_memory_of_the_size_of_its_state() -> None:
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1024, 1024, device="cuda")) for _ in range(8)])
    allocate_adam_state(SimpleNamespace(optimizer=adam))
    choose_adam_kernel(SimpleNamespace(optimizer=adam))
    for parameter in adam.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    adam.step()
    assert torch.cuda.max_memory_allocated() - before < 1 << 20


class Scaler:
    """The interface of Megatron's dynamic scaler."""

    hysteresis = 2

    def __init__(self, scale: float, hysteresis: int, growth: int) -> None:
        self.load_state_dict(
            {"scale": torch.tensor([scale]), "hysteresis_tracker": hysteresis, "growth_tracker": growth}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state


@pytest.mark.parametrize(
    ("scalers", "expected"),
    [([(8, 1, 0), (16, 2, 5)], (8, 1, 0)), ([(16, 2, 5), (16, 1, 0)], (16, 1, 0)), ([(4, 0, 0)], (4, 0, 0))],
)
def test_all_parts_of_the_optimizer_have_one_loss_scale(scalers: Any, expected: Any) -> None:
    parts = [SimpleNamespace(grad_scaler=Scaler(*scaler)) for scaler in scalers]
    align_loss_scales(SimpleNamespace(chained_optimizers=[*parts, SimpleNamespace(grad_scaler=None)]))
    for part in parts:
        state = part.grad_scaler.state_dict()
        assert (float(state["scale"]), state["hysteresis_tracker"], state["growth_tracker"]) == expected
    align_loss_scales(SimpleNamespace(chained_optimizers=[]))


def test_clearing_memory_empties_what_activations_are_gathered_into() -> None:
    import_megatron()
    from megatron.core import parallel_state as mpu

    mpu.destroy_global_memory_buffer()
    mpu._set_global_memory_buffer()
    try:
        mpu.get_global_memory_buffer().buffer["mpu", torch.bfloat16] = torch.empty(10)
        trainer: Any = SimpleNamespace(device=torch.device("cpu"))
        MegatronTrainer.clear_memory(trainer)
        assert mpu.get_global_memory_buffer().buffer == {}
    finally:
        mpu.destroy_global_memory_buffer()
