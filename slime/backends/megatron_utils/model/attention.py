"""Core attention that needs neither TransformerEngine nor apex, on any device. Import after ``import_megatron()``.

Packed sequences (thd), grouped queries and context parallelism over torch's scaled_dot_product_attention, or over a
variable-length flash kernel (flash-attn's where it is installed, else torch's) where it takes the tensors. Under
context parallelism each sequence is laid out zig-zag: of its ``2 * cp`` equal chunks rank ``r`` holds chunk ``r`` and
chunk ``2 * cp - 1 - r``; K and V are gathered over the ranks and each of the two local query chunks attends to its
prefix. At the end: latent attention whose gradients are right under tensor parallelism.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn

from slime.arguments.command_line import flags_where
from slime.utils import accelerator

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from slime.utils.autograd import Context

    class _ProductsContext(Context):
        scale: float
        sizes: tuple[int, int, int]

    class _GroupContext(Context):
        group: torch.distributed.ProcessGroup


try:  # only CUDA machines have it, and it is optional there
    from flash_attn import flash_attn_varlen_func
except ImportError:
    flash_attn_varlen_func = None


FLASH_MAX_HEAD_DIM = 256
VARLEN_SHARES_HEADS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.11 has no such parameter
SHORT_SEQUENCE, MANY_TOKENS = 128, 256
"""Up to which length, and from how many tokens of one length on, a CPU takes matrix products instead of SDPA."""


@dataclass(frozen=True)
class Segment:
    """Queries that attend to keys, in ``b`` runs alike: ``q [b, sq, n, d]``, ``k [b, sk, g, d]``, ``v [b, sk, g, dv]``.

    When causal, the queries are the last ``sq`` of the ``sk`` positions.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def sdpa_segment(segment: Segment, *, causal: bool, scale: float, dropout_p: float = 0.0) -> torch.Tensor:
    """Return the attention output ``[b * sq, n, dv]`` of one segment through torch's scaled_dot_product_attention.

    Many short sequences on a CPU are left to matrix products.
    """
    if causal and dropout_p == 0.0 and _products_take(segment):
        return _CausalProducts.apply(segment.q, segment.k, segment.v, scale)
    q, k, v = (x.transpose(1, 2) for x in (segment.q, segment.k, segment.v))
    queries, keys = q.size(2), k.size(2)
    mask = None
    if causal and queries != keys:  # torch's is_causal is aligned to the upper left
        mask = causal_lower_right(queries, keys)  # made to a tensor only where no fused kernel takes the inputs
        causal = False
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.size(1) != k.size(1), dropout_p=dropout_p
    )
    return out.transpose(1, 2).flatten(0, 1)


def _products_take(segment: Segment) -> bool:
    q, length = segment.q, segment.q.size(1)
    return (
        q.is_cpu
        and q.dtype in (torch.float32, torch.float64)
        and length == segment.k.size(1) <= SHORT_SEQUENCE
        and q.size(0) * length >= MANY_TOKENS
    )


class _CausalProducts(torch.autograd.Function):
    """Causal attention of ``b`` sequences of one length ``s`` as batched products; arguments as in ``Segment``.

    The queries of a group of heads, ``n / g`` times ``s`` rows, are one matrix against the keys that they share. All
    probabilities are kept, ``n * s`` numbers per token. torch's kernel for CPUs keeps none and takes as long on one
    thread, but on short sequences it hardly gains from a second one.
    """

    @staticmethod
    def forward(ctx: _ProductsContext, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        b, s, n, _ = q.shape
        g = k.size(2)
        q, k, v = _by_group(q, g), _by_group(k, g), _by_group(v, g)
        unseen = q.new_full((s, s), -torch.inf).triu_(1).repeat(n // g, 1)
        scores = torch.baddbmm(unseen, q, k.transpose(1, 2), alpha=scale)
        p = torch.softmax(scores, -1)
        ctx.save_for_backward(q, k, v, p)
        ctx.scale, ctx.sizes = scale, (b, s, n)
        return _by_token(torch.bmm(p, v), b, s).reshape(b * s, n, v.size(-1))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: _ProductsContext, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        b, s, n = ctx.sizes
        grad = _by_group(grad.reshape(b, s, n, v.size(-1)), len(k) // b)
        grad_v = torch.bmm(p.transpose(1, 2), grad)
        grad_p = torch.bmm(grad, v.transpose(1, 2))
        grad_scores = torch.ops.aten._softmax_backward_data(grad_p, p, -1, p.dtype)
        # without the first summand (beta=0) products that are scaled on the way
        grad_q = torch.baddbmm(q, grad_scores, k, beta=0, alpha=ctx.scale)
        grad_k = torch.baddbmm(k, grad_scores.transpose(1, 2), q, beta=0, alpha=ctx.scale)
        return _by_token(grad_q, b, s), _by_token(grad_k, b, s), _by_token(grad_v, b, s), None


def _by_group(x: torch.Tensor, g: int) -> torch.Tensor:
    """``[b, s, n, d]`` -> ``[b * g, n / g * s, d]``: the heads that share keys one below the other."""
    b, s, n, d = x.shape
    return x.view(b, s, g, n // g, d).permute(0, 2, 3, 1, 4).reshape(b * g, n // g * s, d)


def _by_token(x: torch.Tensor, b: int, s: int) -> torch.Tensor:
    """The inverse of ``_by_group``."""
    heads = x.view(b, -1, x.size(1) // s, s, x.size(-1))
    return heads.permute(0, 3, 1, 2, 4).flatten(2, 3)


def flash_takes(segments: Sequence[Segment], *, dropout_p: float = 0.0) -> bool:
    """Return whether flash-attn, or torch's own copy of it, has a kernel for these tensors."""
    q, v = segments[0].q, segments[0].v
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and q.size(-1) == v.size(-1) <= FLASH_MAX_HEAD_DIM
        and (
            flash_attn_varlen_func is not None
            or (dropout_p == 0.0 and q.size(-1) % 8 == 0 and torch.cuda.get_device_capability(q.device) >= (8, 0))
        )
    )


@functools.lru_cache(maxsize=16)  # every layer of a micro-batch asks for the same, and the copy waits for the device
def _cumulative(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return F.pad(torch.tensor(lengths, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32), (1, 0))


def with_sinks(segment: Segment, sinks: torch.Tensor, scale: float) -> Segment:
    """Return the segment with one more key in front, of the value 0 and the score ``sinks [n]`` for every query.

    A causal query sees it as it sees any key before its own. Queries and keys get 8 more channels (kernels want whole
    multiples), of which one is used: that of a query holds its head's sink, that of a key 1 for the new one, else 0.
    """
    scores = F.pad((sinks / scale)[:, None], (0, 7)).to(segment.q.dtype).expand(*segment.q.shape[:-1], 8)
    keys = F.pad(segment.k, (0, 8, 0, 0, 1, 0))
    keys[:, 0, :, segment.k.size(-1)] = 1
    return Segment(torch.cat([segment.q, scores], -1), keys, F.pad(segment.v, (0, 0, 0, 0, 1, 0)))


def windowed_segment(
    segment: Segment, window: int, *, scale: float, dropout_p: float = 0.0, sink: bool = False
) -> torch.Tensor:
    """Return the causal attention ``[b * sq, n, dv]`` of queries that see the last ``window`` keys, theirs included.

    Taken in blocks of queries, each with the keys that any of them sees: work and masks grow with ``sq`` times the
    window, not with ``sq`` times ``sk``. ``sink``: every query sees the first key, beside those of the window.
    """
    queries, keys = segment.q.size(1), segment.k.size(1) - sink
    if keys <= window:
        return sdpa_segment(segment, causal=True, scale=scale, dropout_p=dropout_p)
    before, blocks = keys - queries, []
    for start in range(0, queries, max(window, SHORT_SEQUENCE)):
        end = min(start + max(window, SHORT_SEQUENCE), queries)
        first = max(0, before + start - window + 1)
        seen = slice(first, before + end)
        positions = torch.arange(first, before + end, device=segment.q.device)
        distance = positions[before + start - first :, None] - positions
        k, v = segment.k[:, seen], segment.v[:, seen]
        mask = (distance >= 0) & (distance < window)
        if sink:
            k, v = (torch.cat([x[:, :1], x[:, 1:][:, seen]], 1) for x in (segment.k, segment.v))
            mask = F.pad(mask, (1, 0), value=True)
        q, k, v = (x.transpose(1, 2) for x in (segment.q[:, start:end], k, v))
        blocks.append(
            F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                scale=scale,
                enable_gqa=q.size(1) != k.size(1),
                dropout_p=dropout_p,
            )
        )
    return torch.cat(blocks, 2).transpose(1, 2).flatten(0, 1)


def attend(
    segments: Sequence[Segment],
    *,
    causal: bool,
    scale: float,
    dropout_p: float = 0.0,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the outputs of all segments, one after the other: ``[sum(b * sq), n, dv]``.

    ``window``: how many keys a query sees at most, the last ones, its own included; of causal attention. ``sinks
    [n]``: a head's share of the softmax beside the keys', ``exp(sink)``, which adds nothing to the output.
    """
    sink = sinks is not None
    if sinks is not None:
        segments = [with_sinks(segment, sinks, scale) for segment in segments]
    if sink or not flash_takes(segments, dropout_p=dropout_p):
        if window is not None:
            return _joined([windowed_segment(s, window, scale=scale, dropout_p=dropout_p, sink=sink) for s in segments])
        return _joined([sdpa_segment(s, causal=causal, scale=scale, dropout_p=dropout_p) for s in segments])
    left = -1 if window is None else window - 1  # kernels count the keys before a query's own
    q_lengths, k_lengths = (tuple(len(run) for s in segments for run in getattr(s, name)) for name in "qk")
    q, k, v = (_joined([getattr(s, name).flatten(0, 1) for s in segments]) for name in "qkv")
    sizes = (_cumulative(q_lengths, q.device), _cumulative(k_lengths, q.device), max(q_lengths), max(k_lengths))
    if flash_attn_varlen_func is None:
        # causal, aligned to the lower right
        options: dict[str, Any] = {"scale": scale, "window_size": (left, 0 if causal else -1)}
        if VARLEN_SHARES_HEADS:
            options["enable_gqa"] = q.size(1) != k.size(1)
        else:
            k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        output = varlen_attn(q, k, v, *sizes, **options)
        return cast("torch.Tensor", output)  # a tuple only with return_aux
    return flash_attn_varlen_func(
        q,
        k,
        v,
        *sizes,
        dropout_p=dropout_p,
        softmax_scale=scale,
        causal=causal,  # aligned to the lower right, as Segment wants it
        window_size=(left, -1),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def undo_zigzag(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one sequence in its true order from the parts that ranks ``0 .. cp-1`` hold of it."""
    halves = [part.chunk(2) for part in parts]
    return torch.cat([first for first, _ in halves] + [second for _, second in reversed(halves)])


def cp_segments(
    q: torch.Tensor, k_parts: Sequence[torch.Tensor], v_parts: Sequence[torch.Tensor], cp_rank: int, *, causal: bool
) -> list[Segment]:
    """Return what this rank computes of one sequence: its two query chunks, each with the keys it sees.

    ``q [2c, n, d]`` is the local part; ``k_parts``, ``v_parts`` hold the parts of all ranks in rank order.
    """
    cp_size, chunk = len(k_parts), q.size(0) // 2
    q, k, v = (x.unsqueeze(0) for x in (q, undo_zigzag(k_parts), undo_zigzag(v_parts)))
    if not causal:
        return [Segment(q, k, v)]
    first, second = (cp_rank + 1) * chunk, (2 * cp_size - cp_rank) * chunk
    return [Segment(q[:, :chunk], k[:, :first], v[:, :first]), Segment(q[:, chunk:], k[:, :second], v[:, :second])]


def packed_segments(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Sequence[int]
) -> list[Segment]:
    """Return the segments of sequences that this rank holds whole; neighbors of one length are one, without a copy."""
    runs = [(len(list(same)), length) for length, same in itertools.groupby(lengths) if length]
    sizes = [count * length for count, length in runs]
    # The gradient of a split is a copy, which one that takes all would make for nothing.
    split = [[x] if len(runs) == 1 else x.split(sizes) for x in (query, key, value)]
    return [Segment(*(x.unflatten(0, run) for x in parts)) for run, *parts in zip(runs, *split, strict=True)]


def sequence_lengths(packed_seq_params: PackedSeqParams) -> list[int]:
    """Return the padded global length of every packed sequence.

    Kept with the parameters: reading them from the device once per micro-batch, not in every layer.
    """
    known = getattr(packed_seq_params, "_sequence_lengths", None)
    if known is not None:
        return known
    padded = packed_seq_params.cu_seqlens_q_padded
    cu_seqlens = (padded if padded is not None else packed_seq_params.cu_seqlens_q).tolist()
    packed_seq_params._sequence_lengths = [end - start for start, end in itertools.pairwise(cu_seqlens)]
    return packed_seq_params._sequence_lengths


class TorchCoreAttention(MegatronModule):
    """Drop-in for megatron's ``DotProductAttention``; see the module's docstring.

    With ``--window-size`` a query of the layers that ``--window-attn-skip-freq`` names sees only the last tokens. With
    ``--softmax-type`` the softmax has one entry more, of a score that is 0 or a parameter of the head (a sink), which
    no kernel of flash takes. Raises ValueError at construction for options it has no implementation of
    (attention-logit logging, windows without a causal mask), naming the flag.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        flags = flags_where(lambda traits: traits.needs_te)
        if refused := [flag.option for flag in flags if getattr(config, flag.dest) != flag.default]:
            raise ValueError(
                f"attention without TransformerEngine does not support {', '.join(refused)} (layer "
                f"{layer_number}): leave it out, or install transformer-engine on a CUDA machine."
            )
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = pg_collection.cp
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        self.dropout_p = config.attention_dropout if attention_dropout is None else attention_dropout
        self.attn_mask_type = attn_mask_type
        self.window: int | None = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
            left, right = config.window_size
            if right > 0 or attn_mask_type is AttnMaskType.no_mask:
                raise ValueError(
                    f"--window-size {left},{right} (layer {layer_number}): attention without TransformerEngine takes "
                    "windows of tokens before the current one, of causal attention: give 0 as the second number"
                )
            self.window = left + 1 if left >= 0 else None
        self.softmax_offset: torch.Tensor | None
        self._add_sinks(pg_collection)

    def _add_sinks(self, groups: ProcessGroupCollection) -> None:
        """Make ``softmax_offset``, ``[heads of this rank]`` or None; its name and keys are those of Megatron's own."""
        config, self.tp_group = self.config, groups.tp
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        device = "cpu" if config.use_cpu_initialization else accelerator.current_device()
        zeros = torch.zeros(config.num_attention_heads // groups.tp.size(), dtype=config.params_dtype, device=device)
        if config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", zeros, persistent=False)
            return
        self.softmax_offset = torch.nn.Parameter(zeros)
        set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork():
                config.init_method(self.softmax_offset)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        """Return the sinks, where there are any, cut over the tensor-parallel ranks."""
        if not isinstance(self.softmax_offset, torch.nn.Parameter):
            state: Any = super().sharded_state_dict(prefix, sharded_offsets, metadata)
            return state
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """Return the context: ``[t, 1, n*dv]`` for thd input ``[t, n, d]``, ``[s, b, n*dv]`` for sbhd ``[s, b, n, d]``.

        K and V have their own (smaller) head count. ``packed_seq_params.cu_seqlens_q[_padded]`` are global: with
        context parallelism each rank holds ``1 / cp`` of every sequence. ``attention_mask`` is not read: the mask
        follows from the mask type and the packing.
        """
        causal = self._is_causal(attn_mask_type or self.attn_mask_type, attention_bias)
        batch = None
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            lengths = sequence_lengths(packed_seq_params)
        else:
            length, batch = query.shape[:2]
            lengths = [length * self.cp_group.size()] * batch
            query, key, value = (x.transpose(0, 1).reshape(batch * length, *x.shape[2:]) for x in (query, key, value))
        segments = self._segments(query, key, value, lengths, causal)
        dropout_p = self.dropout_p if self.training else 0.0
        options: dict[str, Any] = {"window": self.window, "sinks": self.softmax_offset}
        with self._dropout_generator(dropout_p):
            out = attend(segments, causal=causal, scale=self.scale, dropout_p=dropout_p, **options)
        if batch is None:
            return out.reshape(out.size(0), 1, -1)
        return out.reshape(batch, -1, out.size(1) * out.size(2)).transpose(0, 1).contiguous()

    def _is_causal(self, mask_type: AttnMaskType, attention_bias: torch.Tensor | None) -> bool:
        if attention_bias is not None or mask_type not in (
            AttnMaskType.causal,
            AttnMaskType.padding_causal,
            AttnMaskType.no_mask,
        ):
            raise ValueError(
                f"attention without TransformerEngine takes causal and unmasked attention without a bias, got mask "
                f"type {mask_type} and attention_bias {'set' if attention_bias is not None else 'None'}"
            )
        return mask_type is not AttnMaskType.no_mask

    def _segments(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], causal: bool
    ) -> list[Segment]:
        cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
        divisor = 2 * cp_size if cp_size > 1 else 1
        if sum(lengths) != query.size(0) * cp_size or any(length % divisor for length in lengths):
            raise ValueError(
                f"packed sequences of {lengths} tokens do not fit {query.size(0)} local tokens x context-parallel size "
                f"{cp_size}: their sum must be {query.size(0) * cp_size} and each a multiple of {divisor}"
            )
        if cp_size == 1:
            return packed_segments(query, key, value, lengths)
        local = [length // cp_size for length in lengths]
        queries = query.split(local)
        # One gather for both; its backward sums the gradients of all ranks' queries into the owner of the key.
        both = gather_from_sequence_parallel_region(
            torch.cat([key, value], -1).contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
        )
        keys, values = both.split([key.size(-1), value.size(-1)], dim=-1)
        k_ranks = [x.split(local) for x in keys.chunk(cp_size)]
        v_ranks = [x.split(local) for x in values.chunk(cp_size)]
        segments: list[Segment] = []
        for i, q in enumerate(queries):
            if q.size(0):
                segments += cp_segments(q, [k[i] for k in k_ranks], [v[i] for v in v_ranks], cp_rank, causal=causal)
        return segments

    def _dropout_generator(self, dropout_p: float) -> contextlib.AbstractContextManager[Any]:
        # Heads differ between tensor-parallel ranks, so must their dropout; with sequence parallelism megatron has
        # entered the tensor-parallel generator already.
        if dropout_p > 0.0 and not self.config.sequence_parallel:
            return get_cuda_rng_tracker().fork()
        return contextlib.nullcontext()


class DuplicatedLinear(torch.nn.Module):
    """A linear layer without bias that every tensor-parallel rank holds whole, as TransformerEngine's is here."""

    def __init__(self, config: MLATransformerConfig, input_size: int, output_size: int) -> None:
        super().__init__()
        device = "cpu" if config.use_cpu_initialization else accelerator.current_device()
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype, device=device))
        # Its gradient is that of the rank's part of the sequence, to be summed over the tensor-parallel ranks.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010  (unknown to torch)
        if config.perform_initialization:
            with get_cuda_rng_tracker().fork("data-parallel-rng"):  # the same numbers on all tensor-parallel ranks
                config.init_method(self.weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return ``x @ weight.T``, and no bias."""
        return F.linear(x, self.weight), None


class SummedGradient(torch.autograd.Function):
    """The identity, whose gradient is summed over a group.

    Megatron's ``copy_to_tensor_model_parallel_region`` leaves a gradient that is not contiguous as it is.
    """

    @staticmethod
    def forward(ctx: _GroupContext, x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        """Return ``x``."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: _GroupContext, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the sum over the group."""
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


class LatentSelfAttention(MLASelfAttention):
    """Megatron's latent attention, without three faults of it under tensor parallelism.

    The rotated part of a key is one for all heads, so its gradient is the sum over all ranks' heads: without sequence
    parallelism, and with column-parallel down-projections always, megatron leaves the sum out. Column-parallel
    down-projections are what it takes without TransformerEngine; here they are duplicated. And the gradient of
    ``q_layernorm``, which each rank has whole, is taken for one to be summed over the ranks.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: MLASelfAttentionSubmodules,
        *args: object,
        duplicate: bool,
        **kwargs: object,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        if duplicate:
            rotated = config.qk_pos_emb_head_dim
            self.linear_kv_down_proj = DuplicatedLinear(config, config.hidden_size, config.kv_lora_rank + rotated)
            if config.q_lora_rank is not None:
                self.linear_q_down_proj = DuplicatedLinear(config, config.hidden_size, config.q_lora_rank)
        if config.sequence_parallel or self.tp_group.size() == 1:  # the gather of the sequence sums that gradient
            return
        self.linear_kv_down_proj.register_forward_hook(self._sum_rotated_gradient)
        for parameter in self.q_layernorm.parameters() if config.q_lora_rank is not None else ():
            parameter.average_gradients_across_tp_domain = True  # the mean of equal gradients changes nothing

    def _sum_rotated_gradient(
        self, module: torch.nn.Module, inputs: object, outputs: tuple[torch.Tensor, torch.Tensor | None]
    ) -> Any:
        combined, bias = outputs
        latent, rotated = combined.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        rotated = SummedGradient.apply(rotated, self.tp_group)
        return torch.cat([latent, rotated], dim=-1), bias


def fix_mla_tp_gradients(block: TransformerBlockSubmodules, *, duplicate: bool) -> Any:
    """Exchange megatron's latent attention for :class:`LatentSelfAttention` in the spec of a block, in place.

    ``duplicate``: whether the down-projections are to be duplicated (TransformerEngine's are).
    """
    for layer in {id(spec): spec for spec in block.layer_specs}.values():
        attention = layer.submodules.self_attention
        if attention.module is MLASelfAttention:
            attention.module = LatentSelfAttention
            attention.params = {**attention.params, "duplicate": duplicate}
    return block
