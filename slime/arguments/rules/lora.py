"""Low-rank adapters (``--lora-rank``): the base model stays as it is, and is the reference."""

from __future__ import annotations

from pathlib import Path

from slime.arguments.args import Args
from slime.arguments.errors import ArgumentError
from slime.arguments.placement import models_of
from slime.arguments.rules.checkpoints import is_megatron_checkpoint
from slime.arguments.rules.hf_config import config_of

ADAPTED_BY_ENGINES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Projections whose adapters SGLang loads; of models with experts those of attention."""
FAMILIES_OF_ENGINES = frozenset({"llama", "qwen2", "qwen3", "qwen3_moe"})
_ATTENTION = 4


def takes_adapters(args: Args) -> bool:
    """Return True if the engines that are trained get adapters alone."""
    return bool(args.lora_rank) and args.lora_sync == "adapter" and not args.debug_rollout_only


def adapted_modules(args: Args) -> list[str]:
    """Return the projections with adapters, for the engines."""
    wanted: list[str] = args.lora_target_modules
    return list(ADAPTED_BY_ENGINES) if wanted == ["all-linear"] else list(wanted)


def check(args: Args) -> None:
    """Refuse what would change the base model, or take something else for it."""
    if not args.lora_rank:
        return
    for option, given in (
        ("--only-train-params-name-list", args.only_train_params_name_list),
        ("--freeze-params-name-list", args.freeze_params_name_list),
    ):
        if given:
            raise ArgumentError(
                f"{option}: --lora-rank freezes the whole model and trains adapters; leave it out, and choose layers "
                "with --lora-target-modules"
            )
    if args.enable_mtp_training:
        raise ArgumentError("--enable-mtp-training: --lora-rank freezes the MTP layers, too; leave one of them out")
    if args.moe_router_enable_expert_bias and args.moe_router_bias_update_rate != 0:
        raise ArgumentError(
            f"--moe-router-bias-update-rate {args.moe_router_bias_update_rate}: --lora-rank keeps the model's routers "
            "as they are; give --moe-router-bias-update-rate 0"
        )
    if args.moe_shared_expert_overlap:
        raise ArgumentError(
            "--moe-shared-expert-overlap computes shared experts without the communication that their adapters "
            "(--lora-rank) need; leave it out"
        )
    if args.ref_update_interval is not None:
        raise ArgumentError(
            "--ref-update-interval: with --lora-rank the reference is the model without adapters and cannot become "
            "another one; leave it out"
        )
    _check_load(args)
    if takes_adapters(args) and not args.debug_train_only:
        _check_engines(args)


def _check_engines(args: Args) -> None:
    """Raise ArgumentError unless engines can be sent adapters alone: their weights are the base, from start to end."""
    sync, way_out = "--lora-sync adapter", "use --lora-sync merged"
    if Path(args.ref_load).absolute() != Path(args.hf_checkpoint).absolute():
        raise ArgumentError(
            f"{sync} leaves the engines with the weights of --hf-checkpoint {args.hf_checkpoint}, and the model under "
            f"the adapters is --ref-load {args.ref_load}; leave --ref-load out, or {way_out}"
        )
    found = config_of(args)
    family = str(found[0].get("model_type")) if found is not None else "unknown"
    if family not in FAMILIES_OF_ENGINES:
        raise ArgumentError(
            f"{sync}: engines are sent adapters of the families {', '.join(sorted(FAMILIES_OF_ENGINES))}, not of "
            f"{family}; {way_out}"
        )
    allowed = ADAPTED_BY_ENGINES[:_ATTENTION] if args.num_experts else ADAPTED_BY_ENGINES
    if args.num_experts and args.lora_target_modules == ["all-linear"]:
        raise ArgumentError(
            f"{sync}: engines take adapters of attention only in a model with experts; give --lora-target-modules "
            f"{' '.join(allowed)}, or {way_out}"
        )
    if other := sorted(set(args.lora_target_modules) - {*allowed, "all-linear"}):
        raise ArgumentError(f"{sync}: engines take no adapters of {', '.join(other)}; {way_out}")
    _check_pushes(args, sync, way_out)


def _check_pushes(args: Args, sync: str, way_out: str) -> None:
    for option, given, why in (
        ("--update-weight-transport disk", args.update_weight_transport == "disk", "adapters go within requests"),
        ("--update-weight-transport p2p", args.update_weight_transport == "p2p", "adapters go within requests"),
        ("--update-weight-mode delta", args.update_weight_mode == "delta", "adapters are sent whole"),
        ("--check-weight-update-equal", args.check_weight_update_equal, "engines cannot check adapters"),
        ("--rollout-external-engine-addrs", args.rollout_external, "it needs slime's plug-in in the engines"),
        ("--offload-rollout", args.offload_rollout, "engines that release their weights need all of them again"),
        ("--sglang-dp-size", (args.sglang_dp_size or 1) > 1, "SGLang loads adapters into one copy of the model"),
        ("--sglang-pp-size", (args.sglang_pp_size or 1) > 1, "pipeline stages of engines are untested with adapters"),
        ("--sglang-tokenizer-worker-num", (args.sglang_tokenizer_worker_num or 1) > 1, "one process must know them"),
    ):
        if given:
            raise ArgumentError(f"{option}: not together with {sync}, {why}; leave it out, or {way_out}")
    if any(model.update_weights and model.has_pd_disaggregation for model in models_of(args) or ()):
        raise ArgumentError(f"{sync}: prefill and decode engines cannot be sent adapters alone; {way_out}")


def _check_load(args: Args) -> None:
    """After ``--load`` is resolved: it is ``--ref-load`` then, unless it is another checkpoint."""
    if args.debug_rollout_only or is_megatron_checkpoint(args.load):
        return
    if Path(args.load).absolute() != Path(args.ref_load).absolute():
        raise ArgumentError(
            f"--load {args.load} is a Hugging Face checkpoint: with --lora-rank it is --ref-load (default: "
            "--hf-checkpoint) that gives the model under the adapters; give it as --ref-load, or to continue an "
            "adapter --lora-adapter-path"
        )
