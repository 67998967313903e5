"""Top-p replay: what is asked of engines so that they tell which tokens each one was sampled among."""

from __future__ import annotations

from typing import Any

DEFAULT_LARGEST = 4096
"""SGLang's own ``--sampling-mask-max-tokens``."""


def replays_nuclei(args: Any) -> bool:
    """Return whether training rollouts record nuclei: exactly with ``--rollout-top-p`` below 1."""
    return bool(getattr(args, "rollout_top_p", 1.0) != 1.0)


def largest_nucleus(args: Any) -> int:
    """Return the most tokens of a nucleus that the engines report."""
    return int(getattr(args, "sglang_sampling_mask_max_tokens", None) or DEFAULT_LARGEST)


def top_k(args: Any) -> int:
    """Return the ``top_k`` of training requests.

    Engines report nuclei only under a finite one below ``largest_nucleus``. Where none is given it is half of that,
    which leaves room for ties; what it cuts off a nucleus is not sampled, and so training leaves it out too.
    """
    given = int(args.rollout_top_k)
    return largest_nucleus(args) // 2 if replays_nuclei(args) and given == -1 else given
