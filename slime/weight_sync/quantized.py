"""Tensors that engines of a quantized checkpoint are sent: those of the checkpoint, made of the trainer's weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from slime.arguments.args import Args
from slime.backends.megatron_utils.weights import iter_hf_weights
from slime.weight_sync.transport import WeightSource
from slime.weights.quantization import Int4, Quantizer

FP8_KERNELS = ((8, 9), (10, 0))
"""Compute capabilities, from and below, whose kernels read FP8 as checkpoints have it. SGLang repacks it for Marlin on
GPUs before these (``can_auto_enable_marlin_fp8``), and rounds its scales again on those after (Blackwell). What it does
to INT4 and to FP8 per tensor, slime's engine plug-in undoes and repeats."""

_of_checkpoint = functools.cache(Quantizer.of_checkpoint)
"""Read once: where a push could not read the files any more, its other ranks would wait for this one."""


def quantizer_of(args: Args) -> Quantizer | None:
    """Return what quantizes the weights for engines of ``--hf-checkpoint``; None where it is not quantized.

    Raises ValueError where engines rearrange FP8 weights after loading, so that pushed ones would not fit.
    """
    quantizer = _of_checkpoint(args.hf_checkpoint)
    if quantizer is None or isinstance(quantizer.format, Int4) or not torch.cuda.is_available():
        return quantizer
    first, beyond = FP8_KERNELS
    if not first <= torch.cuda.get_device_capability() < beyond:
        raise ValueError(
            f"--hf-checkpoint {args.hf_checkpoint} is quantized ({type(quantizer.format).__name__}): engines on this "
            "GPU rearrange such weights when they load them, and cannot be sent new ones; give a bf16 checkpoint"
        )
    return quantizer


def weights_to_push(source: WeightSource, *, gather_pp: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``iter_hf_weights`` of ``source`` as the checkpoint of the engines has them; collective like that."""
    quantizer = quantizer_of(source.args)
    weights = iter_hf_weights(source.model, source.args, gather_pp=gather_pp)
    return weights if quantizer is None else quantizer.stream(weights)
