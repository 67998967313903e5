"""``--custom-config-path``: values of flags, and attributes of plug-ins."""

from __future__ import annotations

import pytest

from slime.arguments import ArgumentError
from slime.arguments.files import custom_config
from tests.support.arguments import dry


def test_values_of_flags_are_typed(write, flags):
    text = (
        "lr: 1e-5\neps-clip: '3e-1'\nnum_experts: null\nmax_tokens_per_gpu: 0x100\nwandb_group: 007\n"
        "rollout_stop: no\nrollout_stop_token_ids: [1, '2']\nmoe_layer_freq: '([0]*2+[1])'\nwindow_size: [128, 0]\n"
        'sglang_max_total_tokens: 20k\nmultimodal_keys: \'{"image": "x"}\'\ntrain_env_vars: {A: b}\n'
        "moe_aux_loss_coeff: [1]\nrollout_sample_hook_path: my.hook\nuse_tis: yes\n"
    )
    found = custom_config.read(write(text), flags)
    assert found == {
        "lr": 1e-5, "eps_clip": 0.3, "num_experts": None, "max_tokens_per_gpu": 256, "wandb_group": "007",
        "rollout_stop": ["no"], "rollout_stop_token_ids": [1, 2], "moe_layer_freq": [0, 0, 1], "window_size": [128, 0],
        "sglang_max_total_tokens": 20_000, "multimodal_keys": {"image": "x"}, "train_env_vars": {"A": "b"},
        "moe_aux_loss_coeff": 1.0, "rollout_sample_hook_path": ["my.hook"], "use_tis": True,
    }  # fmt: skip


def test_options_are_names_too(write, flags):
    text = "disable_rewards_normalization: true\nno-offload-train: true\n--offload-rollout: true\n"
    assert custom_config.read(write(text), flags) == {
        "rewards_normalization": False, "offload_train": False, "offload_rollout": True,
    }  # fmt: skip


def test_other_names_are_attributes_of_plugins(write):
    args = dry("--custom-config-path", write("max-turns: 4\nmy_tools: [{name: search}]\nmy_rate: 1e-3\n"))
    assert (args.max_turns, args.my_tools, args.my_rate) == (4, [{"name": "search"}], 1e-3)


def test_names_that_look_like_flags(write, flags):
    path = write("globl_batch_size: 3\nmax_turns: 4\n")
    assert custom_config.look_alikes(path, custom_config.read(path, flags), flags) == [
        f"--custom-config-path {path}: no flag is named globl_batch_size; it is kept for plug-ins. Did you mean "
        "global_batch_size?"
    ]
    assert custom_config.look_alikes(None, {"globl_batch_size": 3}, flags) == []


def test_checks_see_its_values(write):
    path = write("use_tis: true\nuse_rollout_logprobs: true\n")
    with pytest.raises(ArgumentError, match="--use-rollout-logprobs and --use-tis exclude each other"):
        dry("--custom-config-path", path)


def test_derived_values_follow(write):
    args = dry("--custom-config-path", write("eps_clip: 0.3\n"))
    assert args.eps_clip_high == 0.3


def test_all_mistakes_at_once(mistakes, flags):
    text = (
        "seed: x\nlr: fast\nuse_tis: 1\nadvantage_estimator: grp\neval_interval: 0\nhidden_dropout:\n"
        "moe_layer_freq: [0, 1, x]\nrollout_stop: []\ntrain_env_vars: {A: 1}\nkl-coef: 0\nkl_coef: 0\n"
        "rollout_batch_size: null\nwandb_group: [a]\nmax_tokens_per_gpu: true\nmy var: 3\nyes: 1\n7: 1\n"
    )
    estimators = "grpo, gspo, cispo, reinforce_plus_plus, reinforce_plus_plus_baseline, rloo, ppo"
    assert mistakes(lambda path: custom_config.read(path, flags), "--custom-config-path", text) == [
        "line 1, seed: expected an integer, got 'x'",
        "line 2, lr: expected a number, got 'fast'",
        "line 3, use_tis: expected true or false, got 1",
        f"line 4, advantage_estimator: expected one of {estimators}, got 'grp'",
        "line 5, eval_interval: expected a value greater than or equal to 1, got 0",
        "line 6, hidden_dropout: expected a number, got nothing",
        "line 7, moe_layer_freq: expected an integer or a list like [0]*3+[1]*58, got a list",
        "line 8, rollout_stop: expected at least one value, got an empty list",
        "line 9, train_env_vars.A: expected text, got 1",
        "line 11, kl_coef: the same flag is given on line 10 already; keep one",
        "line 12, rollout_batch_size: expected an integer, got nothing",
        "line 13, wandb_group: expected text, got a list",
        "line 14, max_tokens_per_gpu: expected an integer, got true",
        "line 15, my var: expected the name of an attribute: letters, digits and underscores",
        "line 16, True: a name must be text; write 'True' in quotes",
        "line 17, [7]: a name must be text; write '7' in quotes",
    ]
