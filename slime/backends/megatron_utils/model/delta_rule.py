"""The gated delta rule (https://arxiv.org/abs/2412.06464) over packed sequences, and the convolution before it.

Per head, with the state ``S [dk, dv]`` = 0 at the start of a sequence:
``S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T`` and ``o_t = S_t^T q_t``.

It is computed in chunks of ``CHUNK`` tokens as in section 3.3 of the paper: what tokens of a chunk do to each other is
one triangular system, and the state passes from chunk to chunk. The first chunks of all sequences are one step, then
all second ones, so that a pack takes as many steps as its longest sequence has chunks.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

logger = logging.getLogger(__name__)

Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
CHUNK = 64
KERNELS = {"fla": ("fla.ops.gated_delta_rule", "flash-linear-attention"), "flashqla": ("flash_qla", "flash-qla")}
"""The values of ``--qwen-gdn-backend``: the module that has ``chunk_gated_delta_rule``, and its package."""


class Chunks(NamedTuple):
    """The places of the tokens of a pack among its chunks.

    ``tokens [chunks, CHUNK]``: the token in each place, any where ``empty [chunks, CHUNK]``; ``places [tokens]``: the
    place of each token in the flattened chunks; ``steps``: the number of chunks of each step, which decreases, and
    whose first ones follow those of the step before.
    """

    tokens: torch.Tensor
    empty: torch.Tensor
    places: torch.Tensor
    steps: list[int]


@functools.lru_cache(maxsize=16)  # every layer of a micro-batch asks for the same
def chunks_of(lengths: tuple[int, ...], device: torch.device, size: int = CHUNK) -> Chunks:
    """Return the chunks of sequences of these lengths, which lie one after the other."""
    starts = [0, *itertools.accumulate(lengths)]
    longest_first = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    steps, first, last = [], [], []
    for begin in range(0, max(lengths, default=0), size):
        active = [i for i in longest_first if lengths[i] > begin]
        steps.append(len(active))
        first += [starts[i] + begin for i in active]
        last += [starts[i + 1] for i in active]
    tokens = torch.tensor(first, dtype=torch.long)[:, None] + torch.arange(size)
    empty = tokens >= torch.tensor(last, dtype=torch.long)[:, None]
    places = torch.empty(starts[-1], dtype=torch.long)
    places[tokens[~empty]] = torch.arange(tokens.numel()).view_as(tokens)[~empty]
    return Chunks(tokens.masked_fill(empty, 0).to(device), empty.to(device), places.to(device), steps)


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """Return the outputs ``[t, n, r, dv]`` for ``q, k [t, n, dk]``, ``v [t, n, r, dv]`` and ``g, beta [t, n, r]``.

    ``r`` value heads share a query and a key, which are normalized here; the scale is ``dk ** -0.5``. ``g`` is the
    logarithm of the decay. Computed in fp32 (in fp64 where the arguments are), and returned in the dtype of ``v``.
    """
    chunks = chunks_of(tuple(lengths), q.device)
    if not chunks.steps:
        return v
    dtype = torch.promote_types(v.dtype, torch.float32)
    q, k = (unit_length(x.to(dtype))[chunks.tokens].transpose(1, 2).unsqueeze(2) for x in (q, k))  # [c, n, 1, s, dk]
    values = v.to(dtype)[chunks.tokens].movedim(1, 3)  # [c, n, r, s, dv]
    empty = chunks.empty[..., None, None]
    g, beta = (x.to(dtype)[chunks.tokens].masked_fill(empty, 0).movedim(1, 3) for x in (g, beta))  # [c, n, r, s]
    g = g.cumsum(-1)
    decay = (g[..., :, None] - g[..., None, :]).tril().exp().tril()
    within = (k @ k.transpose(-1, -2) * decay * beta[..., None]).tril(-1)
    both = torch.cat([values, k * g.exp()[..., None]], dim=-1) * beta[..., None]
    both = torch.linalg.solve_triangular(within, both, upper=False, unitriangular=True)
    solved, keys = both.split([v.size(-1), q.size(-1)], dim=-1)
    new, states = _states(solved, keys, k, g, chunks.steps)
    q = q * q.size(-1) ** -0.5
    out = (q @ k.transpose(-1, -2) * decay) @ new
    if states is not None:  # those of the second step and later
        out = torch.cat([out[: chunks.steps[0]], out[chunks.steps[0] :] + _read(q, g, states, chunks.steps[0])])
    return out.movedim(3, 1).flatten(0, 1)[chunks.places].to(v.dtype)


def _read(q: torch.Tensor, g: torch.Tensor, states: torch.Tensor, first: int) -> torch.Tensor:
    return (q[first:] * g[first:].exp()[..., None]) @ states


def _states(
    values: torch.Tensor, keys: torch.Tensor, k: torch.Tensor, g: torch.Tensor, steps: list[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what every chunk adds ``[c, n, r, s, dv]``, and the states ``[c, n, r, dk, dv]`` before later steps' ones.

    ``values`` and ``keys`` are the solutions of the chunks' triangular systems.
    """
    if len(steps) == 1:
        return values, None
    writes = (k * (g[..., -1:] - g).exp()[..., None]).transpose(-1, -2).split(steps)
    decays = g[..., -1].exp()[..., None, None].split(steps)
    new, states, state = [], [], None
    for i, (u, w) in enumerate(zip(values.split(steps), keys.split(steps), strict=True)):
        if state is not None:
            state = state[: steps[i]]
            states.append(state)
            u = u - w @ state
        new.append(u)
        if i + 1 < len(steps):
            left = steps[i + 1]
            written = writes[i][:left] @ u[:left]
            state = written if state is None else torch.addcmul(written, state[:left], decays[i][:left])
    return torch.cat(new), torch.cat(states)


@functools.lru_cache(maxsize=16)
def _positions(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([i for length in lengths for i in range(length)], dtype=torch.long, device=device)


@functools.lru_cache(maxsize=16)
def _ends(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(n for n in lengths if n)], device=device)


def unit_length(x: torch.Tensor) -> torch.Tensor:
    """Return ``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension, as the kernels for GPUs have it."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def by_kernel(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    lengths: list[int],
) -> torch.Tensor:
    """Return what :func:`gated_delta_rule` does, from a kernel of ``KERNELS``."""
    ends = _ends(tuple(lengths), q.device)
    q, k = (x.repeat_interleave(v.size(2), dim=1) for x in (q, k))
    arguments = {"q": q, "k": k, "v": v.flatten(1, 2), "g": g.flatten(1).float(), "beta": beta.flatten(1)}
    batch = {name: x[None].contiguous() for name, x in arguments.items()}
    out, _ = kernel(**batch, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)
    return out[0].view_as(v)


@functools.cache
def kernel_for(backend: str, device_type: str) -> Kernel | None:
    """Return the kernel of ``--qwen-gdn-backend``, or None where torch computes: off CUDA, and without fla's package.

    Raises ModuleNotFoundError on CUDA without the package of another backend.
    """
    if device_type != "cuda":
        return None
    module, package = KERNELS[backend]
    if importlib.util.find_spec(module.partition(".")[0]) is not None:
        kernel: Kernel = importlib.import_module(module).chunk_gated_delta_rule
        return kernel
    if backend != "fla":
        raise ModuleNotFoundError(f"--qwen-gdn-backend {backend} needs its package: pip install {package}")
    logger.warning("gated delta nets are computed by torch's operations; kernels are in the package %s", package)
    return None


def causal_convolution(x: torch.Tensor, weight: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return the convolution ``[t, channels]`` of each channel along every sequence of ``x [t, channels]``.

    ``weight`` is ``[channels, 1, width]``, its last column that of the token itself. Summed in fp32 or better.
    """
    width, dtype = weight.size(-1), x.dtype
    x, weight = (y.to(torch.promote_types(dtype, torch.float32)) for y in (x, weight))
    age = _positions(tuple(lengths), x.device)
    out = x * weight[:, 0, -1]
    for back in range(1, min(width, x.size(0) + 1)):
        earlier = F.pad(x, (0, 0, back, 0))[: x.size(0)].masked_fill((age < back)[:, None], 0)
        out = out + earlier * weight[:, 0, width - 1 - back]
    return out.to(dtype)
