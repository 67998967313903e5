"""Top-p replay: settings of requests for which engines report the tokens that each one was sampled among."""

from __future__ import annotations

from typing import Any

DEFAULT_LARGEST = 4096
"""SGLang's own ``--sampling-mask-max-tokens``."""


def replays_top_p(args: Any) -> bool:
    """Return whether training rollouts record top-p masks: exactly with ``--rollout-top-p`` below 1."""
    return bool(args.rollout_top_p != 1.0)


def max_mask_tokens(args: Any) -> int:
    """Return the most tokens of a top-p mask that engines report."""
    return int(args.sglang_sampling_mask_max_tokens or DEFAULT_LARGEST)


def top_k(args: Any) -> int:
    """Return the ``top_k`` of training requests.

    Engines report masks only under a finite one below ``max_mask_tokens``. Where none is given it is half of that,
    which leaves room for ties; what it cuts off is not sampled, and so training leaves it out too.
    """
    given = int(args.rollout_top_k)
    return max_mask_tokens(args) // 2 if replays_top_p(args) and given == -1 else given
