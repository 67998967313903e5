"""What a rollout that begins and ends with its call makes of the groups it draws: nothing that is too old for it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from slime.rollout.base_types import iter_samples
from slime.rollout.staleness import StalenessBound, WeightClock, oldest_step, settle_steps, stamp_steps, weight_clock
from slime.rollout.stream.group_job import FINISHED, Group, forget_too_old


class FreshGroups:
    """Lets groups begin again from their prompts that rollout ``rollout_id`` must not train on, and counts them.

    They are those that ``--max-staleness`` forbids; and groups that earlier rollouts finished, when
    ``--mask-offpolicy-in-partial-rollout`` would leave all of their tokens out of the loss.
    """

    def __init__(self, args: Any, rollout_id: int, clock: WeightClock | None = None) -> None:
        self._rollout_id = rollout_id
        self._clock = clock or weight_clock()
        self._since = self._clock.step
        self._bound = StalenessBound(args.max_staleness, args.rollout_batch_size)
        self._masks = bool(args.partial_rollout and args.mask_offpolicy_in_partial_rollout)
        self._counts: Counter[str] = Counter()

    def refresh(self, groups: list[Group]) -> None:
        """Look at groups that were drawn, before they are generated."""
        for group in groups:
            self._refresh(group)

    def stamp(self, group: Group) -> None:
        """Note which training step made the tokens that were generated now: the weights are those of the start."""
        stamp_steps(group, self._clock, self._since)
        settle_steps(group, self._clock)

    def metrics(self) -> dict[str, Any]:
        """Return ``rollout/staleness/regenerated_*`` and ``masked_tokens``, where there is anything to count."""
        return {f"rollout/staleness/{name}": count for name, count in self._counts.items() if count}

    def _refresh(self, group: Group) -> None:
        if not self._masks:
            lost = forget_too_old(group, self._is_too_old)
        elif all(sample.status in FINISHED for sample in iter_samples(group)):
            lost = forget_too_old(group, lambda item: True)
        else:
            lost = 0
            self._counts["masked_tokens"] += sum(s.effective_response_length for s in iter_samples(group))
        if lost:
            self._counts["regenerated_groups"] += 1
            self._counts["regenerated_tokens"] += lost

    def _is_too_old(self, samples: Any) -> bool:
        return self._bound.is_too_old(oldest_step(samples, self._clock, None), self._rollout_id)
