from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from slime.arguments.command_line import flags_where
from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.model import provider
from slime.backends.megatron_utils.model.provider import (
    padded_vocab_size,
    params_dtype,
    squared_relu,
    transformer_config_from_args,
)
from slime.backends.megatron_utils.state.optimizer import optimizer_config_from_args
from slime.backends.megatron_utils.train import logprob_passes as passes
from slime.utils import accelerator
from tests.support.arguments import run_args
from tests.support.marks import needs_no_cuda


def _args(**overrides: Any) -> Namespace:
    values = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48}
    return run_args(**{**values, **overrides})


def test_same_named_arguments_are_copied() -> None:
    config = transformer_config_from_args(
        _args(kv_channels=16, qk_layernorm=True, normalization="RMSNorm", hidden_dropout=0.25, add_qkv_bias=True)
    )
    assert (config.num_layers, config.hidden_size, config.ffn_hidden_size, config.kv_channels) == (4, 32, 48, 16)
    assert (config.qk_layernorm, config.normalization, config.hidden_dropout) == (True, "RMSNorm", 0.25)
    assert config.add_qkv_bias


def test_none_means_the_default_of_the_field() -> None:
    config = transformer_config_from_args(_args(init_method_std=None, kv_channels=None, use_cpu_initialization=None))
    assert config.init_method_std == 0.02
    assert config.kv_channels == 8
    assert config.use_cpu_initialization is False


@pytest.mark.parametrize("name", ["attention_output_gate", "use_gated_attention"])
def test_both_names_of_the_output_gate(name: str) -> None:
    assert transformer_config_from_args(_args(**{name: True})).attention_output_gate is True
    assert transformer_config_from_args(_args()).attention_output_gate is False


def test_a_window_is_a_pair() -> None:
    assert transformer_config_from_args(_args(window_size=[128, 0])).window_size == (128, 0)


def test_precisions_of_the_optimizer_are_dtypes() -> None:
    model = Namespace(params_dtype=torch.bfloat16, bf16=True, fp16=False)
    names = [flag.dest for flag in flags_where(lambda traits: traits.dtype)]
    config = optimizer_config_from_args(run_args(lr=1e-6, **dict.fromkeys(names, "fp32")), model)
    assert [getattr(config, name) for name in names] == [torch.float32] * 4
    assert (config.lr, config.params_dtype, config.bf16) == (1e-6, torch.bfloat16, True)


def test_translated_arguments() -> None:
    config = transformer_config_from_args(
        _args(
            norm_epsilon=1e-6,
            swiglu=True,
            group_query_attention=True,
            num_query_groups=2,
            overlap_p2p_comm=False,
            apply_layernorm_1p=True,
            pipeline_model_parallel_size=2,
            decoder_first_pipeline_num_layers=1,
            decoder_last_pipeline_num_layers=3,
        )
    )
    assert config.layernorm_epsilon == 1e-6
    assert config.activation_func is F.silu
    assert config.gated_linear_unit
    assert config.num_query_groups == 2
    assert config.batch_p2p_comm
    assert config.layernorm_zero_centered_gamma
    assert (config.num_layers_in_first_pipeline_stage, config.num_layers_in_last_pipeline_stage) == (1, 3)
    assert config.variable_seq_lengths


def test_query_groups_count_only_with_grouped_attention() -> None:
    assert transformer_config_from_args(_args(num_query_groups=1, group_query_attention=False)).num_query_groups == 4


def test_num_experts() -> None:
    config = transformer_config_from_args(_args(num_experts=8, add_bias_linear=False))
    assert config.num_moe_experts == 8
    assert config.moe_token_dispatcher_type == "alltoall"


def test_squared_relu() -> None:
    config = transformer_config_from_args(_args(swiglu=False, squared_relu=True))
    assert config.activation_func is squared_relu
    assert squared_relu(torch.tensor([-2.0, 3.0])).tolist() == [0.0, 9.0]


def test_attention_backend_by_name() -> None:
    config = transformer_config_from_args(_args(attention_backend="flash"))
    assert config.attention_backend.name == "flash"


@pytest.mark.parametrize(
    ("flags", "dtype"), [({}, torch.float32), ({"bf16": True}, torch.bfloat16), ({"fp16": True}, torch.float16)]
)
def test_dtype(flags: dict[str, bool], dtype: torch.dtype) -> None:
    config = transformer_config_from_args(_args(**flags))
    assert config.params_dtype is dtype
    assert config.pipeline_dtype is dtype
    assert (config.bf16, config.fp16) == (dtype is torch.bfloat16, dtype is torch.float16)


def test_two_dtypes_at_once() -> None:
    with pytest.raises(ValueError, match="--bf16 and --fp16"):
        params_dtype(_args(bf16=True, fp16=True))


@needs_no_cuda
def test_what_needs_fused_kernels_is_off() -> None:
    accelerator.reset_accelerator()
    fused = [flag.dest for flag in flags_where(lambda traits: traits.fused_kernel)]
    assert len(fused) == 8
    names = (*fused, *provider.NEEDS_CUDA, "bias_activation_fusion")
    asked = {
        name: True for name in names if name not in ("moe_router_fusion", "tp_comm_overlap", "bias_activation_fusion")
    }
    config = transformer_config_from_args(_args(**asked, swiglu=False, bias_gelu_fusion=True))
    assert [name for name in names if getattr(config, name)] == []


@needs_no_cuda
@pytest.mark.parametrize("fusion", [True, False])
def test_swiglu_is_fused_without_cuda_too(fusion: bool) -> None:
    accelerator.reset_accelerator()
    config = transformer_config_from_args(_args(swiglu=True, bias_swiglu_fusion=fusion))
    assert config.bias_activation_fusion is fusion


@pytest.mark.parametrize(
    ("vocab", "tp", "options", "expected"),
    [
        (384, 1, {}, 384),
        (300, 1, {}, 384),
        (300, 2, {}, 512),
        (300, 2, {"make_vocab_size_divisible_by": 1}, 300),
        (300, 2, {"padded_vocab_size": 320}, 320),
    ],
)
def test_padded_vocabulary(vocab: int, tp: int, options: dict[str, int], expected: int) -> None:
    assert (
        padded_vocab_size(
            _args(vocab_size=vocab, tensor_model_parallel_size=tp, **{"padded_vocab_size": None, **options})
        )
        == expected
    )


def test_padded_vocabulary_must_split_evenly() -> None:
    with pytest.raises(ValueError, match="--padded-vocab-size 301"):
        padded_vocab_size(_args(vocab_size=300, tensor_model_parallel_size=2, padded_vocab_size=301))


def test_fused_gradient_accumulation_needs_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransformerEngine on a GPU does not bring it; megatron's output layer raises when it is on without it."""
    from megatron.core.models.gpt import gpt_layer_specs

    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", True)
    monkeypatch.setattr(provider.accelerator, "device_type", lambda: "cuda")
    asked = {"gradient_accumulation_fusion": True, "apply_rope_fusion": False, "moe_grouped_gemm": False}
    for present in (False, True):
        monkeypatch.setattr(provider, "_has_module", lambda name, present=present: present)
        assert transformer_config_from_args(_args(**asked)).gradient_accumulation_fusion is present


def test_only_the_built_in_model_lets_the_loss_overwrite_its_logits() -> None:
    import_megatron()
    model = torch.nn.Linear(2, 2)
    model.logits_may_be_overwritten = True  # type: ignore[assignment]
    wrapper = torch.nn.Module()
    wrapper.module = model
    assert passes._needs_no_logits(model)
    assert not passes._needs_no_logits(wrapper)  # it may end in anything


@pytest.fixture
def gpt_layer_specs() -> Any:
    """Megatron's module, imported as on this machine."""
    import_megatron()
    from megatron.core.models.gpt import gpt_layer_specs

    return gpt_layer_specs


@pytest.mark.parametrize(("device", "installed"), [("cuda", False), ("cpu", True)])
def test_fp8_needs_transformer_engine(
    gpt_layer_specs: Any, monkeypatch: pytest.MonkeyPatch, device: str, installed: bool
) -> None:
    monkeypatch.setattr(accelerator, "device_type", lambda: device)
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", installed)
    with pytest.raises(ValueError, match=r"--fp8-format e4m3: TransformerEngine .* is not installed .*; install it"):
        transformer_config_from_args(_args(fp8="e4m3"))


def test_fp8_is_passed_on_to_transformer_engine(gpt_layer_specs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "device_type", lambda: "cuda")
    monkeypatch.setattr(gpt_layer_specs, "HAVE_TE", True)
    args = _args(
        fp8="hybrid", fp8_recipe="tensorwise", fp8_margin=1, first_last_layers_bf16=True, num_layers_at_end_in_bf16=2,
        bf16=True, apply_rope_fusion=False,
    )  # fmt: skip
    config = transformer_config_from_args(args)
    assert (config.fp8, config.fp8_recipe, config.fp8_margin) == ("hybrid", "tensorwise", 1)
    assert (config.first_last_layers_bf16, config.num_layers_at_end_in_bf16) == (True, 2)
    assert not config.fp8_param
    assert optimizer_config_from_args(args, config).fp8_recipe == "tensorwise"
