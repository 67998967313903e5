"""Drawing groups from a data source, whose mistakes are named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.rollout.hooks.hook import Hook
from slime.utils.types import Sample


def draw_groups(args: Any, get_samples: Callable[[int], Any], count: int) -> list[list[Sample]]:
    """Return ``get_samples(count)``: groups of ``n_samples_per_prompt`` samples, fewer than ``count`` at the end.

    Raises TypeError and ValueError, naming the data source, for anything else.
    """
    hook = Hook("--data-source-path", args.data_source_path or "", get_samples)
    groups = hook(count)
    outer = isinstance(groups, (list, tuple))
    if not outer or not all(isinstance(group, list) for group in groups):
        odd = next(group for group in groups if not isinstance(group, list)) if outer else groups
        raise hook.returned(odd, "a list of groups, each a list of Sample, of get_samples(n)")
    expected = args.n_samples_per_prompt
    for group in groups:
        if len(group) != expected:
            raise ValueError(
                f"{hook}: get_samples({count}) returned a group of {len(group)} samples; expected "
                f"--n-samples-per-prompt {expected}"
            )
    return list(groups)
