"""Trajectories on their way from generators to the trainer: gathered into groups, handed out once."""

from __future__ import annotations

import inspect
import logging
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.utils.plain_numbers import is_number
from slime_plugins.rollout_buffer.trajectory_checks import ITEM_KEYS, ItemError, check_item, has_log_probs

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["ITEM_KEYS", "BufferFull", "GroupFunctions", "GroupQueue", "ItemError"]

logger = logging.getLogger(__name__)

UIDS_REMEMBERED = 200_000

Item = dict[str, Any]
Group = tuple[str, list[Item]]


class BufferFull(RuntimeError):
    """No further trajectory is taken until some have been fetched."""


@dataclass(frozen=True)
class GroupFunctions:
    """Optional functions of a generator's module for groups, which are ``(instance_id, items)``.

    ``is_valid_group(group, group_size, task_type)`` is asked after every item: ``(valid, finished)``, or whether a full
    group is valid. ``transform_group(group, task_type)`` returns the group to hand out, and
    ``get_group_data_meta_info({instance_id: items})`` what to report of a batch of groups.
    """

    is_valid_group: Callable[..., Any] | None = None
    transform_group: Callable[..., Group] | None = None
    get_group_data_meta_info: Callable[..., dict[str, Any]] | None = None

    @classmethod
    def of_module(cls, module: ModuleType) -> GroupFunctions:
        """Take the functions that ``module`` defines."""
        return cls(**{name: getattr(module, name, None) for name in cls.__dataclass_fields__})


class GroupQueue:
    """Holds at most ``max_items`` trajectories. A group is ready when it has ``group_size`` of one ``instance_id``.

    A trajectory that is written again (the same ``uid``: its writer had no answer) is held once. With acknowledgement,
    a batch is handed out again until the next reader confirms its arrival. Tokens must be of a vocabulary of
    ``vocab_size`` and rewards that are objects have a number at ``reward_key``, where these are known.
    """

    def __init__(
        self,
        group_size: int,
        task_type: str,
        functions: GroupFunctions | None = None,
        max_items: int = 100_000,
        *,
        vocab_size: int | None = None,
        reward_key: str | None = None,
    ) -> None:
        self.group_size, self.task_type, self.max_items = group_size, task_type, max_items
        self.vocab_size, self.reward_key = vocab_size, reward_key
        self.functions = functions or GroupFunctions()
        self.open: dict[str, list[Item]] = {}
        self.ready: deque[Group] = deque()
        self.counts: Counter[str] = Counter()
        self._handed_out: tuple[int, list[Group]] | None = None
        self._batches = 0
        self._uids: dict[str, None] = {}

    @property
    def held(self) -> int:
        """Trajectories that are here, those that were handed out and not acknowledged too."""
        groups = [*self.open.items(), *self.ready, *(self._handed_out[1] if self._handed_out else ())]
        return sum(len(items) for _, items in groups)

    def write(self, item: Item) -> None:
        """Take one trajectory. Raises ItemError, BufferFull, and what the generator's own functions raise."""
        check_item(item, self.vocab_size, self.reward_key)
        if item["uid"] in self._uids:
            self.counts["written_again"] += 1
            return
        if self.held >= self.max_items:
            raise BufferFull(f"{self.held} trajectories wait to be fetched, at most {self.max_items} may")
        instance_id = str(item["instance_id"])
        items = [*self.open.get(instance_id, []), item]
        if len({has_log_probs(one) for one in items} - {None}) > 1:
            raise ItemError(
                f"samples must have rollout_log_probs where the other trajectories of {instance_id!r:.100} have them, "
                "and none where they have none"
            )
        valid, finished = self._verdict((instance_id, items))
        group = self._transformed((instance_id, items)) if finished and valid else None
        self._uids[item["uid"]] = None
        if len(self._uids) > UIDS_REMEMBERED:
            del self._uids[next(iter(self._uids))]
        self.counts["written"] += 1
        if not finished:
            self.open[instance_id] = items
            return
        self.open.pop(instance_id, None)
        if group is None:
            self.counts["invalid_groups"] += 1
            logger.warning("group %s of %d trajectories is not valid and is dropped", instance_id, len(items))
        else:
            self.ready.append(group)

    def read(self, acknowledged: int | None = None, *, acknowledges: bool = False) -> tuple[list[Item], dict[str, Any]]:
        """Return the trajectories of all groups that are ready, and what there is to know of them.

        With ``acknowledges``, ``acknowledged`` is the ``batch_id`` of the last batch that arrived, and this one is
        handed out again unless the next call names it. Without, a batch counts as arrived when it is handed out.
        """
        if self._handed_out is not None and (not acknowledges or acknowledged == self._handed_out[0]):
            self._handed_out = None
        again = self._handed_out is not None
        if not again:
            self._batches += 1
            self._handed_out = (self._batches, list(self.ready))
            self.ready.clear()
        assert self._handed_out is not None
        number, groups = self._handed_out
        if not acknowledges or not groups:
            self._handed_out = None
        meta_info = {**self._describe(groups), "batch_id": number, "handed_out_again": again, **self.state()}
        return [item for _, items in groups for item in items], meta_info

    def has_data(self, acknowledged: int | None = None, *, acknowledges: bool = False) -> bool:
        """True when ``read`` with these arguments has something to return."""
        kept = self._handed_out is not None and acknowledges and acknowledged != self._handed_out[0]
        return bool(self.ready) or kept

    def state(self) -> dict[str, Any]:
        """Return what is waiting, and counts of the rest."""
        return {
            "unfinished_groups": len(self.open),
            "unfinished_items": sum(len(items) for items in self.open.values()),
            **{name: self.counts[name] for name in ("written", "written_again", "invalid_groups")},
        }

    def _verdict(self, group: Group) -> tuple[bool, bool]:
        full = len(group[1]) >= self.group_size
        if self.functions.is_valid_group is None:
            return True, full
        verdict = _call(self.functions.is_valid_group, group, self.group_size, self.task_type)
        if isinstance(verdict, tuple):
            valid, finished = verdict
            return bool(valid), bool(finished)
        return bool(verdict), full

    def _transformed(self, group: Group) -> Group:
        if self.functions.transform_group is None:
            return group
        instance_id, items = _call(self.functions.transform_group, group, self.task_type)
        return str(instance_id), list(items)

    def _describe(self, groups: list[Group]) -> dict[str, Any]:
        items = [item for _, items in groups for item in items]
        rewards = [float(item["reward"]) for item in items if is_number(item["reward"])]
        found: dict[str, Any] = {
            "total_samples": len(items),
            "num_groups": len(groups),
            "finished_groups": [instance_id for instance_id, _ in groups],
        }
        if rewards:
            found["avg_reward"] = sum(rewards) / len(rewards)
        if groups and self.functions.get_group_data_meta_info is not None:
            by_instance: dict[str, list[Item]] = {}
            for instance_id, members in groups:
                by_instance.setdefault(instance_id, []).extend(members)
            found |= self.functions.get_group_data_meta_info(by_instance)
        return found


def _call(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a generator's function with as many of the arguments as it takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function(*arguments)
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    return function(*arguments[:count])
