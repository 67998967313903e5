"""Build a tiny model on this rank and run it forward: what the Megatron integration tests do on every rank."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

LENGTHS = (13, 7, 20)  # tokens of the packed sequences


def model_args(checkpoint: str | Path, *flags: Any) -> Namespace:
    """Return the parsed arguments of a run on ``checkpoint``, on the CPU."""
    from slime.arguments import finalize_for_device, parse_args
    from tools.tiny_model import megatron_flags

    required = (
        *("--hf-checkpoint", checkpoint, "--disable-rollout-global-dataset", "--rollout-max-response-len", 32),
        *("--rollout-batch-size", 4, "--global-batch-size", 4, "--num-rollout", 1, "--rollout-num-gpus", 1),
        *("--actor-num-gpus-per-node", os.environ["WORLD_SIZE"]),
        "--debug-train-only",  # so that no engine is asked whether it can serve the checkpoint
    )
    config = json.loads((Path(checkpoint) / "config.json").read_text())
    rope = config.get("text_config", config).get("rope_parameters", {})
    scaling = ["--use-rope-scaling", "--rope-scaling-factor", rope["factor"]] if "llama3" in rope.values() else []
    args = parse_args([str(x) for x in (*required, *megatron_flags(checkpoint), *scaling, *flags)])
    args.debug_train_only = False
    finalize_for_device(args, "cpu")
    return args


def sequences(vocab_size: int) -> list[torch.Tensor]:
    """Return made-up token sequences of LENGTHS, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, vocab_size, (length,), generator=generator) for length in LENGTHS]


def packed(
    vocab_size: int, cp_rank: int, cp_size: int, multiple: int = 4, given: list[torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return ``(tokens [1, t], index [t], packed_seq_params)`` of this context-parallel rank's part of the pack.

    Each sequence is padded to a multiple of ``multiple``. ``index`` counts the real tokens of the pack, -1 is padding.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    tokens, index, cu_seqlens, count = [], [], [0], 0
    for sequence in sequences(vocab_size) if given is None else given:
        padding = -len(sequence) % multiple
        positions = torch.cat([torch.arange(len(sequence)) + count, torch.full((padding,), -1)])
        padded = torch.cat([sequence, torch.zeros(padding, dtype=torch.long)])
        chunks = range(1) if cp_size == 1 else (cp_rank, 2 * cp_size - 1 - cp_rank)
        size = len(padded) // (1 if cp_size == 1 else 2 * cp_size)
        tokens += [padded[i * size : (i + 1) * size] for i in chunks]
        index += [positions[i * size : (i + 1) * size] for i in chunks]
        cu_seqlens.append(cu_seqlens[-1] + len(padded))
        count += len(sequence)
    cu = torch.tensor(cu_seqlens, dtype=torch.int32)
    longest = int((cu[1:] - cu[:-1]).max())
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return torch.cat(tokens)[None], torch.cat(index), params


def output_gradient(vocab_size: int, tokens: int = sum(LENGTHS)) -> torch.Tensor:
    """Return the made-up gradient of the loss by the logits: ``[tokens, vocab_size]``."""
    return torch.randn(tokens, vocab_size, generator=torch.Generator().manual_seed(5))


def run_pack(
    model: list[torch.nn.Module], args: Namespace, given: list[torch.Tensor] | None = None, **inputs: torch.Tensor
) -> dict[str, Any] | None:
    """Run the pack forward and backward as each of two micro-batches, leaving gradients in the DDP buffers.

    ``given``: other sequences than the made-up ones, with further ``inputs`` of the model. The loss is linear in the
    logits: ``sum(logits * output_gradient)``. Return this rank's logits of the first micro-batch and their places, None
    but on the last stage.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    from slime.algorithms.log_probs import softcapped
    from slime.models.shape import logit_cap

    cp_rank, cp_size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    tokens, index, _ = packed(args.vocab_size, cp_rank, cp_size, given=given)
    whole = output_gradient(args.vocab_size, sum(LENGTHS) if given is None else sum(map(len, given)))
    gradient = torch.cat([whole, torch.zeros(1, args.vocab_size)])[index]  # -1: the zeros
    kept: list[torch.Tensor] = []

    def step(_: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        params = packed(args.vocab_size, cp_rank, cp_size, given=given)[2]  # layers may leave something with a pack
        logits = chunk(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=params, **inputs)

        def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            output = softcapped(output, logit_cap(args))
            kept.append(output.detach().clone())
            local = gradient[:, tp_rank * output.size(-1) :][:, : output.size(-1)]
            return (output[0, :, : local.size(-1)] * local).sum(), {}

        return logits, loss

    get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
    for chunk in model:
        chunk.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[None] * len(model),
        model=model,
        num_microbatches=2,
        seq_length=tokens.numel(),
        micro_batch_size=1,
        forward_only=False,
    )
    return {"logits": kept[0][0], "index": index, "tp_rank": tp_rank} if kept else None


def hf_gradients(model: list[torch.nn.Module], args: Namespace) -> list[tuple[str, torch.Tensor]]:
    """Return the gradients as Hugging Face tensors. Overwrites the weights."""
    from slime.backends.megatron_utils.weights import iter_hf_weights

    with torch.no_grad():
        for chunk in model:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad) if parameter.requires_grad else parameter.zero_()
    return [(name, tensor.clone()) for name, tensor in iter_hf_weights(model, args, gather_pp=True)]


def assemble(results: list[dict[str, Any] | None], vocab_size: int, tokens: int = sum(LENGTHS)) -> torch.Tensor:
    """Put the ranks' logits together: ``[tokens, vocab_size]``, NaN where no rank had any."""
    parts = [r for r in results if r is not None]
    width = parts[0]["logits"].shape[-1]
    tp_size = 1 + max(r["tp_rank"] for r in parts)
    full = torch.full((tokens, width * tp_size), float("nan"))
    for part in parts:
        real = part["index"] >= 0
        start = part["tp_rank"] * width
        full[part["index"][real], start : start + width] = part["logits"][real].float()
    return full[:, :vocab_size]
