"""Flags of older releases: what they set now, on the command line and in every kind of file, and what is said."""

from __future__ import annotations

import json
import re

import pytest

from slime.arguments import ArgumentError
from slime.arguments.files.sglang_config import read as read_sglang_config
from slime.arguments.older_flags import older_flags, translate
from slime.arguments.rules.roles import role_args
from tests.support.arguments import dry, parse

# What SGLang 0.5.19 itself makes of its older names, and what the documents of slime <= 0.3.0 say of theirs.
MEANT = [
    ("--sglang-cuda-graph-bs 1 2 4", {"sglang_cuda_graph_bs_decode": [1, 2, 4]}),
    ("--sglang-cuda-graph-max-bs=32", {"sglang_cuda_graph_max_bs_decode": 32}),
    ("--sglang-nsa-decode-backend fa3", {"sglang_dsa_decode_backend": "fa3"}),
    ("--sglang-nsa-prefill-backend tilelang", {"sglang_dsa_prefill_backend": "tilelang"}),
    ("--sglang-mamba-scheduler-strategy extra_buffer", {"sglang_mamba_radix_cache_strategy": "extra_buffer"}),
    ("--sglang-disable-piecewise-cuda-graph", {"sglang_cuda_graph_backend_prefill": "disabled"}),
    ("--sglang-enforce-piecewise-cuda-graph", {"sglang_cuda_graph_backend_prefill": "tc_piecewise"}),
    ("--sglang-piecewise-cuda-graph-tokens 64 128", {"sglang_cuda_graph_bs_prefill": [64, 128]}),
    ("--sglang-piecewise-cuda-graph-max-tokens 4096", {"sglang_cuda_graph_max_bs_prefill": 4096}),
    ("--sglang-nsa-prefill-cp-mode round-robin-split", {"sglang_cp_strategy": "interleave"}),
    ("--sglang-prefill-cp-mode in-seq-split", {"sglang_cp_strategy": "zigzag"}),
    ("--sglang-enable-nsa-prefill-context-parallel", {"sglang_enable_prefill_cp": True}),
    ("--sglang-stream-output", {"sglang_incremental_streaming_output": True}),
    ("--sglang-enable-deepep-moe", {"sglang_moe_a2a_backend": "deepep"}),
    ("--sglang-enable-flashinfer-mxfp4-moe", {"sglang_moe_runner_backend": "flashinfer_mxfp4"}),
    ("--sglang-tp 1", {"sglang_tp_size": 1}),
    ("--agent-rollout-buffer-url http://h:1", {"rollout_buffer_url": "http://h:1"}),
    ("--slime-router-timeout 60", {"sglang_router_request_timeout_secs": 60}),
    ("--gradient-checkpointing", {"recompute_granularity": "full", "recompute_num_layers": 1}),
    ("--update-weight-delta-dir /d", {"update_weight_disk_dir": "/d"}),
    ("--critic-lr 1e-5 --critic-load /c", {"critic_overrides": {"lr": 1e-5, "load": "/c"}}),
]
WITHOUT_EFFECT = [
    "--megatron-to-hf-mode bridge", "--megatron-to-hf-mode raw", "--use-slime-router", "--qkv-format thd",
    "--qkv-format bshd", "--train-memory-margin-bytes 1073741824", "--rollout-external", "--critic-num-nodes 1",
    "--critic-num-gpus-per-node 8", "--offload-old-actor", "--offload-ref", "--use-hf-config-for-megatron",
    "--slime-router-max-connections 10", "--sglang-enable-ep-moe", "--sglang-hybrid-kvcache-ratio",
    "--sglang-hybrid-kvcache-ratio 0.5", "--sglang-enable-piecewise-cuda-graph", "--sglang-pdlb-url http://h:1",
]  # fmt: skip
REFUSED = [
    "--true-on-policy-mode", "--slime-router-middleware-paths a.b c.d", "--use-dynamic-global-batch-size",
    "--sglang-torchao-config int8wo", "--sglang-enable-double-sparsity",
]  # fmt: skip


def option_of(line):
    return re.split(r"[ =]", line)[0]


@pytest.mark.parametrize(("line", "expected"), MEANT)
def test_an_older_flag_sets_what_it_means_now(line, expected):
    args = dry(*line.split())
    assert {name: getattr(args, name) for name in expected} == expected
    assert expected.keys() <= args.explicit_flags
    (said,) = [w for w in args.warnings if w.startswith(f"{option_of(line)} ")]
    assert any("--" + name.replace("_", "-") in said for name in expected)


@pytest.mark.parametrize("line", WITHOUT_EFFECT)
def test_what_has_no_effect_says_why(line):
    args = dry(*line.split())
    (said,) = [w for w in args.warnings if w.startswith(f"{option_of(line)} ")]
    assert " has no effect: " in said
    assert {n: v for n, v in vars(dry()).items() if n != "warnings"} == {
        n: v for n, v in vars(args).items() if n != "warnings"
    }


@pytest.mark.parametrize("line", REFUSED)
def test_what_would_change_the_run_is_refused_and_listed_by_a_dry_run(line):
    with pytest.raises(ArgumentError, match=f"^{option_of(line)} is not available: "):
        parse(*line.split())
    assert [message.split()[0] for message in dry(*line.split()).not_available] == [option_of(line)]


def test_the_later_one_wins_on_the_command_line():
    old, new = ["--sglang-cuda-graph-max-bs", "1"], ["--sglang-cuda-graph-max-bs-decode", "2"]
    assert dry(*old, *new).sglang_cuda_graph_max_bs_decode == 2
    assert dry(*new, *old).sglang_cuda_graph_max_bs_decode == 1


def test_the_critic_gets_its_values():
    flags = [
        "--advantage-estimator",
        "ppo",
        "--lr",
        "1e-6",
        "--critic-lr",
        "1e-5",
        "--critic-save",
        "/c",
        "--save",
        "/a",
    ]
    args = dry(*flags, "--save-interval", "1", "--critic-lr-warmup-iters", "3")
    critic = role_args(args, "critic")
    assert (args.lr, critic.lr, critic.lr_warmup_iters, critic.save) == (1e-6, 1e-5, 3, "/c")


def test_the_role_file_wins_over_the_flag(tmp_path):
    path = tmp_path / "roles.yaml"
    path.write_text("megatron: [{role: critic, overrides: {lr: 3e-5}}]")
    flags = ["--advantage-estimator", "ppo", "--critic-lr", "1e-5", "--critic-lr-warmup-iters", "3"]
    critic = role_args(dry(*flags, "--megatron-config-path", path), "critic")
    assert (critic.lr, critic.lr_warmup_iters) == (3e-5, 3)


def test_a_critic_is_not_asked_for_by_its_flags():
    args = dry("--critic-lr", "1e-5")
    assert "--critic-overrides has no effect without --advantage-estimator ppo" in args.warnings


def test_the_critic_alone_is_trained():
    args = dry("--advantage-estimator", "ppo", "--critic-train-only")
    assert args.num_critic_only_steps > args.num_rollout
    assert any("the critic alone is trained" in warning for warning in args.warnings)


@pytest.mark.parametrize("option", ["--config", "--custom-config-path"])
def test_files_of_flags(tmp_path, option):
    path = tmp_path / "flags.yaml"
    path.write_text(
        "sglang_cuda_graph_bs: [1, 2]\nsglang-disable-piecewise-cuda-graph: true\nuse_slime_router: true\n"
        "sglang_nsa_prefill_backend: fa3\nsglang_dsa_prefill_backend: tilelang\n"
    )
    args = dry(option, path)
    assert args.sglang_cuda_graph_bs_decode == [1, 2]
    assert args.sglang_cuda_graph_backend_prefill == "disabled"
    assert args.sglang_dsa_prefill_backend == "tilelang"  # the current name wins
    assert f"{option} {path}, line 1, sglang_cuda_graph_bs: --sglang-cuda-graph-bs is called " in "\n".join(
        args.warnings
    )
    assert sum(w.startswith(f"{option} {path}, line 3") and "no effect" in w for w in args.warnings) == 1


def test_files_of_roles(tmp_path):
    path = tmp_path / "roles.yaml"
    path.write_text("megatron: [{role: actor, overrides: {gradient_checkpointing: true}}]")
    args = dry("--megatron-config-path", path)
    from slime.arguments.rules.roles import role_args

    assert role_args(args, "actor").recompute_granularity == "full"
    assert sum("--gradient-checkpointing stands for" in warning for warning in args.warnings) == 1


def test_engine_overrides(tmp_path):
    path = tmp_path / "engines.yaml"
    overrides = {"cuda_graph_max_bs": 8, "disable-piecewise-cuda-graph": True, "collect_tokens_histogram": True}
    group = {"num_gpus": 1, "overrides": overrides}
    path.write_text(json.dumps({"sglang": [{"name": "actor", "server_groups": [group]}]}))
    config, warnings = read_sglang_config(str(path))
    found = config.models[0].server_groups[0].overrides
    assert found == {"cuda_graph_max_bs_decode": 8, "cuda_graph_backend_prefill": "disabled"}
    assert [w.split(": ")[1].split()[0] for w in warnings] == [
        "--sglang-cuda-graph-max-bs", "--sglang-disable-piecewise-cuda-graph", "--sglang-collect-tokens-histogram",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sglang_cuda_graph_max_bs: many", "line 1, sglang_cuda_graph_max_bs: .*expected an integer, got 'many'"),
        ("qkv_format: x", "line 1, qkv_format: --qkv-format: expected one of thd, bshd, got 'x'"),
        ("true_on_policy_mode: true", "line 1, true_on_policy_mode: --true-on-policy-mode is not available"),
    ],
)
def test_mistakes_in_files_name_the_line(tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ArgumentError, match=message):
        dry("--config", tmp_path / "x.yaml")


def test_a_run_that_used_older_flags_can_be_repeated(tmp_path):
    """The dump has current names alone."""
    path = tmp_path / "run.yaml"
    first = dry("--sglang-cuda-graph-bs", "1", "2", "--critic-lr", "1e-5", "--dump-config", path)
    again = dry("--config", path)
    assert again.sglang_cuda_graph_bs_decode == first.sglang_cuda_graph_bs_decode == [1, 2]
    assert again.critic_overrides == {"lr": 1e-5}
    assert "cuda_graph_bs:" not in path.read_text()


def test_no_row_hides_a_current_flag_and_all_lead_to_one(flags, parser):
    known = {option for flag in flags for option in flag.options}
    for option, rows in older_flags().items():
        assert option not in known
        for row in rows:
            assert row.target in {None, *known}, option
            named = re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", row.about)
            assert {name for name in named if name not in known} <= set(older_flags()), option
            assert row.about or row.target, option


def test_older_names_are_left_to_packages_that_offer_them(parser):
    """An older SGLang has its flags under their names of then."""
    import argparse

    installed = argparse.ArgumentParser(allow_abbrev=False)
    installed.add_argument("--sglang-cuda-graph-bs", nargs="+")
    words = ["--sglang-cuda-graph-bs", "1", "2"]
    assert translate(words, installed).words == words
    words = ["--sglang-nsa-decode-backend", "fa3"]  # neither this name nor the current one
    assert translate(words, installed).words == words
