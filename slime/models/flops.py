"""Forward FLOPs of a transformer per sequence: the weight by which work is balanced and throughput reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from slime.models.shape import LayerKind, ModelShape, model_shape

if TYPE_CHECKING:
    from slime.arguments.args import Args


@dataclass(frozen=True)
class FlopsModel:
    """Forward FLOPs of a sequence of L tokens are ``linear * L + quadratic * L^2`` (causal attention counts half).

    Those of layers whose queries see the last W tokens are ``c * (2 L m - m^2)`` with ``m = min(L, W)``, for every
    ``(W, c)`` of ``windows``: below the window the same as ``c * L^2``.
    """

    linear: float
    quadratic: float
    windows: tuple[tuple[int, float], ...] = ()

    def forward(self, lengths: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return float64 [n], forward FLOPs of each sequence."""
        tokens = np.asarray(lengths, dtype=np.float64)
        flops = self.linear * tokens + self.quadratic * tokens * tokens
        for window, coefficient in self.windows:
            seen = np.minimum(tokens, window)
            flops += coefficient * (2 * tokens - seen) * seen
        return flops


def flops_model(args: Args, *, mtp: bool = False) -> FlopsModel:
    """Return the FLOPs of the model that ``args`` describe; with ``mtp`` those of its MTP layers too.

    Raises ValueError when the model is not described.
    """
    return flops_of_shape(model_shape(args), mtp=mtp)


def forward_flops(args: Args, lengths: Sequence[int], *, mtp: bool = False) -> float:
    """Return the FLOPs of one forward pass over these sequences, on all ranks together."""
    return float(flops_model(args, mtp=mtp).forward(lengths).sum())


def flops_of_shape(shape: ModelShape, *, mtp: bool = False) -> FlopsModel:
    """Return the FLOPs of matrix products, two per multiply-add, as ``torch.utils.flop_counter`` counts them.

    Counted per layer: the projections, scores and values of attention (or the gated delta rule), and the MLP or the
    router, the ``top_k`` routed experts of a token and the shared expert; once: the output layer over the padded
    vocabulary. A causal mask leaves half of the scores. Each MTP layer (DeepSeek-V3, https://arxiv.org/abs/2412.19437,
    section 2.2) has the projection of hidden state and embedding, a layer with softmax attention, and the output layer.

    Not counted: what is not a matrix product (norms, activations, rotary embeddings, softmax, the look-up of
    embeddings), the indexer of sparse attention, and vision towers, whose FLOPs depend on images
    (``slime.models.tower``).
    """
    layers = list(shape.kinds)
    head = 2 * shape.hidden * shape.vocab
    linear = head
    if mtp and shape.mtp:
        layers += [LayerKind(linear=False, moe=shape.kinds[-1].moe)] * shape.mtp
        linear += shape.mtp * (2 * 2 * shape.hidden * shape.hidden + head)
    for kind in layers:
        linear += _linear_attention(shape) if kind.linear else _attention_projections(shape, kind)
        linear += _experts(shape) if kind.moe else _mlp(shape, shape.hidden, shape.ffn)
    by_window: dict[int | None, int] = {None: 0}
    for kind in layers:
        if kind.linear:
            continue
        dim = shape.heads_of(kind)[1]
        d_qk, d_v = (shape.latent.query_dim, shape.latent.v_dim) if shape.latent else (dim, dim)
        window = kind.attention.window if kind.attention else None
        # Scores and values are 2 * L^2 * d each per head, of which a causal mask needs half.
        by_window[window] = by_window.get(window, 0) + shape.heads * (d_qk + d_v)
    quadratic = by_window.pop(None)
    windows = tuple((window, float(flops)) for window, flops in by_window.items() if window is not None)
    return FlopsModel(float(linear), float(quadratic), windows)


def _attention_projections(shape: ModelShape, kind: LayerKind) -> int:
    """Query (with its output gate), key, value and output; with MLA through the low ranks (arXiv 2405.04434, 2.1)."""
    hidden, heads, latent = shape.hidden, shape.heads, shape.latent
    if latent is None:
        groups, dim, projections = shape.heads_of(kind)
        query = heads * dim * (2 if shape.output_gate else 1)
        return 2 * hidden * (query + projections * groups * dim + heads * dim)
    if latent.q_rank:
        query = latent.q_rank * (hidden + heads * latent.query_dim)
    else:
        query = hidden * heads * latent.query_dim
    down = hidden * (latent.kv_rank + latent.rope_dim)
    up = latent.kv_rank * heads * (latent.qk_dim + latent.v_dim)
    return 2 * (query + down + up + heads * latent.v_dim * hidden)


def _linear_attention(shape: ModelShape) -> int:
    """Gated delta net (https://arxiv.org/abs/2412.06464) per token, counted as in Megatron-LM's ``training.py``.

    Projections of queries, keys, values, output gates and the two numbers per head; the causal convolution; the
    recurrent delta rule with four products of the state's size [key_dim, value_dim] per head. A chunked kernel does
    more work, which depends on the size of its chunks.
    """
    net = shape.linear
    assert net is not None
    projected = 2 * net.keys + 2 * net.values + 2 * net.value_heads
    convolution = net.kernel * (2 * net.keys + net.values)
    delta_rule = 4 * net.value_heads * net.key_dim * net.value_dim
    return 2 * (shape.hidden * projected + convolution + delta_rule + net.values * shape.hidden)


def _mlp(shape: ModelShape, hidden: int, width: int) -> int:
    return 2 * (3 if shape.gated else 2) * hidden * width


def _experts(shape: ModelShape) -> int:
    experts = shape.experts
    assert experts is not None
    flops = 2 * shape.hidden * experts.number  # the router
    flops += experts.top_k * _mlp(shape, experts.latent or shape.hidden, experts.ffn)
    if experts.latent:
        flops += 2 * 2 * shape.hidden * experts.latent  # into the latent space and back
    if experts.shared:
        flops += _mlp(shape, shape.hidden, experts.shared) + 2 * shape.hidden * experts.shared_gate
    return flops
