"""From a rollout shard to the micro-batches that Megatron's schedules pull.

``rollout_data`` is a dict of columns for this DP rank's samples: ``RaggedTensor`` columns (``tokens`` int64
[total_length], ``loss_masks`` [response_length] ...) and lists with one entry per sample (``rewards`` ...), plus the
schedule (``micro_batch_indices``, ``num_microbatches``, ``global_batch_sizes``) and whole-batch columns
(``raw_reward``). Hooks are given, and leave, lists with one tensor per sample for columns, so either form may be met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.arguments.args import Args
from slime.backends.megatron_utils.model.images import Images, distinct_images, images_of, place_images
from slime.backends.megatron_utils.model.mtp_loss import MTPTargets
from slime.backends.megatron_utils.state.parallel import context_parallel, tensor_parallel
from slime.backends.megatron_utils.train.cp_utils import ResponseLayout
from slime.batching import validate
from slime.batching.columns import RolloutShard
from slime.batching.packing import pack
from slime.batching.ragged_tensor import RaggedTensor, as_lists
from slime.batching.routed_experts import rows_of_samples
from slime.batching.validate import IDS, OFFSETS, sample_namer
from slime.models.facts import takes_images
from slime.models.shape import model_shape
from slime.utils.moved import moved

RolloutData = dict[str, Any]

# Whole-batch columns and schedule: they are not per sample even when their length happens to fit.
_NOT_PER_SAMPLE = {"raw_reward", "global_batch_sizes", "num_microbatches", "micro_batch_indices", "partition"}
PIXELS, GRIDS, USES = "pixel_values", "image_grid_thw", "image_uses"
"""The inputs of a model for images; only the first pipeline stage reads the first and the last."""
# Columns with one value per response token that arrive in full length and are kept in the CP-local layout.
_TOKEN_COLUMNS_TO_SLICE = ("rollout_log_probs", "teacher_log_probs")


def prepare_rollout_data(args: Args, shard: RolloutShard, device: torch.device) -> RolloutData:
    """Return the columns of ``shard`` on ``device``, checked, with per-token columns cut to this CP rank's part.

    Images, which are large, are moved with their micro-batch.
    """
    check_shard(args, shard)
    check_images(args, shard)
    data = shard.to_tensors(device, images_on="cpu")
    layout = ResponseLayout.of(data)
    for key in _TOKEN_COLUMNS_TO_SLICE:
        if key in data:
            data[key] = layout.local(data[key])
    return data


def num_samples(data: RolloutData) -> int:
    """Return the number of samples of this DP rank."""
    return len(data["tokens"])


def sample_name(data: RolloutData, position: int) -> str:
    """Return how messages call the sample at local ``position``: its sample index when known."""
    index = sample_index(data, position)
    return f"sample at local position {position}" if index is None else f"sample index {index}"


def sample_index(data: RolloutData, position: int) -> int | None:
    """Return the index of the sample at local ``position``; None where the rollout function did not set one."""
    indices = data.get("sample_indices")
    return None if indices is None or indices[position] is None else int(indices[position])


def check_shard(args: Args, shard: RolloutShard) -> None:
    """Check what the manager did not when it packed the columns: token ids, and top-p masks where training needs them.

    Raises ValueError naming the sample.
    """
    ragged = shard.batch.ragged
    name_of = sample_namer(shard.batch.numbers.get("sample_indices"))
    if args.vocab_size:
        validate.vocabulary(ragged["tokens"], args.vocab_size, name_of)
    if args.rollout_top_p != 1.0 and IDS not in ragged:
        raise ValueError(
            f"--rollout-top-p {args.rollout_top_p}: the samples have no top-p masks; "
            f"--custom-convert-samples-to-train-data-path must pass {IDS} and {OFFSETS} on"
        )
    validate.check_top_p_mask(ragged, name_of, args.vocab_size)


def check_images(args: Args, shard: RolloutShard) -> None:
    """Compare image tokens and images of every sample. Raises ValueError naming the sample.

    Of a model that is not built here nothing is known.
    """
    column, spec = shard.batch.objects.get("multimodal_train_inputs"), args.spec
    if args.custom_model_provider_path:
        return
    if not takes_images(spec):
        if column is not None and any(column) and (spec is None or spec[0].startswith("slime_plugins.")):
            raise ValueError(
                f"the samples have images, and --spec {' '.join(spec or ('(absent)',))} builds a model without a "
                "vision tower; give the specification of the vision-language model"
            )
        return
    images = images_of(args)
    name_of = sample_namer(shard.batch.numbers.get("sample_indices"))
    tokens = shard.batch.ragged["tokens"]
    for position in range(len(tokens)):
        _check_sample(images, tokens[position], column[position] if column else None, name_of, position)


def _check_sample(
    images: Images, tokens: np.ndarray, given: Mapping[str, Any] | None, name_of: Callable[[int], str], position: int
) -> None:
    inputs = given or {}
    unknown = sorted(inputs.keys() - {PIXELS, GRIDS})
    if unknown:
        raise ValueError(f"{name_of(position)} has multimodal_train_inputs {', '.join(unknown)}, which no model takes")
    grids = inputs[GRIDS].tolist() if GRIDS in inputs else []
    try:
        place_images(torch.tensor(tokens), [len(tokens)], grids, images.token, images.merge)
    except ValueError as error:
        raise ValueError(f"{name_of(position)}: {error}") from error
    patches = sum(time * height * width for time, height, width in grids)
    if patches != (rows := len(inputs[PIXELS]) if PIXELS in inputs else 0):
        raise ValueError(f"{name_of(position)}: {rows} rows of {PIXELS}, but its images have {patches} patches")


def per_sample_columns(data: RolloutData) -> dict[str, Any]:
    """Return the columns that have one entry per sample of this rank (sequences, or tensors indexed by sample)."""
    n = num_samples(data)
    return {
        key: column
        for key, column in data.items()
        if key not in _NOT_PER_SAMPLE
        and (
            (isinstance(column, (list, tuple, RaggedTensor)) and len(column) == n)
            or (torch.is_tensor(column) and column.shape[:1] == (n,))
        )
    }


class LossBatch(dict[str, Any]):
    """A micro-batch: the dict of columns that losses read, with typed fields for the trainer's own use.

    Columns are sequences of one tensor per sample; for a custom loss they are lists.

    mtp_targets: what the MTP layers are trained on, and their losses after the forward pass.
    overwrite_logits: whether the loss may write the gradient over the logits, which the model does not read again.
    finite_samples: bool [samples], set by the loss: whether all values of a sample are finite.
    trainer_log_probs: set by the policy loss for the mismatch meter, one local tensor [n_local] per sample.
    kept_weight: set by the policy loss where an importance correction rejects tokens: what is left weighs together.
    """

    mtp_targets: MTPTargets | None = None
    overwrite_logits: bool = False
    finite_samples: Tensor | None = None
    trainer_log_probs: Sequence[Tensor] | None = None
    kept_weight: Tensor | None = None


def build_micro_batch(args: Args, data: RolloutData, indices: list[int]) -> LossBatch:
    """Return the batch of the samples ``indices``: per-sample columns, and the packed stream.

    ``tokens`` int64 [1, T_local] is the packed (and CP-sliced) stream, ``unconcat_tokens`` the samples' full token
    tensors, ``packed_seq_params`` Megatron's description of the packing, ``sample_positions`` the given ``indices``;
    every other key keeps its per-sample form.
    """
    batch = LossBatch((key, _select(column, indices)) for key, column in per_sample_columns(data).items())
    batch["sample_positions"] = list(indices)
    pack_tokens(batch, args.data_pad_size_multiplier)
    if args.loss_type == "custom_loss":
        as_lists(batch)
    return batch


def pack_tokens(batch: dict[str, Any], pad_multiplier: int) -> None:
    """Put the packed stream in the place of the ``tokens`` of ``batch``, which become ``unconcat_tokens``."""
    from megatron.core.packed_seq_params import PackedSeqParams

    cp, tp = context_parallel(), tensor_parallel()
    packed = pack(
        batch["tokens"],
        batch["response_lengths"],
        cp_size=cp.size,
        cp_rank=cp.rank,
        tp_size=tp.size,
        pad_multiplier=pad_multiplier,
    )
    batch["unconcat_tokens"] = batch["tokens"]
    batch["tokens"] = packed.tokens
    batch["packed_seq_params"] = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packed.cu_seqlens,
        cu_seqlens_kv=packed.cu_seqlens,
        max_seqlen_q=packed.max_seqlen,
        max_seqlen_kv=packed.max_seqlen,
    )


def may_overwrite_logits(args: Args, batch: dict[str, Any]) -> bool:
    """Return whether slime's losses may overwrite the logits of ``batch``: a user's loss may still read them."""
    return isinstance(batch, LossBatch) and batch.overwrite_logits and args.loss_type != "custom_loss"


def rows_of_batch(batch: dict[str, Any], *, sequence_parallel: bool) -> Tensor:
    """Return which token of ``batch`` every row of this rank's activations holds: int64 [rows], -1 for padding.

    Tokens are counted through all samples, in order. Under sequence parallelism a tensor-parallel rank has a part of
    the rows.
    """
    cp, tp = context_parallel(), tensor_parallel()
    rows = rows_of_samples(batch["total_lengths"], batch["tokens"].size(-1), cp_rank=cp.rank, cp_size=cp.size)
    return rows.chunk(tp.size)[tp.rank] if sequence_parallel and tp.size > 1 else rows


def _select(column: RaggedTensor | Tensor | Sequence[Any], indices: list[int]) -> Any:
    if isinstance(column, RaggedTensor):
        return column.take(indices)
    if torch.is_tensor(column):
        return column[indices]
    return [column[i] for i in indices]


def model_inputs(batch: dict[str, Any], *, pixels: bool = True, distinct: bool = False) -> dict[str, Any]:
    """Return the keyword arguments of the model's forward for ``batch``, those for images without ``pixels``.

    With ``distinct`` the pixels of equal images are there once.
    """
    inputs: dict[str, Any] = {
        "input_ids": batch["tokens"],
        "position_ids": None,
        "attention_mask": None,
        "labels": None,
        "packed_seq_params": batch["packed_seq_params"],
    }
    given: dict[str, list[Any]] = {}
    for sample in batch.get("multimodal_train_inputs") or []:
        for name, value in (sample or {}).items():
            if pixels or name != PIXELS:
                given.setdefault(name, []).append(value)
    if distinct and PIXELS in given:
        images = _each_image(given[PIXELS], given[GRIDS])
        firsts, uses = distinct_images(images, torch.cat(given[GRIDS]).tolist())
        given[PIXELS], inputs[USES] = [images[first] for first in firsts], torch.tensor(uses)
    for name, values in given.items():
        tensors = [value.to(batch["tokens"].device) for value in values if torch.is_tensor(value)]
        inputs[name] = torch.cat(tensors) if len(tensors) == len(values) else values[-1]
    return inputs


def _each_image(pixels: Sequence[Tensor], grids: Sequence[Tensor]) -> list[Tensor]:
    """Return the pixels of every image of samples, views of the samples' ``pixels``."""
    parts = zip(pixels, grids, strict=True)
    return [image for rows, shapes in parts for image in rows.split(shapes.prod(1).tolist())]


def tower_flops(args: Args, data: RolloutData) -> float:
    """Return the FLOPs of one forward pass of the vision tower over this DP rank's images, 0 without a tower.

    Equal images of a micro-batch are computed once.
    """
    column = data.get("multimodal_train_inputs") or []
    tower = model_shape(args).tower if any(column) else None
    if tower is None:
        return 0.0
    total = 0.0
    for indices in data["micro_batch_indices"]:
        given = [column[i] for i in indices if column[i]]
        grids = [grid for inputs in given for grid in inputs[GRIDS].tolist()]
        images = _each_image([inputs[PIXELS] for inputs in given], [inputs[GRIDS] for inputs in given])
        total += tower.forward_flops(grids[first] for first in distinct_images(images, grids)[0])
    return total


def steps_of(data: RolloutData) -> list[list[list[int]]]:
    """Return, per optimizer step, the micro-batches of this rank as lists of local sample positions."""
    steps, start = [], 0
    for count in data["num_microbatches"]:
        steps.append([list(map(int, indices)) for indices in data["micro_batch_indices"][start : start + count]])
        start += count
    return steps


def micro_batch_iterators(
    args: Args, data: RolloutData, micro_batches: list[list[int]], num_chunks: int
) -> list[Iterator[LossBatch]]:
    """Return one iterator over ``micro_batches`` per model chunk (virtual pipeline stages each pull every one)."""
    return [(build_micro_batch(args, data, indices) for indices in micro_batches) for _ in range(num_chunks)]


_ITERATOR = ("DataIterator", "get_batch", "get_data_iterator")
__getattr__ = moved(
    __name__,
    {name: f"slime.backends.megatron_utils.train.data_iterator.{name}" for name in _ITERATOR},
    for_good=_ITERATOR,
)
