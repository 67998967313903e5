"""Multi-token prediction: what the MTP layers are trained on, and their loss.

Layer ``k`` (from 1) sees at position ``i`` the hidden state there and the embedding of token ``i + k``, and predicts
token ``i + k + 1`` (DeepSeek-V3, https://arxiv.org/abs/2412.19437, section 2.2). With ``m`` the loss mask and ``S`` the
reduction of the policy loss (the mean over a rollout's trained tokens, summed over rollouts, or with
``--calculate-per-token-loss`` the sum over tokens), the loss of layer ``k`` is
``L_k = S(-log p_k(token i + k + 1) * m)``, and ``scaling_factor * mean_k(L_k)`` is added to the policy loss. Responses
whose prompt has at most ``k`` tokens have tokens that layer ``k`` cannot predict: they add nothing, and count in the
denominators as they do for the policy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slime.arguments.args import Args
from slime.backends.megatron_utils.state.parallel import context_parallel, pipeline_parallel, tensor_parallel
from slime.batching.packing import PackedMicroBatch, pack


@dataclass(frozen=True)
class Depth:
    """The part of one layer in a packed micro-batch, as this context-parallel rank holds it.

    input_ids: int64 [1, T_local], at every position the token that the layer sees beside the hidden state (0 past the
        end of its sequence).
    rows: int64 [n], positions of the row from which the layer predicts response tokens.
    targets: int64 [n], these tokens.
    weights: float32 [n], what each prediction's loss counts in the sum: mask over denominator.
    """

    input_ids: Tensor
    rows: Tensor
    targets: Tensor
    weights: Tensor


@dataclass
class MTPTargets:
    """The depths of a micro-batch, and the loss of each (a scalar with gradient) once the model has seen them."""

    depths: tuple[Depth, ...]
    losses: list[Tensor] = field(default_factory=list)


def trains_mtp(args: Args) -> bool:
    """Return whether ``--mtp-num-layers`` layers are trained beside the policy."""
    return bool(args.enable_mtp_training and args.mtp_num_layers)


def needs_shared_embedding(args: Args) -> bool:
    """Return whether the layers, which are on the last pipeline stage, need the embedding that the first one has."""
    untied = args.untie_embeddings_and_output_weights
    return trains_mtp(args) and untied and pipeline_parallel().size > 1


def mtp_targets(args: Args, batch: dict[str, Any]) -> MTPTargets:
    """Return what the layers are trained on in ``batch`` (of ``data.build_micro_batch``).

    Every rank has the samples whole, so nothing is sent between context-parallel ranks, and no sequence sees the next.
    """
    weights = _weights(args, batch)
    return MTPTargets(tuple(_depth(args, batch, weights, k + 1) for k in range(args.mtp_num_layers or 0)))


def _weights(args: Args, batch: dict[str, Any]) -> list[Tensor]:
    """Return per sample what the loss of each response token counts [response_length]."""
    masks = [mask.float() for mask in batch["loss_masks"]]
    if args.calculate_per_token_loss:
        return masks
    sums = batch.get("rollout_mask_sums")
    sums = (
        torch.stack([mask.sum() for mask in masks]) if sums is None else torch.as_tensor(sums, device=masks[0].device)
    )
    return [mask / total for mask, total in zip(masks, sums.clamp_min(1), strict=True)]


def _depth(args: Args, batch: dict[str, Any], weights: list[Tensor], k: int) -> Depth:
    samples = batch["unconcat_tokens"]
    packed = _packed(args, [F.pad(tokens[k:], (0, min(k, len(tokens)))) for tokens in samples], batch)
    rows, targets, counts = [], [], []
    for tokens, response, weight, spans in zip(samples, packed.response_lengths, weights, packed.spans, strict=True):
        prompt = len(tokens) - response
        for span in spans:
            first, last = max(span.position, prompt - k - 1), min(span.position + span.length, len(tokens) - k - 1)
            if first < last:
                start = span.start + first - span.position
                rows.append(torch.arange(start, start + last - first, device=tokens.device))
                targets.append(tokens[first + k + 1 : last + k + 1])
                counts.append(weight[first + k + 1 - prompt : last + k + 1 - prompt])
    if not rows:
        empty = torch.empty(0, dtype=torch.long, device=packed.tokens.device)
        return Depth(packed.tokens, empty, empty, empty.float())
    return Depth(packed.tokens, torch.cat(rows), torch.cat(targets).long(), torch.cat(counts))


def _packed(args: Args, samples: list[Tensor], batch: dict[str, Any]) -> PackedMicroBatch:
    """Return tokens of the samples' lengths, packed as the micro-batch is."""
    cp, tp = context_parallel(), tensor_parallel()
    return pack(
        samples,
        batch["response_lengths"],
        cp_size=cp.size,
        cp_rank=cp.rank,
        tp_size=tp.size,
        pad_multiplier=args.data_pad_size_multiplier,
    )


def add_mtp_loss(
    args: Args, targets: MTPTargets | None, loss: Tensor, metrics: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss with that of the MTP layers, and the metrics with ``mtp_<k>_loss`` and their mean ``mtp_loss``.

    Both are unchanged when the layers are not trained (``targets`` is None). Metrics do not have the scaling factor.
    """
    if targets is None:
        return loss, metrics
    if len(targets.losses) != len(targets.depths):
        raise RuntimeError(
            f"expected the model to compute the loss of {len(targets.depths)} layers of multi-token prediction, it has "
            f"computed {len(targets.losses)}: is it the model that --mtp-num-layers builds?"
        )
    mean = torch.stack(targets.losses).mean()
    reported = {f"mtp_{k + 1}_loss": value.detach() for k, value in enumerate(targets.losses)}
    return loss + args.mtp_loss_scaling_factor * mean, {**metrics, **reported, "mtp_loss": mean.detach()}
