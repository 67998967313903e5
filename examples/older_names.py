"""Generate functions by the names that the examples of slime <= 0.3.1 have, for scripts that name them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from slime.rollout.environments import generate as play
from slime.utils.types import Sample

Generate = Callable[..., Awaitable[Sample]]


def generate_in(config: Path) -> Generate:
    """Return a generate function that plays in the environment of the file ``config``, unless the run names one."""

    async def generate(
        args: Namespace, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Sample:
        if not args.environment_path and not args.environment_config:
            args = Namespace(**{**vars(args), "environment_config": str(config)})
        return await play(args, sample, sampling_params, evaluation)

    return generate


async def reward_func(args: Namespace, sample: Sample, **kwargs: Any) -> Any:
    """Return the reward that the episode gave (``--custom-rm-path``)."""
    return sample.reward
