"""Hooks with the parameters that code for slime <= 0.3.1 gives them pass the checks at the start of a run."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from slime.backends.megatron_utils.train.hooks import CONTRACTS as OF_TRAINERS
from slime.rollout.hooks.contracts import contracts_of
from slime.rollout.hooks.hook import checked_hook

CORRECTION = "pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths"
FORMS: dict[str, list[str]] = {
    "rollout_function_path": [
        "args, rollout_id, data_source, evaluation=False",
        "args, rollout_id, mine, *, evaluation",
    ],
    "eval_function_path": ["args, rollout_id, data_buffer, evaluation=False", "args, rollout_id, mine, evaluation"],
    "buffer_filter_path": ["args, rollout_id, buffer, num_samples"],
    "custom_generate_function_path": [
        "args, sample, sampling_params",
        "args, sample, sampling_params, evaluation=False",
        "args, sample, sampling_params, evaluation",
    ],
    "rollout_sample_hook_path": [
        "args, sample",
        "args, sample, *, rollout_id=None, evaluation=False",
        "args, sample, evaluation",
        "args, sample, **kwargs",
    ],
    "custom_rm_path": ["args, sample, **kwargs", "args, samples, **kwargs", "args, sample"],
    "dynamic_sampling_filter_path": ["args, group, **kwargs", "args, samples"],
    "rollout_sample_filter_path": ["args, groups"],
    "rollout_all_samples_process_path": ["args, all_groups, data_source"],
    "custom_reward_post_process_path": ["args, samples", "args, samples, **kwargs"],
    "custom_convert_samples_to_train_data_path": ["args, samples"],
    "custom_rollout_log_function_path": ["rollout_id, args, samples, rollout_extra_metrics, rollout_time"],
    "custom_eval_rollout_log_function_path": ["rollout_id, args, data, extra_metrics"],
    "custom_engine_scaling_path": ["args, engines"],
    "sglang_custom_pull_weights_pre_read_hook": ["source_dir, target_version"],
    "custom_megatron_init_path": ["args"],
    "custom_megatron_before_log_prob_hook_path": ["args, model, store_prefix"],
    "custom_megatron_before_train_step_hook_path": ["args, rollout_id, step_id, model, optimizer, opt_param_scheduler"],
    "rollout_data_postprocess_path": ["args, rollout_id, rollout_data"],
    "custom_advantage_function_path": ["args, rollout_data"],
    "custom_loss_function_path": ["args, batch, logits, sum_of_sample_mean"],
    "custom_tis_function_path": [f"args, *, {CORRECTION}, **kwargs", f"args, {CORRECTION}"],
    "custom_pg_loss_reducer_function_path": [
        "total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False"
    ],
    "custom_update_weight_post_write_path": ["args, version_dir, rollout_engines"],
}
CONTRACTS = {**contracts_of("manager"), **OF_TRAINERS}


def test_every_hook_has_a_form() -> None:
    assert set(CONTRACTS) - set(FORMS) == {"data_source_path"}  # a class, of which the other tables have calls


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, found in FORMS.items() for form in found])
def test_the_reference_forms_are_taken(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scope: dict[str, Any] = {}
    exec(f"def hook({form}): ...\nasync def hook_async({form}): ...", scope)
    for kind in ("hook", "hook_async"):
        function = f"{kind}_{abs(hash((name, form)))}"  # paths are resolved once per process
        monkeypatch.setattr(sys.modules[__name__], function, scope[kind], raising=False)
        assert checked_hook(f"{__name__}.{function}", CONTRACTS[name], CONTRACTS[name].flag) is not None


@pytest.mark.parametrize("name", FORMS)
def test_a_hook_without_parameters_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function = f"nothing_{name}"
    monkeypatch.setattr(sys.modules[__name__], function, lambda: None, raising=False)
    with pytest.raises(TypeError, match="cannot be called as the flag's function"):
        checked_hook(f"{__name__}.{function}", CONTRACTS[name], CONTRACTS[name].flag)
