"""What a data source does for a run that is killed: finished groups are kept, and come back in their old place."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from slime.rollout.base_types import iter_samples
from slime.rollout.durable.journal import GroupJournal, group_index, remove_journals
from slime.utils.misc import should_run_periodic_action
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

DECIDES_WHAT_IS_GENERATED = (
    "apply_chat_template", "apply_chat_template_kwargs", "custom_generate_function_path", "custom_rm_path",
    "data_source_path", "group_rm", "hf_checkpoint", "input_key", "label_key", "metadata_key",
    "multimodal_keys", "n_samples_per_prompt", "partial_rollout", "prompt_data", "ref_load", "reward_key", "rm_type",
    "rm_url", "rollout_function_path", "rollout_max_context_len", "rollout_max_prompt_len", "rollout_max_response_len",
    "rollout_sample_hook_path", "rollout_seed", "rollout_shuffle", "rollout_skip_special_tokens", "rollout_stop",
    "rollout_stop_token_ids", "rollout_temperature", "rollout_top_k", "rollout_top_p", "tool_key",
    "use_rollout_routing_replay",
)  # fmt: skip
"""Arguments that must be as they were for groups in the journal to be what the run would generate again."""

Group = list[Sample]


class Recovery:
    """The journal of a data source, and the groups that came back from it.

    Everything is a no-op in runs that a second start does not resume: without ``--save`` and a ``--load`` of the same
    directory, with ``--finetune``, without ``--save-interval``, and with ``--mask-offpolicy-in-partial-rollout``, which
    would mask what comes back.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.journal = GroupJournal(Path(args.save) / "rollout", _setting(args)) if _is_resumed(args) else None
        self.groups: dict[int, Group] = {}
        self._last_saved = -1

    def resume(self, rollout_id: int) -> None:
        """Take in what an earlier start did after the checkpoint of ``rollout_id`` (-1: before the first)."""
        if self.journal is None:
            return
        self._last_saved = rollout_id
        self.groups = self.journal.resume(rollout_id + 1).generated
        if self.groups:
            path = self.journal.path(rollout_id + 1)
            logger.info("%d groups generated before the restart come back from %s", len(self.groups), path)

    def hand_out(self, groups: list[Group]) -> list[Group]:
        """Return ``groups``, those that came back in the place of their prompts, and note that they are handed out."""
        if self.journal is not None and groups:
            self.journal.dispatched(groups)
        return [self._replace(group) for group in groups] if self.groups else groups

    def _replace(self, group: Group) -> Group:
        number = group_index(group)
        found = None if number is None else self.groups.pop(number, None)
        return group if found is None or not _same_prompt(found, group) else found

    def completed(self, group: Group) -> None:
        """Keep a finished group, as it is now."""
        if self.journal is not None:
            self.journal.completed(group)

    def returned(self, groups: Iterable[Group]) -> None:
        """Keep what was generated of groups that were handed back."""
        if self.journal is not None:
            for group in groups:
                self.journal.returned(group)

    def consumed(self, rollout_id: int, samples: Iterable[Sample]) -> None:
        """Note the groups that ``rollout_id`` trains on."""
        if self.journal is not None:
            self.journal.consumed(rollout_id, sorted({s.group_index for s in samples if s.group_index is not None}))

    def after_rollout(self, rollout_id: int, rollouts_per_epoch: int) -> None:
        """Go on to the next rollout, whose groups are worth keeping when the weights that make them are saved."""
        self.groups.clear()  # what is left is of weights that are gone
        if self.journal is not None:
            saved = may_be_saved(self.args, rollout_id, rollouts_per_epoch)
            self.journal.turn_over(rollout_id + 1, wanted=saved)

    def after_save(self, rollout_id: int) -> None:
        """Drop what no restart can need. The checkpoint of ``rollout_id`` is still to come: keep the one before it.

        A run without a journal drops those of earlier runs: what they generated was not made by its weights.
        """
        if self.journal is not None:
            self.journal.forget_before(self._last_saved + 1)
        else:
            remove_journals(Path(self.args.save) / "rollout", lambda number: True)
        self._last_saved = rollout_id


def may_be_saved(args: Any, rollout_id: int, rollouts_per_epoch: int) -> bool:
    """True when there is a checkpoint of ``rollout_id``, or when that is up to someone else than the loop."""
    interval = args.save_interval
    if interval is None or args.release_train:  # which saves after every rollout
        return True
    return should_run_periodic_action(rollout_id, interval, rollouts_per_epoch, args.num_rollout)


def still_open(groups: Iterable[Group], state: dict[str, Any], buffer: Iterable[Group]) -> list[Group]:
    """Return those of ``groups`` that were drawn before ``state`` was taken, with ``buffer`` in the buffer."""
    later = {group_index(group) for group in buffer}
    return [
        g for g in groups if (n := group_index(g)) is not None and n < state["sample_group_index"] and n not in later
    ]


def _is_resumed(args: Any) -> bool:
    if not args.rollout_global_dataset or args.save_interval is None:
        return False
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout:
        return False
    return bool(args.continues_own_checkpoints)


def _setting(args: Any) -> dict[str, Any]:
    values = {name: getattr(args, name) for name in DECIDES_WHAT_IS_GENERATED}
    setting: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return setting


def _same_prompt(one: Group, other: Group) -> bool:
    first, second = next(iter_samples(one)), next(iter_samples(other))
    return len(one) == len(other) and (first.prompt, first.label) == (second.prompt, second.label)


Unconsumed = Callable[[], list[Group]]
