"""Sampling on a CPU: one uniform number per row instead of one exponential per vocabulary entry.

The log-prob of the drawn token is computed from its probability alone, where SGLang takes the logarithm of the whole
matrix. For top-k, top-p and min-p SGLang's own function gets the largest probabilities, so that it need not sort all.
Seeded sampling and greedy decoding stay with SGLang.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from slime_engine_plugin.hook_points import require

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_SAMPLER = "sglang.srt.layers.sampler.Sampler"
_DRAW = "sglang.srt.layers.sampler.sampling_from_probs_torch"
_DRAW_FILTERED = "sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch"

BLOCK = 64
"""Neighbors whose probabilities are added up before they are accumulated: adding up is ten times faster."""
WORTH_BLOCKS = 1 << 16
"""Entries from which on blocks are faster."""
LARGEST = (256, 2048)
"""The number of the largest probabilities of a row that are tried before all are sorted."""
RETRY_AFTER = 16
"""Steps without another try, when that many were too few: distributions change slowly."""

_SKIP: Counter[int] = Counter()
"""Steps left without a try, by count."""
_WANTED: list[list[torch.Tensor]] = []
"""While the sampler runs and the log-prob of what it draws is wanted: where to leave the probabilities."""


def sample(original: Callable[..., torch.Tensor], probs: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Around ``sampling_from_probs_torch``: int32 [rows], drawn from ``probs`` [rows, vocabulary] by inversion.

    The distribution is that of the probabilities up to float32 rounding of their sum. With a seed per request SGLang's
    own function draws. Raises RuntimeError for rows that are no distribution, as ``torch.multinomial`` does.
    """
    if args or any(value is not None for name, value in kwargs.items() if name == "sampling_seed"):
        return original(probs, *args, **kwargs)
    rows, vocabulary = probs.shape
    in_blocks = probs.numel() >= WORTH_BLOCKS and vocabulary % BLOCK == 0
    sums = probs.view(rows, -1, BLOCK).sum(dim=-1) if in_blocks else probs
    cumulative = sums.cumsum(dim=-1)
    total = cumulative[:, -1:]
    if not bool((torch.isfinite(total) & (total > 0)).all()):
        raise RuntimeError("next-token probabilities are not finite, or all zero: the model's weights are bad")
    point = torch.rand_like(total) * total
    drawn = _first_above(point, cumulative, sums)
    if in_blocks:
        inside = probs.view(rows, -1, BLOCK)[torch.arange(rows), drawn[:, 0]]
        before = cumulative.gather(1, drawn) - sums.gather(1, drawn)
        within = _first_above((point - before).clamp_(min=0), inside.cumsum(dim=-1), inside)
        drawn = drawn * BLOCK + within
    return drawn[:, 0].to(torch.int32)


def _first_above(point: torch.Tensor, cumulative: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return where the cumulative weights pass the point, both [rows, 1]: never an entry without weight."""
    found = torch.searchsorted(cumulative, point, right=True)
    past_the_end = found >= weights.shape[-1]  # the point was rounded up to the total
    if bool(past_the_end.any()):
        found = torch.where(past_the_end, weights.argmax(dim=-1, keepdim=True), found)
    return found


def sample_filtered(
    original: Callable[..., Any],
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    *,
    return_filtered_probs: bool = False,
) -> Any:
    """Around ``top_k_top_p_min_p_sampling_from_probs_torch``: SGLang's function, of the largest probabilities alone.

    It sorts whole rows. Where top-k or top-p cut every row within its largest entries, what they cut off cannot matter.
    """

    def of(largest: torch.Tensor) -> Any:
        return original(
            largest, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions,
            return_filtered_probs=return_filtered_probs,
        )  # fmt: skip

    for count in LARGEST:
        if sampling_seed is not None or probs.shape[-1] < 4 * count:
            break
        if _SKIP[count]:
            _SKIP[count] -= 1
            continue
        if bool(((top_ks > count) & (top_ps >= 1)).any()):
            continue
        largest, ids = probs.topk(count, dim=-1)
        before_last = largest.cumsum(dim=-1)[:, -1] - largest[:, -1]
        if bool(((top_ks <= count) | (before_last > top_ps)).all()):
            ids = ids.to(torch.int32)
            if not return_filtered_probs:
                return ids.gather(1, of(largest).to(torch.int64)[:, None])[:, 0]
            drawn, weights, order, weight = of(largest)
            return ids.gather(1, drawn.to(torch.int64)[:, None])[:, 0], weights, ids.gather(1, order.long()), weight
        _SKIP[count] = RETRY_AFTER
    return of(probs)


def remember_probs(
    original: Callable[..., Any], sampler: Sampler, probs: torch.Tensor, *args: object, **kwargs: object
) -> Any:
    """Around ``Sampler._sample_from_probs``, which is given the probabilities before top-k, top-p and min-p."""
    if _WANTED:
        _WANTED[-1].append(probs)
    return original(sampler, probs, *args, **kwargs)


def forward(
    original: Callable[..., torch.Tensor],
    sampler: Sampler,
    logits_output: LogitsProcessorOutput,
    sampling_info: SamplingBatchInfo,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[list[int] | None],
    positions: torch.Tensor,
) -> torch.Tensor:
    """Around ``Sampler.forward``: where only log-probs of drawn tokens are asked for, compute no others."""
    asked = (logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
    of_drawn_only = (
        return_logprob
        and not sampling_info.is_all_greedy
        and not any(top_logprobs_nums)
        and all(ids is None for ids in token_ids_logprobs)
        and _scores_by_log_of_probs(sampler)
    )
    if not of_drawn_only:
        return original(sampler, *asked)
    seen: list[torch.Tensor] = []
    _WANTED.append(seen)
    try:
        drawn = original(sampler, logits_output, sampling_info, False, top_logprobs_nums, token_ids_logprobs, positions)
    finally:
        _WANTED.pop()
    log_probs = torch.log(seen[0].gather(1, drawn.to(torch.int64)[:, None]))
    # SGLang's own function finds one column, in which every row has drawn entry 0.
    result = sampler.output_logprob_processor.compute_logprobs(
        log_probs, top_logprobs_nums, token_ids_logprobs, torch.zeros_like(drawn)
    )
    result.write_output_to(logits_output)
    return drawn


def _scores_by_log_of_probs(sampler: Sampler) -> bool:
    """Return True if log-probs are ``log(probs)`` of what ``_sample_from_probs`` draws from."""
    from sglang.srt.layers import sampler as module

    return (
        type(sampler) is module.Sampler
        and not sampler.enable_deterministic
        and sampler.rl_on_policy_target is None
        and not sampler.use_ascend_backend
        and not module.SGLANG_RETURN_ORIGINAL_LOGPROB
    )


def register() -> None:
    """Register the hooks; raises OtherSGLangError."""
    require(_DRAW, "probs sampling_seed positions")
    require(
        _DRAW_FILTERED,
        "probs top_ks top_ps min_ps need_min_p_sampling sampling_seed positions return_filtered_probs",
    )
    require(f"{_SAMPLER}._sample_from_probs", "self probs sampling_info positions simple_sampling_case")
    require(
        f"{_SAMPLER}.forward",
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions",
    )
    require(
        "sglang.srt.layers.logprob_processor.OutputLogprobProcessor.compute_logprobs",
        "self logprobs top_logprobs_nums token_ids_logprobs batch_next_token_ids",
    )
    HookRegistry.register(_DRAW, sample, HookType.AROUND)
    HookRegistry.register(_DRAW_FILTERED, sample_filtered, HookType.AROUND)
    HookRegistry.register(f"{_SAMPLER}._sample_from_probs", remember_probs, HookType.AROUND)
    HookRegistry.register(f"{_SAMPLER}.forward", forward, HookType.AROUND)
