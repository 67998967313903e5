"""Megatron's own experts (``SequentialMLP``) beside ours, on one process or with every expert cut in two."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch

from tests.support.float64 import enable

HIDDEN, FFN, EXPERTS, TOKENS = 12, 20, 4, 23


def compare(cases: dict[str, dict[str, Any]], *, in_float64: bool, tensor_size: int = 1) -> dict[str, dict[str, float]]:
    """Return, per case of config fields, the largest relative difference of output, gradients and checkpoint.

    Rows are sorted by expert; the second of the experts has none. ``tensor_size`` ranks share every expert.
    """
    if in_float64:
        enable()
    from slime.backends.megatron_utils import import_megatron

    import_megatron()
    torch.distributed.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_size, expert_tensor_parallel_size=tensor_size
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return {name: _differences(fields) for name, fields in cases.items()}


def _differences(fields: dict[str, Any]) -> dict[str, float]:
    from megatron.core.fusions.fused_bias_geglu import quick_gelu
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    from slime.backends.megatron_utils.model.experts import GroupedExperts

    functions = {"silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu, "quick_gelu": quick_gelu}
    kinds = ("weight", "bias") if fields.get("add_bias_linear") else ("weight",)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=EXPERTS,
        moe_ffn_hidden_size=FFN,
        ffn_hidden_size=FFN,
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **{**fields, "add_bias_linear": False, "activation_func": functions[fields["activation_func"]]},
    )
    config.add_bias_linear = "bias" in kinds  # Megatron refuses them where ranks divide experts
    groups = ProcessGroupCollection.use_mpu_process_groups()
    ours = GroupedExperts(EXPERTS, config, pg_collection=groups)
    unfused = copy.copy(config)
    unfused.bias_activation_fusion = False
    theirs = SequentialMLP(
        EXPERTS, unfused, MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear), groups
    )
    generator = torch.Generator().manual_seed(0)
    for e, expert in enumerate(theirs.local_experts):
        # Megatron adds the bias in place to what is a view of a function's output without CUDA.
        expert.linear_fc2.register_forward_hook(lambda module, inputs, output: (output[0].clone(), output[1]))
        for linear in ("linear_fc1", "linear_fc2"):
            for kind in kinds:
                weight = getattr(getattr(expert, linear), kind)
                value = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                weight.data.copy_(value)
                getattr(getattr(ours, linear), f"{kind}{e}").data.copy_(value)
    counts = torch.tensor([9, 0, TOKENS - 10, 1])
    rows = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=weight.dtype)
    probs = torch.rand(TOKENS, generator=generator, dtype=weight.dtype)
    factor = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=weight.dtype)
    results = []
    for module in (ours, theirs):
        hidden, scale = rows.clone().requires_grad_(), probs.clone().requires_grad_()
        output, bias = module(hidden, counts, scale)
        assert bias is None or not torch.is_tensor(bias)
        (output * factor).sum().backward()
        results.append({"output": output.detach(), "rows": hidden.grad, "probs": scale.grad})
    for e, expert in enumerate(theirs.local_experts):
        for linear in ("linear_fc1", "linear_fc2"):
            for kind in kinds:
                results[0][f"{linear}.{kind}{e}"] = getattr(getattr(ours, linear), f"{kind}{e}").grad
                results[1][f"{linear}.{kind}{e}"] = getattr(getattr(expert, linear), kind).grad
    assert not results[0]["linear_fc1.weight1"].any()  # of an expert without rows
    found = {name: _apart(value, results[1][name]) for name, value in results[0].items()}
    found["checkpoint"] = 0.0 if _places(ours) == _places(theirs) else 1.0
    return found


def _apart(a: Any, b: Any) -> float:
    if b is None:  # of an expert that has not been computed
        return float(a.abs().max())
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if bool(b.any()) else float(a.abs().max())


def _places(module: Any) -> set[Any]:
    """Return what the checkpoint calls the module's tensors, and where in the whole they belong."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    state = module.sharded_state_dict(prefix="mlp.experts.", metadata={"singleton_local_shards": False})
    parts: list[Any] = []
    for value in nested_values(state):
        if isinstance(value, ShardedTensorFactory):
            parts += nested_values(value.build())
        elif isinstance(value, ShardedTensor):
            parts.append(value)
    return {(part.key, tuple(part.global_shape), tuple(part.global_offset), tuple(part.local_shape)) for part in parts}
