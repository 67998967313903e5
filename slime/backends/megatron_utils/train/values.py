"""The critic: its values per response token, their loss, and the columns that the actor receives."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.algorithms.losses import compute_value_loss
from slime.arguments.args import Args
from slime.backends.megatron_utils.checkpoints.directory import TORCH_DIST, stored_format
from slime.backends.megatron_utils.checkpoints.formats import shapes_of
from slime.backends.megatron_utils.model.value_head import VALUE_HEAD
from slime.backends.megatron_utils.train.cp_utils import Reducer, ResponseLayout, response_rows_and_targets
from slime.backends.megatron_utils.train.data import RolloutData, num_samples, sample_name
from slime.backends.megatron_utils.train.response_logits import note_finite_samples, packed_row
from slime.batching.ragged_tensor import flat
from slime.utils.declared import with_defaults

logger = logging.getLogger(__name__)


def checkpoint_has_value_head(directory: Path, hidden_size: int) -> bool:
    """Return True if a Megatron checkpoint has a value head for this hidden size, not e.g. a language model's layer."""
    from megatron.core import dist_checkpointing

    name = f"{VALUE_HEAD}.weight"
    if stored_format(directory) != TORCH_DIST:
        return (1, hidden_size) in shapes_of(directory, name)
    saved = dist_checkpointing.load_tensors_metadata(str(directory)).get(name)
    return saved is not None and tuple(saved.global_shape) == (1, hidden_size)


def get_values(
    logits: Tensor,
    *,
    args: Args,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Return (empty tensor, {"values": [...]}), one float32 tensor [n_local] per sample.

    ``logits`` [1, T_local, 1] is the output of a value head. A token's value is that of the state it is chosen in: the
    output at the position before it, where its log-prob is too. Values are no logits: they are not divided by
    ``rollout_temperature``. The signature is that of ``get_log_probs_and_entropy``. Raises ValueError for an output
    with more than one column.
    """
    args = with_defaults(args)
    del args, with_entropy, non_loss_data, max_seq_lens
    if logits.size(-1) != 1:
        raise ValueError(f"expected one value per position, got {tuple(logits.shape)}: the output of a language model?")
    rows, _, sizes = response_rows_and_targets(unconcat_tokens, total_lengths, response_lengths)
    values = packed_row(logits)[:, 0].float()[rows]
    return torch.empty(0, device=logits.device), {"values": list(values.split(sizes))}


def value_loss_function(
    args: Args, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return (clipped value loss, {"value_loss", "value_clipfrac"}), reduced by ``sum_of_sample_mean``.

    ``batch`` has ``values``, those before the first step, and ``returns``, per local response token.
    """
    args = with_defaults(args)
    _, result = get_values(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    note_finite_samples(batch, result["values"], batch["values"], batch["returns"])
    values, old_values = flat(result["values"]), flat(batch["values"])
    per_token, clipped = compute_value_loss(values, old_values, flat(batch["returns"]), args.value_clip)
    loss = sum_of_sample_mean(per_token)
    return loss, {"value_loss": loss.detach(), "value_clipfrac": sum_of_sample_mean(clipped).detach()}


def add_external_columns(data: RolloutData, columns: dict[str, Any], device: torch.device) -> None:
    """Add per-sample columns that another trainer made (the critic's ``values``), with their tensors on ``device``.

    Raises ValueError, naming the sample, where ``values`` are not one finite number per response token of this rank.
    """
    for name, column in columns.items():
        if isinstance(column, list):
            column = [value.to(device) if torch.is_tensor(value) else value for value in column]
        data[name] = column
    if "values" in columns:
        _check_values(data)


def _check_values(data: RolloutData) -> None:
    values = data["values"]
    if len(values) != num_samples(data):
        raise ValueError(
            f"the critic sent values of {len(values)} samples, this rank has {num_samples(data)}: do actor and critic "
            "divide the batch alike?"
        )
    masks = ResponseLayout.of(data).local(data["loss_masks"])
    for i, (value, mask) in enumerate(zip(values, masks, strict=True)):
        if value.shape != mask.shape:
            raise ValueError(
                f"{sample_name(data, i)}: the critic sent {tuple(value.shape)} values for {mask.numel()} response "
                "tokens of this rank"
            )
        if not torch.isfinite(value).all():
            raise ValueError(f"{sample_name(data, i)}: the critic's values are not finite; lower its --lr")
