"""Plain torch forms of the kernels of gated delta nets: causal convolution, and the delta rule with a decaying state.

States are kept in pools and written in place at the slots of the requests: the last inputs of a convolution
``[slots, channels, width - 1]``, and the memory of the delta rule ``[slots, value heads, value dim, key dim]``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

CHUNK = 64
"""Tokens of a sequence that are computed at once."""


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    activation: str | None,
    conv_states: torch.Tensor,
    has_initial_state: torch.Tensor,
    cache_indices: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: object = None,
) -> torch.Tensor:
    """Convolve the tokens of several sequences, ``x``: [channels, tokens], weight: [channels, width]."""
    output = torch.empty_like(x)
    width = weight.shape[1]
    for i, (slot, start, end) in enumerate(_sequences(cache_indices, query_start_loc)):
        before = conv_states[slot].to(x.dtype)
        seen = torch.cat([before if has_initial_state[i] else torch.zeros_like(before), x[:, start:end]], dim=1)
        convolved = F.conv1d(seen[None], weight[:, None], bias, groups=len(weight))[0]
        output[:, start:end] = _activate(convolved, activation)
        conv_states[slot] = seen[:, 1 - width :].to(conv_states.dtype)
    return output


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    conv_state_indices: torch.Tensor,
) -> torch.Tensor:
    """Convolve one token of every sequence, ``x``: [sequences, channels]."""
    seen = torch.cat([conv_states[conv_state_indices].to(x.dtype), x[:, :, None]], dim=2)
    conv_states[conv_state_indices] = seen[:, :, 1:].to(conv_states.dtype)
    convolved = (seen * weight).sum(dim=2)
    return _activate(convolved if bias is None else convolved + bias, activation)


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logarithm of every head's decay, and how much of its value a token writes: [1, tokens, heads] each."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: torch.Tensor,
) -> tuple[torch.Tensor, None, None]:
    """Apply the rule to the tokens of several sequences; q, k, v, and the output: [1, tokens, heads, dim]."""
    assert use_qk_l2norm_in_kernel and not head_first
    query, key = _normalized(q[0], k[0], v.shape[2])
    query, key, value, decay, share = (x.transpose(0, 1) for x in (query, key, v[0].float(), g[0], beta[0]))
    output = torch.empty_like(v)
    for slot, start, end in _sequences(initial_state_indices, cu_seqlens):
        state = initial_state[slot].float()
        for first in range(start, end, CHUNK):
            t = slice(first, min(first + CHUNK, end))
            attended, state = _chunk(query[:, t], key[:, t], value[:, t], decay[:, t], share[:, t], state)
            output[0, t] = attended.transpose(0, 1).to(v.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return output, None, None


def _chunk(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a chunk and the state after it; q, k, v: [heads, tokens, dim], g, beta: [heads, tokens].

    A token writes what its value differs from what its key finds, in the state and in what the chunk has written
    before: a triangular system.
    """
    decay = g.double().cumsum(dim=1)  # of which differences are taken: in fp32 they would be the largest error
    since = decay[:, :, None] - decay[:, None]
    since = since.masked_fill(since.new_ones(since.shape[1:]).triu(1).bool(), -torch.inf).exp().float()
    from_state = decay.exp().float()[:, :, None]
    system = (beta[:, :, None] * since * (k @ k.mT)).tril(-1)
    found = beta[:, :, None] * (v - from_state * (k @ state.mT))
    written = torch.linalg.solve_triangular(system, found, upper=False, unitriangular=True)
    output = from_state * (q @ state.mT) + (since * (q @ k.mT)) @ written
    return output, from_state[:, -1:] * state + (since[:, -1, :, None] * written).mT @ k


def fused_sigmoid_gating_delta_rule_update_cpu(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    softplus_beta: float,
    softplus_threshold: float,
) -> torch.Tensor:
    """Apply the rule to one token of every sequence; q, k, v, and the output: [1, sequences, heads, dim]."""
    assert use_qk_l2norm_in_kernel and softplus_beta == 1.0
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    query, key = (x[..., None] for x in _normalized(q[0], k[0], v.shape[2]))
    state = initial_state_source[initial_state_indices].float() * g[0].exp()[..., None, None]
    written = beta[0, ..., None, None] * (v[0].float()[..., None] - state @ key)
    state += written @ key.mT
    initial_state_source[initial_state_indices] = state.to(initial_state_source.dtype)
    return (state @ query)[None, ..., 0].to(v.dtype)


def _normalized(q: torch.Tensor, k: torch.Tensor, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries (scaled) and keys of length 1, repeated for the value heads."""
    q, k = (x.float() * (x.float().square().sum(dim=-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    repeats = heads // k.shape[1]
    return (q * q.shape[-1] ** -0.5).repeat_interleave(repeats, dim=1), k.repeat_interleave(repeats, dim=1)


def _sequences(slots: torch.Tensor, starts: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return slot, first token and the one after the last of every sequence that has tokens."""
    bounds = starts.tolist()
    return [(slot, a, b) for slot, a, b in zip(slots.tolist(), bounds[:-1], bounds[1:], strict=False) if b > a]


def _activate(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    return F.silu(x) if activation in ("silu", "swish") else x
