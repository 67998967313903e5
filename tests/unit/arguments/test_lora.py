"""Flags that ``--lora-rank`` and ``--lora-sync adapter`` exclude, and the arguments that engines are started with."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.arguments.errors import ArgumentError
from slime.arguments.rules import lora
from slime.backends.sglang_utils.server_args import EngineSpec, build_server_args
from tests.support.arguments import run_args


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    return str(tmp_path)


def args_of(model: str, **overrides: Any) -> Namespace:
    sources = {"hf_checkpoint": model, "ref_load": model, "load": model}
    return run_args(**{**sources, "lora_rank": 8, **overrides})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"only_train_params_name_list": ["mlp"]}, "--only-train-params-name-list: --lora-rank freezes"),
        ({"freeze_params_name_list": ["mlp"]}, "--freeze-params-name-list: --lora-rank freezes"),
        ({"enable_mtp_training": True}, "--enable-mtp-training: --lora-rank freezes"),
        ({"moe_router_enable_expert_bias": True}, "--moe-router-bias-update-rate 0.001: --lora-rank keeps"),
        ({"moe_shared_expert_overlap": True}, "--moe-shared-expert-overlap computes"),
        ({"ref_update_interval": 4}, "--ref-update-interval: with --lora-rank the reference is"),
        ({"load": "/elsewhere"}, "--load /elsewhere is a Hugging Face checkpoint: with --lora-rank"),
    ],
)
def test_what_would_change_the_base_is_refused(overrides: dict[str, Any], words: str, model: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        lora.check(args_of(model, **overrides))
    lora.check(args_of(model, **overrides, lora_rank=0))
    lora.check(args_of(model))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"ref_load": "/base", "load": "/base"}, "leaves the engines with the weights of --hf-checkpoint"),
        ({"num_experts": 8}, "give --lora-target-modules q_proj k_proj v_proj o_proj, or use --lora-sync merged"),
        ({"lora_target_modules": ["kv_b_proj"]}, "engines take no adapters of kv_b_proj; use --lora-sync merged"),
        ({"num_experts": 8, "lora_target_modules": ["up_proj"]}, "engines take no adapters of up_proj"),
        ({"update_weight_transport": "disk"}, "--update-weight-transport disk: not together with --lora-sync adapter"),
        ({"update_weight_transport": "p2p"}, "--update-weight-transport p2p: not together with --lora-sync adapter"),
        ({"check_weight_update_equal": True}, "--check-weight-update-equal: not together"),
        ({"rollout_external": True}, "--rollout-external-engine-addrs: not together"),
        ({"offload_rollout": True}, "--offload-rollout: not together"),
        ({"sglang_dp_size": 2}, "--sglang-dp-size: not together"),
        ({"sglang_pp_size": 2}, "--sglang-pp-size: not together"),
        ({"sglang_tokenizer_worker_num": 2}, "--sglang-tokenizer-worker-num: not together"),
    ],
)
def test_what_adapters_alone_cannot_reach_is_refused(overrides: dict[str, Any], words: str, model: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        lora.check(args_of(model, lora_sync="adapter", **overrides))
    lora.check(args_of(model, lora_sync="merged", **overrides))
    lora.check(args_of(model, lora_sync="adapter"))
    lora.check(args_of(model, lora_sync="adapter", num_experts=8, lora_target_modules=["q_proj", "o_proj"]))


@pytest.mark.parametrize("family", ["glm4", "qwen3_vl"])
def test_other_families_are_merged(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(ArgumentError, match=f"families llama, qwen2, qwen3, qwen3_moe, not of {family}"):
        lora.check(args_of(str(tmp_path), lora_sync="adapter"))


def test_engines_that_are_trained_take_adapters(model: str) -> None:
    spec: dict[str, Any] = {"rank": 0, "host": "h", "port": 1, "nccl_port": 2, "num_gpus": 1, "model_path": model}
    args = args_of(model, lora_sync="adapter", lora_target_modules=["q_proj", "v_proj"])
    args.device_type = "cpu"
    command = build_server_args(args, EngineSpec(**spec))
    for words in (["--enable-lora"], ["--max-lora-rank=8"], ["--lora-target-modules", "q_proj", "v_proj"]):
        start = command.index(words[0])
        assert command[start : start + len(words)] == words
    assert "--lora-backend=torch_native" in command
    assert "--enable-lora" not in build_server_args(args, EngineSpec(**spec, update_weights=False))
    for other in ({"lora_sync": "merged"}, {"lora_rank": 0}, {"debug_rollout_only": True}):
        vars(args).update(lora_sync="adapter", lora_rank=8, debug_rollout_only=False)
        vars(args).update(other)
        assert "--enable-lora" not in build_server_args(args, EngineSpec(**spec))
