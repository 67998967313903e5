"""Build the model chunks of this rank from the flags."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from slime.arguments.args import Args
from slime.backends.megatron_utils import import_megatron
from slime.backends.megatron_utils.lora.build import add_adapters
from slime.backends.megatron_utils.model.fake_quantization import round_weights
from slime.backends.megatron_utils.model.model_config import (
    ddp_config_from_args,
    rope_settings,
    transformer_config_from_args,
)
from slime.backends.megatron_utils.model.mtp_loss import trains_mtp
from slime.backends.megatron_utils.model.value_head import put_value_head
from slime.backends.megatron_utils.state.parallel import gather_from_world
from slime.backends.megatron_utils.weights.naming import is_value_head
from slime.models.shape import padded_vocab_size
from slime.utils import accelerator
from slime.utils.misc import load_function

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

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
    exact = router_buffers(model)
    half = Float16Module(config, model)
    for router, name, buffer in exact:
        setattr(router, name, buffer)
    return half


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
) -> torch.nn.Module:
    """Return one stage of megatron's GPTModel; its logits stay split over the tensor-parallel ranks.

    The last stage holds the layers of ``--mtp-num-layers``.
    """
    from megatron.core.models.gpt import GPTModel

    model_class: Callable[..., torch.nn.Module] = GPTModel
    if post_process and args.mtp_num_layers:
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
        position_embedding_type=_position_embedding_type(args),
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
