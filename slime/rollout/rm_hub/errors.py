"""What happens when a reward cannot be computed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from slime.utils.types import Sample

logger = logging.getLogger(__name__)

TOLERATED_ERRORS, TOLERATED_SHARE = 4, 0.1
"""A rollout goes on with this many rewards that took too long, or this share of its samples, whichever is more."""


class RewardTimeout(RuntimeError):
    """A built-in reward did not answer within its wall-clock limit, or its worker process died of it."""


class RewardErrors:
    """Scores samples and counts the rewards that failed, so that one hanging reward costs one sample.

    Such a sample gets reward 0, ``remove_sample`` and ``metadata["reward_error"]``. When more than the tolerated share
    of a rollout fails, and at any error of a custom reward, the rollout stops.
    """

    def __init__(self) -> None:
        self.scored = 0
        self.failed: list[int | None] = []

    def metrics(self, prefix: str = "rollout/") -> dict[str, int]:
        """Return ``{"rollout/reward_errors": count}`` when there were any."""
        return {f"{prefix}reward_errors": len(self.failed)} if self.failed else {}

    async def score_one(self, args: Any, sample: Sample, rm: Callable[..., Awaitable[Any]]) -> None:
        """Set ``sample.reward`` to ``rm(args, sample)``."""
        self.scored += 1
        try:
            sample.reward = await _with_deadline(args, rm(args, sample), [sample])
        except RewardTimeout as e:
            self._record(args, sample, e)

    async def score_batch(self, args: Any, samples: list[Sample], rm: Callable[..., Awaitable[Any]]) -> None:
        """Set the rewards of ``samples`` to the list ``rm(args, samples)`` returns."""
        if not getattr(args, "custom_rm_path", None):
            await asyncio.gather(*(self.score_one(args, sample, _one_of(rm)) for sample in samples))
            return
        self.scored += len(samples)
        rewards = await _with_deadline(args, rm(args, samples), samples)
        if not hasattr(rewards, "__len__") or len(rewards) != len(samples):
            raise ValueError(
                f"--custom-rm-path {args.custom_rm_path!r} was given {len(samples)} samples (indices "
                f"{[s.index for s in samples]}) and must return a list of as many rewards, got {rewards!r:.200}"
            )
        for sample, reward in zip(samples, rewards, strict=True):
            sample.reward = reward

    def _record(self, args: Any, sample: Sample, error: RewardTimeout) -> None:
        self.failed.append(sample.index)
        key = getattr(args, "reward_key", None)
        sample.reward = {key: 0.0} if key else 0.0
        sample.remove_sample = True
        sample.metadata = {**(sample.metadata or {}), "reward_error": str(error)}
        logger.error("no reward for sample index=%s, it is left out of the loss: %s", sample.index, error)
        if len(self.failed) > max(TOLERATED_ERRORS, TOLERATED_SHARE * self.scored):
            raise RuntimeError(
                f"{len(self.failed)} of {self.scored} rewards failed, more than the tolerated "
                f"{TOLERATED_SHARE:.0%}; samples {self.failed[:20]}, the last error: {error}"
            ) from error


def _one_of(batched: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def one(args: Any, sample: Sample) -> Any:
        return (await batched(args, [sample]))[0]

    return one


async def _with_deadline(args: Any, reward: Awaitable[Any], samples: list[Sample]) -> Any:
    """Await a reward; errors name the samples. The deadline is ``rollout_request_timeout``."""
    limit = getattr(args, "rollout_request_timeout", None) or 1800.0
    names = f"samples {[s.index for s in samples]}"
    try:
        async with asyncio.timeout(limit) as scope:
            return await reward
    except TimeoutError as e:
        if scope.expired():
            raise TimeoutError(f"the reward of {names} took more than {limit:g} s (--rollout-request-timeout)") from e
        e.add_note(f"while computing the reward of {names}")
        raise
    except Exception as e:
        e.add_note(f"while computing the reward of {names}")
        raise
