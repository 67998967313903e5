"""Settings of an engine under which a push of weights would not renew all that it generates with.

SGLang derives many settings from the model and the device, so what counts is what the engine reports
(``/server_info``), not the flags. From the source of SGLang 0.5.20.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from slime.arguments.args import Args
from slime.arguments.rules.lora import takes_adapters
from slime.ray.manager.engines.members import Member
from slime.servers.drafts import separate_draft
from slime.servers.http import ServerError
from slime.weights.hf.checkpoint import quantization_of, read_config

logger = logging.getLogger(__name__)

Transport = Literal["broadcast", "tensor", "disk", "p2p"]

REARRANGED = {
    "flashinfer_trtllm": "--sglang-moe-runner-backend flashinfer_trtllm_routed",
    "aiter": "--sglang-moe-runner-backend triton",
}
"""MoE kernels for unquantized weights that rearrange them after loading, which only a load from disk repeats -> what
takes pushed weights as well."""


TAKE_QUANTIZED = {
    "fp8": ("auto", "triton", "deep_gemm"),
    "compressed-tensors": ("auto", "triton", "marlin"),
}
"""MoE kernels whose quantized weights stay as they were loaded, or are rearranged again after a push
(``engine_plugin/slime_engine_plugin/weights/repacked.py``)."""


def check_renewable(args: Args, members: Sequence[Member]) -> None:
    """Raise ValueError where a push would miss something of an engine; one of every group is checked."""
    transport, wrong = transport_of(args), []
    config = read_config(args.hf_checkpoint) if Path(args.hf_checkpoint).is_dir() else {}
    stored = (quantization_of(config) or {}).get("quant_method")
    for _, group in groupby(members, key=lambda member: member.engine.plan.group):
        member = next(group)
        try:
            info = member.client.server_info()
        except ServerError as e:
            logger.warning("%s does not say what it is made of, which is not checked: %s", member, e)
            continue
        refused, warned = what_a_push_misses(info, transport, stored, adapters=takes_adapters(args))
        wrong += [f"{member}: {sentence}" for sentence in refused]
        for sentence in warned:
            logger.warning("%s: %s", member, sentence)
    if wrong:
        raise ValueError("\n".join(wrong))


def transport_of(args: Args) -> Transport:
    """Return how the weights reach the engines."""
    if args.update_weight_transport == "disk":
        return "disk"
    if args.update_weight_transport == "p2p":
        return "p2p"
    return "tensor" if args.colocate else "broadcast"


def what_a_push_misses(
    info: Mapping[str, Any], transport: Transport, stored: str | None = None, *, adapters: bool = False
) -> tuple[list[str], list[str]]:
    """Return why an engine that reports ``info`` must not be pushed to, and what to warn of; a sentence each.

    A setting that the engine does not report is taken to be off. ``stored``: the quantization of its checkpoint, in
    which weights are pushed. ``adapters``: that adapters alone are pushed, and the engine keeps its weights.
    """
    if adapters:
        return [], []
    refused, warned = _of_weights(info, transport, stored)
    refused += _of_drafts(info)
    if transport == "p2p":
        refused += _of_addresses(info, stored)
    if (draft := separate_draft(info)) is not None:
        drafts = f"--sglang-speculative-draft-model-path {draft}: the draft model has a checkpoint of its own"
        if transport == "disk":
            refused.append(
                f"{drafts}, and SGLang would load the trainer's weights into it, too; send them without "
                "--update-weight-transport disk, or leave the draft model out"
            )
        else:
            warned.append(f"{drafts} and keeps its weights, so that fewer of its tokens are accepted as training goes")
    return refused, warned


def _of_drafts(info: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with draft layers of the model itself, which are to follow it."""
    if not info.get("speculative_algorithm") or separate_draft(info) is not None:
        return []
    refused = []
    if info.get("speculative_token_map"):
        refused.append(
            f"--sglang-speculative-token-map {info['speculative_token_map']}: the draft layers get a copy of some rows "
            "of the head when the engine starts, which a push does not renew; leave it out"
        )
    if info.get("speculative_draft_model_quantization") not in (None, "unquant", info.get("quantization")):
        refused.append(
            f"--sglang-speculative-draft-model-quantization {info['speculative_draft_model_quantization']}: the draft "
            "layers hold quantized weights, and the trainer sends them as it sends the model's; leave it out"
        )
    return refused


def _of_addresses(info: Mapping[str, Any], stored: str | None) -> list[str]:
    """Return why the engine's parameters are not what is to be written to from outside."""
    refused, way_out = [], "leave --update-weight-transport p2p out"
    if stored:
        refused.append(f"--hf-checkpoint is quantized ({stored}), and plain weights alone are written; {way_out}")
    if info.get("speculative_algorithm"):
        refused.append(
            f"--sglang-speculative-algorithm {info['speculative_algorithm']}: draft layers are not written; {way_out}"
        )
    if info.get("enable_memory_saver"):
        refused.append(f"--sglang-enable-memory-saver: the memory of weights may be released; {way_out}")
    return refused


def _of_weights(info: Mapping[str, Any], transport: Transport, stored: str | None) -> tuple[list[str], list[str]]:
    refused, warned = [], []
    quantization, runner = info.get("quantization"), info.get("moe_runner_backend")
    if quantization not in (None, "unquant", stored):
        refused.append(
            f"--sglang-quantization {quantization}: the engine holds quantized weights, and the trainer sends them as "
            f"{'--hf-checkpoint stores them' if stored else 'they are trained'}; leave it out"
        )
    elif stored and runner not in (None, *TAKE_QUANTIZED.get(stored, ())):
        refused.append(
            f"--sglang-moe-runner-backend {runner} (given, or chosen by SGLang) rearranges quantized weights when they "
            "are loaded, and pushed ones would stay as they come; give --sglang-moe-runner-backend triton"
        )
    elif transport != "disk" and runner in REARRANGED:
        refused.append(
            f"--sglang-moe-runner-backend {runner} (given, or chosen by SGLang) rearranges the experts' weights once, "
            f"when they are loaded, and pushed ones would stay as they come; give {REARRANGED[runner]}, or "
            "--update-weight-transport disk"
        )
    if transport != "disk" and info.get("attention_backend") == "intel_amx":
        refused.append(
            "--sglang-attention-backend intel_amx: the engine packs its weights once, when they are loaded, and pushed "
            "ones would stay as they come; give --sglang-attention-backend torch_native or --update-weight-transport "
            "disk"
        )
    if info.get("cpu_offload_gb"):
        refused.append(
            f"--sglang-cpu-offload-gb {info['cpu_offload_gb']}: part of the weights is on the host, where a push does "
            "not reach; leave it out"
        )
    if (info.get("offload_group_size") or 0) > 0:
        refused.append(
            f"--sglang-offload-group-size {info['offload_group_size']}: layers wait on the host, where a push does not "
            "reach them; leave it out"
        )
    if info.get("enable_lora") or info.get("lora_paths"):
        refused.append("--sglang-enable-lora: a push renews the base model and no adapter; leave it out")
    if info.get("weight_cache_mode") not in (None, "off"):
        refused.append(
            f"--sglang-weight-cache-mode {info['weight_cache_mode']}: SGLang refuses pushes to weights that engines "
            "share; leave it out"
        )
    if str(info.get("kv_cache_dtype")).startswith("fp8") and info.get("quantization_param_path"):
        warned.append(
            f"--sglang-quantization-param-path {info['quantization_param_path']}: the scales of the key-value cache "
            "were measured with the first weights and stay"
        )
    return refused, warned
