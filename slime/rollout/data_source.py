"""The source of prompts: the prompt file, epoch by epoch, and a buffer of groups handed back by rollouts.

Both keep their place in a small state that is saved with each checkpoint, so that a resumed run continues with the very
next prompt. Groups that were generated after it are read from a journal. Methods may be called from several threads.
"""

from __future__ import annotations

import abc
import json
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

from slime.arguments.args import Args
from slime.arguments.rules.loop import ENVIRONMENT_GENERATE
from slime.rollout.durable.journal_file import to_json
from slime.rollout.durable.journal_writer import samples_to_json
from slime.rollout.durable.recovery import Recovery, Unconsumed, may_be_saved, still_open
from slime.rollout.durable.state_codec import decode_group, decode_value, encode_group, encode_value
from slime.rollout.groups import copy_prompt
from slime.rollout.hooks.hook import Hook, describe, make_hook
from slime.rollout.requests.generate_request import longest_prompt
from slime.rollout.staleness import weight_clock, with_all_steps
from slime.utils.atomic_file import write_atomically
from slime.utils.data import Dataset
from slime.utils.declared import with_defaults
from slime.utils.digests import seal, unseal
from slime.utils.misc import load_function
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.types import Sample, iter_samples

logger = logging.getLogger(__name__)

STATE_FORMAT = 2
SNAPSHOTS_KEPT = 4
"""The overlapped loop saves one rollout late; older snapshots are of rollouts that were not saved."""
Group = list[Sample]


class DataSource(abc.ABC):
    """The interface that rollout functions draw groups from and hand them back to (``--data-source-path``)."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """Return ``num_samples`` groups of ``n_samples_per_prompt`` samples each."""

    @abc.abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back, to be drawn again."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None:
        """Save the state that goes with the checkpoint of ``rollout_id``."""

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None:
        """Restore the state saved for ``rollout_id``."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of prompts of an epoch."""


class RolloutDataSource(DataSource):
    """Prompts of ``--prompt-data`` in order, or shuffled per epoch; epochs follow each other without a gap.

    Without a data set (``--disable-rollout-global-dataset``) it hands out blank samples for the generate function to
    fill.

    It has more methods than the abstract class: ``take_back`` is how rollout functions hand back what they
    drew and did not use, whether or not ``add_samples`` works. For runs that are resumed, ``record_completed`` keeps a
    finished group, which a resumed run gets in the place of its prompt; ``record_consumed`` is the rollout manager's.

    A subclass may set the public attributes itself and leave ``super().__init__`` out, as those written for slime <=
    0.3.1 do. All of it works then but the recovery of finished groups; a warning says so.
    """

    accepts_samples = False
    """True if ``add_samples`` works."""

    unconsumed: Unconsumed | None = None
    """Set for rollout functions that work on groups across rollouts: returns the groups drawn and not consumed yet."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        source = super().__new__(cls)
        given: Any = args[0] if args else kwargs.get("args")
        source._begin(given)
        return source

    def _begin(self, args: Args) -> None:
        """Set what the methods need, whether or not a subclass calls ``super().__init__``."""
        self.args = with_defaults(args) if hasattr(args, "__dict__") else args
        self.epoch_id = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        self.dataset: Dataset | None = None
        self._draw_lock = threading.RLock()
        self._taken_back: list[Group] = []
        self._draws_here = False
        self._snapshots: dict[int, bytes] = {}
        self._recovery = Recovery(args, of_a_bare=type(self).__name__)

    def __init__(self, args: Args) -> None:
        args = with_defaults(args)
        self.args = args
        self._recovery = Recovery(args)
        draws = args.load_debug_rollout_data is None and args.num_rollout != 0
        if args.rollout_global_dataset and (args.prompt_data or draws):
            self.dataset = self._load_dataset()
            if self.dataset is not None and args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)

    def _load_dataset(self) -> Dataset | None:
        args = self.args
        if not args.prompt_data:
            raise ValueError("--prompt-data is needed (or --disable-rollout-global-dataset, to make prompts yourself)")
        trust = {"trust_remote_code": args.trust_remote_code}
        multimodal = args.multimodal_keys
        loading: dict[str, Any] = {"backend": args.sglang_image_processor_backend, **trust}
        return Dataset(
            args.prompt_data,
            tokenizer=load_tokenizer(args.hf_checkpoint, **trust),
            processor=load_processor(args.hf_checkpoint, **loading) if multimodal else None,
            # Of a conversation to train on only a part is a prompt: its rollout function looks at the lengths.
            max_length=None if args.loss_type == "sft_loss" else args.rollout_max_prompt_len,
            engine_max_length=longest_prompt(args),
            prompt_key=args.input_key,
            multimodal_keys=multimodal,
            label_key=args.label_key,
            metadata_key=args.metadata_key,
            tool_key=args.tool_key,
            prompts_are_optional=args.custom_generate_function_path == ENVIRONMENT_GENERATE,
            apply_chat_template=args.apply_chat_template,
            apply_chat_template_kwargs=args.apply_chat_template_kwargs,
            seed=args.rollout_seed,
        )

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return ``num_samples`` groups: each prompt copied ``n_samples_per_prompt`` times and numbered.

        What was taken back comes first.
        """
        with self._draw_lock:
            self._draws_here = True
            groups = self._recovery.hand_out(pop_first(self.args, None, self._taken_back, num_samples))
            prompts = self._next_prompts(num_samples - len(groups))
            return groups + self._recovery.hand_out([self._make_group(prompt) for prompt in prompts])

    def take_back(self, groups: list[Group]) -> None:
        """Hand ``groups`` out again before new prompts; a class that has ``add_samples`` is given them there.

        A class that draws prompts unasked and has none would never hand them out: it loses them, and logs that.
        """
        own_buffer = type(self).add_samples is not RolloutDataSource.add_samples
        own_draws = type(self).get_samples is not RolloutDataSource.get_samples and not self._draws_here
        if own_draws and not own_buffer:
            logger.warning(
                "%d groups are dropped because %s takes none back: it has a get_samples of its own and no add_samples",
                len(groups), type(self).__name__,
            )  # fmt: skip
            return
        self._put_back(groups)

    def _put_back(self, groups: list[Group]) -> None:
        if type(self).add_samples is not RolloutDataSource.add_samples:
            self.add_samples(groups)
            return
        with self._draw_lock:
            self._taken_back += groups
            self._recovery.returned(groups)

    def record_completed(self, group: Group) -> None:
        """Keep a group that has been generated, as it is now, in case that the run has to be resumed."""
        self._recovery.completed(group)

    def record_consumed(self, rollout_id: int, samples: Iterable[Sample]) -> None:
        """Note that ``samples`` are the training data of ``rollout_id``."""
        self._recovery.consumed(rollout_id, samples)

    def _next_prompts(self, count: int) -> list[Sample]:
        if self.dataset is None:
            return [Sample() for _ in range(count)]
        prompts: list[Sample] = []
        while len(prompts) < count:
            if self.sample_offset >= len(self.dataset):
                self.epoch_id += 1
                self.sample_offset = 0
                if self.args.rollout_shuffle:
                    self.dataset.shuffle(self.epoch_id)
            end = min(len(self.dataset), self.sample_offset + count - len(prompts))
            prompts += self.dataset.samples[self.sample_offset : end]
            self.sample_offset = end
        return prompts

    def _make_group(self, prompt: Sample) -> Group:
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = copy_prompt(prompt)
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def add_samples(self, samples: list[Group]) -> None:
        raise RuntimeError(
            f"{type(self).__name__} cannot take samples back; use --data-source-path "
            "slime.rollout.data_source.RolloutDataSourceWithBuffer"
        )

    def __len__(self) -> int:
        return len(self.dataset) if self.dataset is not None else 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data and the groups that wait, as JSON types."""
        with self._draw_lock:
            return {**self._place(), "buffer": [encode_group(group) for group in self._to_save()]}

    def _place(self) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "sample_offset": self.sample_offset,
            "epoch_id": self.epoch_id,
            "sample_group_index": self.sample_group_index,
            "sample_index": self.sample_index,
            "metadata": encode_value(self.metadata),
            "num_prompts": len(self),
        }

    def _waiting_groups(self) -> list[Group]:
        """Return the groups that come out before new prompts."""
        return self._taken_back

    def _to_save(self) -> list[Group]:
        """Return the waiting groups with the age of their tokens, which versions say in this process only."""
        return [with_all_steps(group, weight_clock()) for group in self._waiting_groups()]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place that ``state_dict`` described. Raises ValueError for a state that this data cannot have."""
        if state.get("format", STATE_FORMAT) > STATE_FORMAT:
            raise ValueError(
                f"data source state has format {state['format']}, this version of slime knows up to {STATE_FORMAT}"
            )
        with self._draw_lock:
            had = state.get("num_prompts", len(self))
            if self.dataset is not None and had != len(self):
                logger.error(
                    "the data source was saved with %d prompts and now has %d (--prompt-data %s): the order of prompts "
                    "is not the one the saved run would have had", had, len(self), self.args.prompt_data,
                )  # fmt: skip
            if self.dataset is not None and state["sample_offset"] > len(self):
                raise ValueError(
                    f"the saved data source had used {state['sample_offset']} prompts of its epoch, but --prompt-data "
                    f"{self.args.prompt_data!r} holds only {len(self)}. Resume with the data the run was started with."
                )
            self.sample_offset = state["sample_offset"]
            self.epoch_id = state["epoch_id"]
            self.sample_group_index = state["sample_group_index"]
            self.sample_index = state["sample_index"]
            self.metadata = decode_value(state.get("metadata") or {})
            if self.dataset is not None and self.args.rollout_shuffle:
                self.dataset.shuffle(self.epoch_id)
            self._snapshots.clear()
            self._taken_back = []
            if groups := [decode_group(group) for group in [*state.get("in_flight", []), *state.get("buffer", [])]]:
                self._put_back(groups)

    def snapshot(self, rollout_id: int) -> None:
        """Remember the state as the one that ``save(rollout_id)`` is to write; later draws do not change it."""
        if not self.args.rollout_global_dataset or not self.args.save:
            return
        per_epoch = len(self) // self.args.rollout_batch_size
        data = self._serialize() if may_be_saved(self.args, rollout_id, per_epoch) else None
        with self._draw_lock:
            if data is not None:
                self._snapshots[rollout_id] = data
            for old in sorted(self._snapshots)[:-SNAPSHOTS_KEPT]:
                del self._snapshots[old]
            self._recovery.after_rollout(rollout_id, per_epoch)

    def _serialize(self) -> bytes:
        """Return the state as JSON, encoded part by part and without the lock: other threads draw meanwhile."""
        with self._draw_lock:
            own = type(self).state_dict is not RolloutDataSource.state_dict  # a subclass keeps more
            state = self.state_dict() if own else self._place()
            buffer = self._to_save()
        parts = [to_json(state)[:-1]]
        if not own:
            parts += [b',"buffer":', *samples_to_json(buffer)]
        if self.unconsumed is not None:
            parts += [b',"in_flight":', *samples_to_json(still_open(self.unconsumed(), state, buffer))]
        return b"".join([*parts, b"}"])

    def save(self, rollout_id: int) -> None:
        """Write the snapshot of ``rollout_id`` (or else the present state) under ``<save>/rollout``, atomically."""
        if not self.args.rollout_global_dataset:
            return
        if not self.args.save:
            raise ValueError("the data source can only be saved with --save")
        path = _state_path(self.args.save, rollout_id, ".json")
        data = self._snapshots.get(rollout_id) or self._serialize()
        with self._draw_lock:
            for old in [r for r in self._snapshots if r <= rollout_id]:
                del self._snapshots[old]
        write_atomically(path, seal(data, _label(rollout_id)), durable=True)
        self._recovery.after_save(rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        """Restore the state saved for ``rollout_id`` under ``<load>/rollout``; without such a file start afresh.

        Groups that an earlier start generated after it are handed out in the place of their prompts.
        """
        if not self.args.rollout_global_dataset or not self.args.load or rollout_id is None:
            return
        if rollout_id < 0 or self._load_state(rollout_id):
            self._recovery.resume(max(rollout_id, -1))

    def _load_state(self, rollout_id: int) -> bool:
        path = _state_path(self.args.load, rollout_id, ".json")
        legacy = path.with_suffix(".pt")
        if path.exists():
            self.load_state_dict(json.loads(unseal(path.read_bytes(), _label(rollout_id), path)))
        elif legacy.exists():  # written by slime <= 0.3.1
            import torch

            path = legacy
            try:
                state = torch.load(legacy, weights_only=True)
            except Exception as e:
                raise ValueError(f"{legacy} cannot be read: {type(e).__name__}: {e}") from e
            self.load_state_dict(state)
        else:
            logger.warning("no data source state at %s: prompts start from the first one", path)
            return False
        logger.info("data source continues from %s: epoch %d, offset %d", path, self.epoch_id, self.sample_offset)
        return True


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A ``RolloutDataSource`` with a buffer in front: groups handed back come out again before new prompts.

    The buffer is part of the saved state, and so are groups that a rollout function still works on: they come first.
    ``--buffer-filter-path`` chooses what leaves it (default: the oldest).
    """

    accepts_samples = True

    def _begin(self, args: Args) -> None:
        super()._begin(args)
        self.buffer: list[Group] = []
        self.buffer_filter: Callable[..., Any] = pop_first

    def __init__(self, args: Args) -> None:
        super().__init__(args)
        if path := args.buffer_filter_path:
            self.buffer_filter = make_hook(path, "buffer_filter_path", load=load_function)

    def get_samples(self, num_samples: int) -> list[Group]:
        """Return ``num_samples`` groups, from the buffer first."""
        with self._draw_lock:
            groups = self._recovery.hand_out(self._get_samples_from_buffer(num_samples))
            return groups + super().get_samples(num_samples - len(groups))

    def _get_samples_from_buffer(self, num_samples: int) -> list[Group]:
        if not self.buffer or num_samples <= 0:
            return []
        groups = self.buffer_filter(self.args, None, self.buffer, num_samples)
        if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
            raise TypeError(
                f"{describe(self.buffer_filter)} returned {type(groups).__name__}; expected a list of groups"
            )
        if len(groups) > num_samples:
            raise ValueError(
                f"{describe(self.buffer_filter)} returned {len(groups)} groups, {num_samples} were asked for"
            )
        taken = set(map(id, groups))
        if any(id(group) in taken for group in self.buffer):
            raise ValueError(
                f"{describe(self.buffer_filter)} left groups in the buffer that it returned: they would be handed out "
                "twice; remove them from the list it is given"
            )
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        """Put groups at the end of the buffer. Raises AssertionError for a group of another size than configured."""
        expected = self.args.n_samples_per_prompt
        for group in samples:
            assert isinstance(group, list), f"a group must be a list of samples, got {type(group).__name__}"
            assert len(group) == expected, (
                f"a group of {len(group)} samples (indices {[s.index for s in iter_samples(group)]}) was handed back, "
                f"but --n-samples-per-prompt is {expected}"
            )
        with self._draw_lock:
            self.buffer += samples
            self._recovery.returned(samples)

    def _waiting_groups(self) -> list[Group]:
        return self.buffer

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._draw_lock:
            self.buffer = []
            super().load_state_dict(state)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Merge ``metadata`` into what is saved with the state."""
        with self._draw_lock:
            self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def get_buffer_length(self) -> int:
        return len(self.buffer)


def pop_first(args: Args, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Remove and return the first ``num_samples`` groups of ``buffer`` (fewer when it holds fewer)."""
    taken = buffer[:num_samples]
    del buffer[: len(taken)]
    return taken


def _label(rollout_id: int) -> str:
    return f"the prompts after rollout {rollout_id}"


def _state_path(root: str, rollout_id: int, suffix: str) -> Path:
    return Path(root) / "rollout" / f"global_dataset_state_dict_{rollout_id}{suffix}"


def draw_groups(args: Args, get_samples: Callable[[int], Any], count: int) -> list[list[Sample]]:
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


def hand_back(data_source: DataSource, groups: list[list[Sample]]) -> None:
    """Return groups that a rollout drew and did not use to ``data_source``."""
    if not groups:
        return
    if take_back := getattr(data_source, "take_back", None):
        take_back(groups)
    elif getattr(data_source, "accepts_samples", True):
        data_source.add_samples(groups)
    else:
        logger.warning("%d groups are dropped because %s takes none back", len(groups), type(data_source).__name__)
