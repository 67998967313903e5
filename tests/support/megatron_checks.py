"""Ranks of ``tests/integration/test_megatron_layouts.py``."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.dense_attention import zigzag
from tests.support.megatron_model import hf_gradients, model_args, run_pack
from tests.support.megatron_references import MODELS, WITH_EXPERTS
from tests.support.ranks import error_of, loaded_model, switch_layout

PP2 = ("--pipeline-model-parallel-size", 2)
TP2 = ("--tensor-model-parallel-size", 2)
CP2 = ("--context-parallel-size", 2)
EP2 = ("--expert-model-parallel-size", 2)
VPP2 = ("--num-layers-per-virtual-pipeline-stage", 1)
LAYOUTS: dict[str, tuple[Any, ...]] = {
    "dp2": (),
    "tp2": TP2,
    "tp2-sp": (*TP2, "--sequence-parallel"),
    "pp2": PP2,
    "pp2-vpp2": (*PP2, *VPP2),
    "cp2": CP2,
    "ep2": EP2,
    "tp2-sp-ep2": (*TP2, "--sequence-parallel", *EP2, "--expert-tensor-parallel-size", 1),
    "tp2-sp-etp1": (*TP2, "--sequence-parallel", "--expert-tensor-parallel-size", 1),
}
FOUR_RANK_LAYOUTS: dict[str, tuple[Any, ...]] = {
    "tp4-sp": ("--tensor-model-parallel-size", 4, "--sequence-parallel"),
    "tp2-sp-pp2": (*TP2, "--sequence-parallel", *PP2),
    "tp2-sp-cp2": (*TP2, "--sequence-parallel", *CP2),
    "cp2-pp2-vpp2": (*CP2, *PP2, *VPP2),
    "cp2-dp2": CP2,
    "tp2-sp-ep2-etp2": (*TP2, "--sequence-parallel", *EP2),
    "ep2-pp2": (*EP2, *PP2),
    "ep2-dp2": EP2,
}
# The layouts that only some checkpoints have the layers or the experts for.
MODELS_OF: dict[str, tuple[str, ...]] = {
    "tp2": tuple(name for name in MODELS if name not in WITH_EXPERTS),  # experts need sequence parallelism as well
    "pp2-vpp2": ("qwen3",),
    "cp2-pp2-vpp2": ("qwen3",),
    **dict.fromkeys(("ep2", "tp2-sp-ep2", "tp2-sp-etp1", "tp2-sp-ep2-etp2", "ep2-pp2", "ep2-dp2"), WITH_EXPERTS),
}
ATTENTION_LENGTHS = [8, 12, 4]


def all_layouts(checkpoints: dict[str, str], scratch: str, layouts: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return ``logits_and_weights`` of every layout and checkpoint, and the other checks where they belong."""
    from slime.backends.megatron_utils import import_megatron

    import_megatron()
    results: dict[str, Any] = {}
    for layout, flags in layouts.items():
        first = checkpoints["qwen3"]
        names = MODELS_OF.get(layout, tuple(checkpoints))
        switch_layout(model_args(checkpoints[names[0]], *flags))
        for name in names:
            checkpoint = checkpoints[name]
            export_dir = Path(scratch) / f"{name}-{layout}"
            results[f"{layout}/{name}"] = logits_and_weights(checkpoint, layout, flags, export_dir)
        if layout == "cp2":
            results["attention"] = attention_under_cp()
        if layout == "dp2":
            results["errors"] = errors(checkpoints, Path(scratch))
            results["frozen"] = frozen(first)
        if layout == "tp2":
            results["seeds"] = seeds()
            results["unequal parts"] = unequal_parts()
    return results


def logits_and_weights(checkpoint: str, layout: str, flags: tuple[Any, ...], export_dir: Path) -> dict[str, Any]:
    """Return this rank's logits and the Hugging Face weights it sees; under TP2 and PP2 also export the model."""
    from slime.backends.megatron_utils.weights import describe_hf_weights, export_hf, iter_hf_weights

    config = json.loads((Path(checkpoint) / "config.json").read_text())
    layers = config.get("text_config", config)["num_hidden_layers"]
    uneven = ("--decoder-first-pipeline-num-layers", 1) if "pp2" in layout and layers % 2 else ()
    args = model_args(checkpoint, *flags, *uneven)
    args.use_distributed_optimizer = False  # so that every rank has all gradients
    model = loaded_model(args, checkpoint)
    if layout in ("tp2", "pp2", "ep2"):
        export_hf(model, args, export_dir)  # one shard, to be replaced whole by the second export
        export_hf(model, args, export_dir, max_shard_bytes=60_000)
    own = [(name, tuple(tensor.shape)) for name, tensor in iter_hf_weights(model, args)]
    return {
        "weights": [(name, tensor.clone()) for name, tensor in iter_hf_weights(model, args, gather_pp=True)],
        "forward": run_pack(model, args),
        "gradients": hf_gradients(model, args),
        "described": [(n, s) for n, s, _ in describe_hf_weights(model, args)] == own,
    }


def unequal_parts() -> dict[str, torch.Tensor]:
    """Gather 3 rows of rank 0 and 1 of rank 1, and add up and divide 4 rows likewise: results and gradients."""
    from megatron.core import parallel_state as mpu
    from megatron.core.tensor_parallel import mappings

    group, sizes = mpu.get_tensor_model_parallel_group(), [3, 1]
    rank = group.rank()
    rows = torch.arange(8.0).view(4, 2)
    part = rows.split(sizes)[rank].clone().requires_grad_()
    gathered = mappings.gather_from_sequence_parallel_region(part, group=group, output_split_sizes=sizes)
    gathered.backward(rows * (rank + 1))
    whole = (rows + 100 * rank).requires_grad_()
    reduced = mappings.reduce_scatter_to_sequence_parallel_region(whole, group=group, input_split_sizes=sizes)
    reduced.backward(rows.split(sizes)[rank])
    return {"gathered": gathered.detach(), "part": part.grad, "reduced": reduced.detach(), "whole": whole.grad}


def attention_inputs() -> list[torch.Tensor]:
    """Return the same ``q [t, 4, 8], k [t, 2, 8], v [t, 2, 8]`` and output gradient ``[t, 4, 8]`` everywhere."""
    generator = torch.Generator().manual_seed(3)
    total = sum(ATTENTION_LENGTHS)
    return [torch.randn(total, heads, 8, generator=generator) for heads in (4, 2, 2, 4)]


def attention_config(**overrides: Any) -> SimpleNamespace:
    """Return what TorchCoreAttention reads of a TransformerConfig."""
    values = {
        "softmax_type": "vanilla", "window_size": None, "window_attn_skip_freq": None, "qk_clip": False,
        "log_max_attention_logit": False,
        "hierarchical_context_parallel_sizes": None, "hybrid_context_parallel": False, "kv_channels": 8,
        "attention_dropout": 0.0, "sequence_parallel": False, "num_attention_heads": 4, "params_dtype": torch.float32,
        "use_cpu_initialization": True, "perform_initialization": False,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **overrides})


def attention_under_cp() -> dict[str, torch.Tensor]:
    """Return this rank's part of the output and of the gradients of a packed, grouped-query attention."""
    from megatron.core import parallel_state as mpu
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    from slime.backends.megatron_utils.model.attention import TorchCoreAttention

    module = TorchCoreAttention(attention_config(), 1, AttnMaskType.causal, "self")
    rank, size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    local = [zigzag(x, ATTENTION_LENGTHS, rank, size) for x in attention_inputs()]
    q, k, v = (x.clone().requires_grad_() for x in local[:3])
    cu = torch.tensor([0, *ATTENTION_LENGTHS]).cumsum(0).int()
    out = module(q, k, v, packed_seq_params=PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu))
    out = out.view(q.shape)
    out.backward(local[3])
    return {"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad}


def _message(action: Callable[[], Any]) -> str:
    return error_of(action, (ValueError, RuntimeError))


def errors(checkpoints: dict[str, str], scratch: Path) -> dict[str, str]:
    """Return the messages for checkpoints and directories that must be refused."""
    from safetensors.torch import load_file, save_file

    from slime.backends.megatron_utils.initialize import initialize_megatron
    from slime.backends.megatron_utils.model.provider import get_model
    from slime.backends.megatron_utils.weights import export_hf, load_hf

    source = checkpoints["qwen3"]
    args = model_args(source)
    model = get_model(args, wrap_with_ddp=False)
    tensors = load_file(Path(source) / "model.safetensors")
    rank = torch.distributed.get_rank()

    def load_with(name: str, changed: dict[str, torch.Tensor], **config: Any) -> str:
        directory = scratch / f"bad-{name}-{rank}"
        directory.mkdir()
        text = json.loads((Path(source) / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**text, **config}))
        save_file(changed, directory / "model.safetensors")
        return _message(lambda: load_hf(model, directory, args))

    q = "model.layers.1.self_attn.q_proj.weight"
    far = "model.layers.4.mlp.up_proj.weight"
    bias = "model.layers.0.self_attn.q_proj.bias"
    frozen_args = Namespace(**{**vars(args), "freeze_params_name_list": ["no_such_parameter"]})
    prediction = Namespace(**{**vars(args), "mtp_num_layers": 1})
    return {
        "good": load_with("good", {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}),
        "missing": load_with("missing", {n: t for n, t in tensors.items() if n != q}),
        "layer": load_with("layer", {**tensors, far: torch.ones(2)}),
        "bias": load_with("bias", {**tensors, bias: torch.ones(64)}),
        "fp8": load_with("fp8", {**tensors, f"{q}_scale_inv": torch.ones(1, 1)}),
        "shape": load_with("shape", {**tensors, q: tensors[q][:-1].clone()}),
        "family": load_with("family", tensors, model_type="mistral"),
        "tied": _message(lambda: load_hf(get_model(args, wrap_with_ddp=False), checkpoints["llama"], args)),
        "into-source": _message(lambda: export_hf(model, args, source)),
        "above-source": _message(lambda: export_hf(model, args, Path(source).parent)),
        "below-a-file": _message(lambda: export_hf(model, args, Path(source) / "config.json" / "export")),
        "twice": _message(lambda: initialize_megatron(args)),
        "unmatched": _message(lambda: get_model(frozen_args)),
        "mtp": _message(lambda: load_hf(get_model(prediction, wrap_with_ddp=False), source, prediction)),
    }


def frozen(checkpoint: str) -> dict[str, list[str]]:
    """Return the trainable parameters' names under the two name lists."""
    from slime.backends.megatron_utils.model.provider import get_model

    def trainable(*flags: str) -> list[str]:
        model = get_model(model_args(checkpoint, *flags), wrap_with_ddp=False)[0]
        return [name for name, parameter in model.named_parameters() if parameter.requires_grad]

    return {
        "only": trainable("--only-train-params-name-list", r"linear_fc1", r"layers\.0\.mlp\.linear_fc2"),
        "freeze": trainable("--freeze-params-name-list", "decoder", "embedding"),
        "all": trainable(),
    }


def seeds() -> dict[str, float]:
    """Return numbers drawn from the default generator and from the tensor-parallel one."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    default = torch.rand(1).item()
    with get_cuda_rng_tracker().fork():
        forked = torch.rand(1).item()
        state = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        resumed = bool(torch.equal(torch.get_rng_state(), state))
    return {"default": default, "forked": forked, "resumed": resumed}
