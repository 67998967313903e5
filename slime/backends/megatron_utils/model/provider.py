"""Build the model chunks of this rank from the flags, by way of Megatron's configuration."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import json
import logging
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from slime.arguments.args import Args
from slime.arguments.command_line import flags_where
from slime.arguments.passthrough.megatron import aliases
from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.lora.build import add_adapters
from slime.backends.megatron_utils.model.fake_quantization import round_weights
from slime.backends.megatron_utils.model.mtp_loss import trains_mtp
from slime.backends.megatron_utils.model.value_head import put_value_head
from slime.backends.megatron_utils.state.parallel import gather_from_world
from slime.backends.megatron_utils.weights.naming import is_value_head
from slime.models import hf_fields
from slime.models.shape import padded_vocab_size
from slime.utils import accelerator
from slime.utils.misc import load_function

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

logger = logging.getLogger(__name__)

Provider = Callable[..., torch.nn.Module]


def get_model(args: Args, *, wrap_with_ddp: bool = True, with_value_head: bool = False) -> list[torch.nn.Module]:
    """Return this rank's model chunks, on the device, with freshly initialized weights.

    One chunk, or one per virtual pipeline stage: ``GPTModel``, inside ``Float16Module`` for bf16 and fp16, inside
    ``DistributedDataParallel`` when ``wrap_with_ddp``; with a critic's output when ``with_value_head``. Needs
    ``initialize_megatron``. Raises ValueError for options that are not supported.
    """
    import_megatron()
    from megatron.core import parallel_state as mpu

    config = transformer_config_from_args(args)
    config.mtp_num_layers = None  # read to check the pipeline layout; the layers are not megatron's to run (mtp_model)
    provider = model_provider(args, config)
    virtual = mpu.get_virtual_pipeline_model_parallel_world_size()
    models = []
    for vp_stage in range(virtual) if virtual else [None]:
        stage = {"ignore_virtual": False, "vp_stage": vp_stage}
        pre_process, post_process = mpu.is_pipeline_first_stage(**stage), mpu.is_pipeline_last_stage(**stage)
        models.append(provider(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage))
        if post_process and args.mtp_num_layers and not hasattr(models[-1], "mtp"):
            raise ValueError(
                f"--mtp-num-layers {args.mtp_num_layers}: {type(models[-1]).__name__} has no module `mtp`. MTP layers "
                "are those of slime.backends.megatron_utils.model.provider.gpt_model: let "
                "the function of --custom-model-provider-path or --spec call it, or leave the flag out"
            )
        if with_value_head and post_process:
            put_value_head(args, config, models[-1])
    freeze_parameters(args, models)
    _freeze_mtp(args, models)
    add_adapters(args, models)
    if not with_value_head:  # engines compute with the policy's weights alone
        round_weights(args, models)
    models = [_on_device(config, model) for model in models]
    return _with_ddp(args, config, models) if wrap_with_ddp else models


def _on_device(config: TransformerConfig, model: torch.nn.Module) -> torch.nn.Module:
    from megatron.core import tensor_parallel
    from megatron.core.transformer.module import Float16Module

    from slime.backends.megatron_utils.model.experts import mark_routed_experts, router_buffers

    mark_routed_experts(model)
    for parameter in model.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    model.to(accelerator.current_device())
    if not (config.fp16 or config.bf16):
        return model
    exact = [*router_buffers(model), *_frequencies(model)]
    half = Float16Module(config, model)
    for module, name, buffer in exact:
        setattr(module, name, buffer)
    return half


def _frequencies(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """Return ``(module, name, buffer)`` of rotary embeddings that are modules of transformers: they stay fp32 there."""
    return [(m, name, b) for m in model.modules() for name, b in m.named_buffers(recurse=False) if name == "inv_freq"]


def model_provider(args: Args, config: TransformerConfig) -> Provider:
    """Return the callable that builds a stage: ``provider(pre_process=..., post_process=..., vp_stage=...)``.

    In this order: ``--custom-model-provider-path``; a ``--spec`` that is itself a provider; the built-in GPT model.
    """
    custom = args.custom_model_provider_path
    if custom:
        flag = "--custom-model-provider-path"
        return _calling_with_known(load_function(custom, flag), flag, args=args, config=config)
    spec = args.spec
    if spec:
        function = load_function(".".join(spec), "--spec")
        if "pre_process" in inspect.signature(function).parameters:
            return _calling_with_known(function, "--spec", args=args, config=config)
        layer_spec = function
    else:
        from slime.backends.megatron_utils.model.layer_specs import decoder_block_spec as layer_spec

    def build(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> torch.nn.Module:
        spec = layer_spec(args, config, vp_stage)
        model: Any = gpt_model(
            args, config, spec, pre_process=pre_process, post_process=post_process, vp_stage=vp_stage
        )
        # The output layer keeps its input for the backward pass, not the logits. A custom provider may change them.
        model.logits_may_be_overwritten = True
        return model

    return build


def _calling_with_known(function: Provider, flag: str, **offered: object) -> Provider:
    """Return ``function`` called by keyword, with ``vp_stage`` and what is ``offered`` only if it names them.

    Raises TypeError when it returns no module.
    """
    names = inspect.signature(function).parameters

    def build(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> torch.nn.Module:
        asked = {name: value for name, value in {"vp_stage": vp_stage, **offered}.items() if name in names}
        model = function(pre_process=pre_process, post_process=post_process, **asked)
        if not isinstance(model, torch.nn.Module):
            name = f"{flag} {getattr(function, '__module__', '')}.{getattr(function, '__qualname__', function)}"
            raise TypeError(f"{name} returned {type(model).__name__}; expected a torch.nn.Module")
        return model

    return build


def gpt_model(
    args: Args,
    config: TransformerConfig,
    layer_spec: ModuleSpec | TransformerBlockSubmodules,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    model_class: Callable[..., torch.nn.Module] | None = None,
    positions: str | None = None,
) -> torch.nn.Module:
    """Return one stage of megatron's GPTModel; its logits stay split over the tensor-parallel ranks.

    The last stage holds the layers of ``--mtp-num-layers``. ``model_class`` is built in its place, without them.
    ``positions``: Megatron's kind of position embedding, where it is not that of the flags.
    """
    from megatron.core.models.gpt import GPTModel

    if model_class is None:
        model_class = GPTModel
    if model_class is GPTModel and post_process and args.mtp_num_layers:
        from slime.backends.megatron_utils.model.layer_specs import mtp_block_spec
        from slime.backends.megatron_utils.model.mtp_model import GPTModelWithMTP

        model_class = partial(GPTModelWithMTP, args, mtp_spec=mtp_block_spec(args, config))
    return model_class(
        config=config,
        transformer_layer_spec=layer_spec,
        vocab_size=padded_vocab_size(args),
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=positions or _position_embedding_type(args),
        vp_stage=vp_stage,
        **rope_settings(args),
    )


def _position_embedding_type(args: Args) -> str:
    if args.use_rotary_position_embeddings:
        return "rope"
    kind = args.position_embedding_type or "learned_absolute"
    without = kind == "learned_absolute" and not args.add_position_embedding
    return "none" if without else kind


def freeze_parameters(args: Args, models: Sequence[torch.nn.Module]) -> None:
    """Apply ``--only-train-params-name-list`` and ``--freeze-params-name-list``: regular expressions on local names.

    A critic's value head is trained in any case: it has no weights to keep. Raises ValueError for both
    together, and for an expression that matches no parameter on any rank.
    """
    only = args.only_train_params_name_list or []
    freeze = args.freeze_params_name_list or []
    if only and freeze:
        raise ValueError("--only-train-params-name-list and --freeze-params-name-list exclude each other: give one")
    if not only and not freeze:
        return
    parameters = [named for model in models for named in model.named_parameters()]
    names = [name for name, _ in parameters]
    patterns = only or freeze
    everywhere = gather_from_world([any(re.search(pattern, name) for name in names) for pattern in patterns])
    # Pipeline stages hold different parameters: a pattern is wrong when it matches on no rank.
    unmatched = [pattern for i, pattern in enumerate(patterns) if not any(hits[i] for hits in everywhere)]
    if unmatched:
        flag = "--only-train-params-name-list" if only else "--freeze-params-name-list"
        raise ValueError(f"{flag}: {unmatched} match no parameter; names look like {names[:3]}")
    for name, parameter in parameters:
        hit = any(re.search(pattern, name) for pattern in only or freeze)
        if hit == bool(freeze) and not is_value_head(parameter):
            parameter.requires_grad_(False)


def _freeze_mtp(args: Args, models: Sequence[torch.nn.Module]) -> None:
    """Keep the layers of multi-token prediction as they are without ``--enable-mtp-training``.

    They get no gradient then, but weight decay would change them.
    """
    if trains_mtp(args):
        return
    for model in models:
        if (mtp := getattr(model, "mtp", None)) is not None:
            mtp.requires_grad_(False)


def _with_ddp(args: Args, config: TransformerConfig, models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    from megatron.core.distributed import DistributedDataParallel

    wrapped = [
        # Buckets let the reduction overlap with the backward pass; in later chunks it is not on the critical path.
        DistributedDataParallel(
            config=config, ddp_config=ddp_config_from_args(args), module=model, disable_bucketing=i > 0
        )
        for i, model in enumerate(models)
    ]
    if args.data_parallel_random_init:
        for model in wrapped:
            model.broadcast_params()
    return wrapped


# Megatron's configuration from the arguments: TransformerConfig, DistributedDataParallelConfig, rotary settings

# Megatron has these three of llama 3's scaling parameters fixed in its code.
LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
DEFAULT_SCALING_FACTOR = 8.0
# Fused by torch's compiler: pointless on a CPU, where compiling takes longer than it saves.
NEEDS_CUDA = ("bias_dropout_fusion", "cross_entropy_loss_fusion")
GRADIENT_ACCUMULATION_KERNEL = "fused_weight_gradient_mlp_cuda"


def rope_settings(args: Args) -> dict[str, Any]:
    """Return GPTModel's rotary keyword arguments from the flags.

    Raises ValueError when ``<hf_checkpoint>/config.json`` describes a scaling that the flags do not, or one that
    Megatron has no implementation of.
    """
    scaling = args.use_rope_scaling
    factor = args.rope_scaling_factor
    settings = {
        "rotary_percent": _default(args.rotary_percent, 1.0),
        "rotary_base": _default(args.rotary_base, 10000),
        "seq_len_interpolation_factor": args.rotary_seq_len_interpolation_factor,
        "rope_scaling": scaling,
        "rope_scaling_factor": _default(factor, DEFAULT_SCALING_FACTOR),
    }
    checkpoint = args.hf_checkpoint
    path = Path(checkpoint) / "config.json" if checkpoint else None
    if path is not None and path.is_file():
        _check(args, settings, path)
    return settings


def _default(value: float | None, default: float) -> Any:
    return default if value is None else value


def _check(args: Args, settings: dict[str, Any], path: Path) -> None:
    config = json.loads(path.read_text())
    config = config.get("text_config", config)
    if config.get("model_type") in hf_fields.LAYERS_DIFFER:  # their --spec reads positions from the config itself
        return
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", "mrope"):  # the latter: positions of three numbers, see ``vision``
        if settings["rope_scaling"]:
            raise ValueError(
                f"--use-rope-scaling is set, but {path} describes a model without rope scaling: drop the flag"
            )
    elif kind == "llama3":
        _check_llama3(settings, rope, path)
    elif kind == "linear":
        if settings["seq_len_interpolation_factor"] != rope["factor"]:
            raise ValueError(
                f"{path} has linear rope scaling by {rope['factor']}: pass --rotary-seq-len-interpolation-factor "
                f"{rope['factor']} (seen: {settings['seq_len_interpolation_factor']})"
            )
    elif kind != "yarn" or not _has_yarn(args):
        raise ValueError(f"{path} has rope type {kind!r}, which the flags do not describe")


def _has_yarn(args: Args) -> bool:
    if args.multi_latent_attention:
        return args.rope_type != "rope"
    return args.position_embedding_type == "yarn"


def _check_llama3(settings: dict[str, Any], rope: dict[str, Any], path: Path) -> None:
    expected = {name: rope.get(name, value) for name, value in LLAMA3_FIXED.items()}
    if expected != LLAMA3_FIXED:
        raise ValueError(f"{path} has llama3 rope scaling with {expected}; Megatron implements only {LLAMA3_FIXED}")
    if not settings["rope_scaling"] or settings["rope_scaling_factor"] != rope["factor"]:
        raise ValueError(
            f"{path} has llama3 rope scaling by {rope['factor']}: pass --use-rope-scaling --rope-scaling-factor "
            f"{rope['factor']} (seen: --use-rope-scaling {settings['rope_scaling']}, factor "
            f"{settings['rope_scaling_factor']})"
        )


def params_dtype(args: Args) -> torch.dtype:
    """Return the dtype of the model's parameters: bf16, fp16, or fp32 when neither flag is set."""
    bf16, fp16 = args.bf16, args.fp16
    if bf16 and fp16:
        raise ValueError("--bf16 and --fp16 exclude each other: give one of them")
    return torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32


def transformer_config_from_args(args: Args) -> Any:
    """Return the ``TransformerConfig`` (with ``--multi-latent-attention`` the ``MLATransformerConfig``) of ``args``.

    As in Megatron-LM every argument with the name of a field is copied; those spelled differently are translated.
    What the machine has no kernels for is switched off. Raises what the config's own validation raises.
    """
    import_megatron()
    from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    config_class = MLATransformerConfig if args.multi_latent_attention else TransformerConfig
    values = _same_named(config_class, args)
    values.update(_translated(args))
    on_cuda = accelerator.device_type() == "cuda"
    if args.fp8 is not None and not (on_cuda and HAVE_TE):
        raise ValueError(
            f"--fp8-format {args.fp8}: TransformerEngine computes products in FP8, and it is not installed where this "
            "trainer runs (import transformer_engine); install it, or leave out --fp8-format"
        )
    fused = flags_where(lambda traits: traits.fused_kernel)  # of TransformerEngine, apex or megatron's own extensions
    without = [flag.dest for flag in fused] if not (on_cuda and HAVE_TE) else []
    if not on_cuda:
        without += NEEDS_CUDA
        if values.get("activation_func") is not F.silu:  # that of SwiGLU is our own, see cpu_adapter
            without.append("bias_activation_fusion")
    if not _has_module(GRADIENT_ACCUMULATION_KERNEL):  # a part of apex; megatron's own layers refuse to do without
        without.append("gradient_accumulation_fusion")
    if args.quantization_aware_training:  # kernels add to the gradients of parameters, which rounded weights are not
        without.append("gradient_accumulation_fusion")
    off = [name for name in without if values.get(name)]
    if off:
        logger.info("disabled, kernel not available here: %s", ", ".join(off))
    values.update(dict.fromkeys(without, False))
    biased = bool(values.get("add_bias_linear") and values.get("num_moe_experts")) and not HAVE_TE
    if biased:  # Megatron refuses biases of experts that ranks divide, which ours take
        values["add_bias_linear"] = False
    config = config_class(**values)
    config.add_bias_linear = config.add_bias_linear or biased
    return config


def _has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _same_named(config_class: type, args: Args) -> dict[str, Any]:
    """Return the arguments that have the name of an ``__init__`` field; None means "the field's default"."""
    names = [field.name for field in dataclasses.fields(config_class) if field.init]
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def _translated(args: Args) -> dict[str, Any]:
    def get(name: str, default: object = None) -> Any:
        value = getattr(args, name, None)
        return default if value is None else value

    dtype = params_dtype(args)
    values: dict[str, Any] = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "variable_seq_lengths": True,  # packed micro-batches differ in length
        "deallocate_pipeline_outputs": True,
        "batch_p2p_comm": not get("overlap_p2p_comm", False),
        "num_query_groups": get("num_query_groups") if get("group_query_attention", False) else None,
        "num_moe_experts": get("num_experts", get("num_moe_experts")),
        "num_layers_in_first_pipeline_stage": get(
            "decoder_first_pipeline_num_layers", get("num_layers_in_first_pipeline_stage")
        ),
        "num_layers_in_last_pipeline_stage": get(
            "decoder_last_pipeline_num_layers", get("num_layers_in_last_pipeline_stage")
        ),
        "attention_output_gate": bool(get("attention_output_gate") or get("use_gated_attention")),
        "layernorm_zero_centered_gamma": get("apply_layernorm_1p", get("layernorm_zero_centered_gamma", False)),
    }
    if get("moe_token_dispatcher_type", "allgather") == "allgather":
        values["moe_token_dispatcher_type"] = "alltoall"  # the other one cannot take varying lengths
    if get("multi_latent_attention", False):
        values["q_lora_rank"] = get("q_lora_rank")  # None is a value here: queries without a latent
    epsilon = get("norm_epsilon", get("layernorm_epsilon"))
    if epsilon is not None:
        values["layernorm_epsilon"] = epsilon
    fusion = get("bias_activation_fusion", False)
    if get("swiglu", False):
        values.update(activation_func=F.silu, gated_linear_unit=True)
        values["bias_activation_fusion"] = get("bias_swiglu_fusion", fusion)
    elif get("squared_relu", False):
        values["activation_func"] = squared_relu
    else:
        values["bias_activation_fusion"] = get("bias_gelu_fusion", fusion)
    if get("init_method_xavier_uniform", False):
        values["init_method"] = torch.nn.init.xavier_uniform_
    backend = get("attention_backend")
    if isinstance(backend, str):
        from megatron.core.transformer.enums import AttnBackend

        values["attention_backend"] = AttnBackend[backend]
    window = get("window_size")
    if window is not None:
        values["window_size"] = tuple(window)
    cp_comm_type = get("cp_comm_type")
    if isinstance(cp_comm_type, list | tuple) and len(cp_comm_type) == 1:
        values["cp_comm_type"] = cp_comm_type[0]
    return values


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """Return ``max(x, 0)^2`` (https://arxiv.org/abs/2109.08668)."""
    return F.relu(x).square()


def ddp_config_from_args(args: Args) -> Any:
    """Return the ``DistributedDataParallelConfig``; bucketing is on only when the gradient reduction is overlapped."""
    import_megatron()
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallelConfig

    values = _same_named(DistributedDataParallelConfig, args)
    fields = {field.name for field in dataclasses.fields(DistributedDataParallelConfig) if field.init}
    for argument, name in aliases().items():
        if name in fields and (value := getattr(args, argument, None)) is not None:
            values[name] = value
    if not values.get("overlap_grad_reduce", False):
        values["bucket_size"] = None
    elif values.get("bucket_size") is None:
        ranks = mpu.get_data_parallel_world_size(with_context_parallel=True)
        values["bucket_size"] = max(40_000_000, 1_000_000 * ranks)
    return DistributedDataParallelConfig(**values)
