"""The schedule of a rollout: the optimizer step, data-parallel rank and micro-batch that train each sample.

A step trains ``global_batch_size`` trajectories; all samples of a trajectory (one rollout id) stay in one step. Its
samples are divided into micro-batches, whose number every rank must share equally, and these over the ranks.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from slime.batching.errors import ScheduleError
from slime.models.flops import flops_model
from slime.utils.declared import with_defaults

if TYPE_CHECKING:
    from slime.arguments.args import Args

logger = logging.getLogger(__name__)


class DpSchedule(NamedTuple):
    """partitions[rank]: positions of samples, in training order. micro_batch_indices[rank][k]: positions *within that
    partition* of micro-batch k, counted over all steps. num_microbatches[step]: per rank. global_batch_sizes[step]:
    trajectories."""

    partitions: list[list[int]]
    micro_batch_indices: list[list[list[int]]]
    num_microbatches: list[int]
    global_batch_sizes: list[int]


def build_dp_schedule(
    args: Args,
    train_parallel_config: Mapping[str, Any],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[Hashable],
) -> DpSchedule:
    """Divide samples over steps, ranks and micro-batches.

    args: ``use_dynamic_batch_size`` with ``max_tokens_per_gpu`` (first-fit by tokens, or with ``balance_by_flops``
    partitions of equal FLOPs), else ``micro_batch_size`` samples per micro-batch; ``balance_data`` evens out the FLOPs
    of ranks. train_parallel_config: ``dp_size``, ``cp_size``, ``vpp_size``, ``microbatch_group_size_per_vp_stage``.
    total_lengths: tokens per sample [n]. rollout_indices: rollout id per sample [n]; trajectories form steps in
    first-seen order. Trajectories past the last whole step are in no partition (see ``leftover_positions``).
    Micro-batches packed by tokens hold their samples by length, so that attention takes those of one length together,
    and exceed their limit when a step has too few samples for as many micro-batches as ranks share equally.

    Raises ScheduleError for less than one step of trajectories, a step with fewer samples than ranks, and micro-batches
    that the ranks (and virtual pipeline groups) cannot share equally.
    """
    args = with_defaults(args)
    lengths = [int(length) for length in total_lengths]
    if len(lengths) != len(rollout_indices):
        raise ScheduleError(f"{len(lengths)} total lengths but {len(rollout_indices)} rollout ids")
    dp_size = train_parallel_config["dp_size"]
    steps = _steps(rollout_indices, global_batch_size)
    weights = _weights(args, lengths)

    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(dp_size)]
    num_microbatches = []
    for step, members in enumerate(steps):
        if len(members) < dp_size:
            raise ScheduleError(
                f"step {step} has {len(members)} samples for {dp_size} data-parallel ranks; raise --global-batch-size "
                f"(now {global_batch_size} trajectories) or use fewer ranks"
            )
        micro_batches = _micro_batches(args, train_parallel_config, members, lengths, weights)
        num_microbatches.append(len(micro_batches) // dp_size)
        for rank, share in enumerate(_share_out(args, micro_batches, weights, dp_size)):
            for micro_batch in share:
                start = len(partitions[rank])
                partitions[rank] += micro_batch
                micro_batch_indices[rank].append(list(range(start, start + len(micro_batch))))
    return DpSchedule(partitions, micro_batch_indices, num_microbatches, [global_batch_size] * len(steps))


def leftover_positions(rollout_indices: Sequence[Hashable], global_batch_size: int) -> list[int]:
    """Return the positions of samples whose trajectories do not fill a whole step, in order; nothing trains them.

    The caller carries these samples over to the next rollout instead of dropping them.
    """
    by_trajectory = _group(rollout_indices)
    whole = len(by_trajectory) // global_batch_size * global_batch_size
    return sorted(position for members in list(by_trajectory.values())[whole:] for position in members)


def _group(rollout_indices: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Positions by rollout id, ids in first-seen order."""
    groups: dict[Hashable, list[int]] = {}
    for position, rollout_id in enumerate(rollout_indices):
        groups.setdefault(rollout_id, []).append(position)
    return groups


def _steps(rollout_indices: Sequence[Hashable], global_batch_size: int) -> list[list[int]]:
    if global_batch_size < 1:
        raise ScheduleError(f"--global-batch-size must be at least 1, got {global_batch_size}")
    trajectories = list(_group(rollout_indices).values())
    num_steps = len(trajectories) // global_batch_size
    if num_steps < 1:
        raise ScheduleError(
            f"{len(trajectories)} trajectories are less than one step of --global-batch-size {global_batch_size}; "
            "generate more (--rollout-batch-size x --n-samples-per-prompt) or lower it"
        )
    return [
        [position for members in trajectories[step * global_batch_size :][:global_batch_size] for position in members]
        for step in range(num_steps)
    ]


def _weights(args: Args, lengths: list[int]) -> list[float]:
    """FLOPs per sample where something is balanced by them, else tokens (not used for decisions then)."""
    if args.balance_data or args.balance_by_flops:
        return [float(flops) for flops in flops_model(args, mtp=args.enable_mtp_training).forward(lengths)]
    return [float(length) for length in lengths]


def _micro_batches(
    args: Args, config: Mapping[str, Any], members: list[int], lengths: list[int], weights: list[float]
) -> list[list[int]]:
    """Divide one step's samples into micro-batches (of positions) whose number all ranks can share."""
    vpp_size = config.get("vpp_size") or 1
    group = (config.get("microbatch_group_size_per_vp_stage") or 1) if vpp_size > 1 else 1
    multiple = config["dp_size"] * group
    sizes = [lengths[position] for position in members]
    if not args.use_dynamic_batch_size:
        size = args.micro_batch_size
        bins = [list(range(len(members)))[start : start + size] for start in range(0, len(members), size)]
        if len(bins) % multiple:
            raise ScheduleError(
                f"{len(members)} samples in micro-batches of --micro-batch-size {size} make {len(bins)} micro-batches, "
                f"expected a multiple of {multiple} (data-parallel ranks {config['dp_size']} x virtual pipeline group "
                f"{group}); change one of them or use --use-dynamic-batch-size"
            )
    else:
        capacity = args.max_tokens_per_gpu * config["cp_size"]
        if args.balance_by_flops:
            count = min(-(-sum(sizes) // capacity), len(members))
            bins = get_seqlen_balanced_partitions([weights[position] for position in members], count, equal_size=False)
        else:
            bins = first_fit_pack(sizes, capacity)
        target = -(-len(bins) // multiple) * multiple
        if multiple <= len(members) < target:
            return _fewer_than_fit(members, sizes, len(members) // multiple * multiple, capacity)
        bins = expand_bins_by_splitting(bins, sizes, target)
        bins = [sorted(micro_batch, key=sizes.__getitem__) for micro_batch in bins]
    return [[members[i] for i in micro_batch] for micro_batch in bins]


def _fewer_than_fit(members: list[int], sizes: list[int], count: int, capacity: int) -> list[list[int]]:
    """Divide samples into ``count`` micro-batches of about equal tokens, although some will exceed the limit.

    The number of micro-batches must be a multiple, and there are too few samples, most of them alone in theirs, for the
    next larger one.
    """
    bins = get_seqlen_balanced_partitions(sizes, count, equal_size=False)
    largest = max(sum(sizes[i] for i in micro_batch) for micro_batch in bins)
    logger.warning(
        "%d samples cannot fill more than %d micro-batches that all ranks share equally: the largest has %d tokens "
        "(limit %d). A larger --global-batch-size avoids that",
        len(members),
        count,
        largest,
        capacity,
    )
    return [[members[i] for i in micro_batch] for micro_batch in bins]


def _share_out(args: Args, micro_batches: list[list[int]], weights: list[float], dp_size: int) -> list[list[list[int]]]:
    """Give every rank the same number of micro-batches: strided, or with balanced FLOPs."""
    if not args.balance_data and not args.balance_by_flops:
        return [micro_batches[rank::dp_size] for rank in range(dp_size)]
    loads = [sum(weights[position] for position in micro_batch) for micro_batch in micro_batches]
    shares = get_seqlen_balanced_partitions(loads, dp_size, equal_size=True)
    return [[micro_batches[k] for k in share] for share in shares]


# Dividing samples into bins: first-fit by size, balanced partitions by largest differencing, splitting of bins


def first_fit_pack(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put every item, in order, into the first bin that has room for it; return bins of positions.

    A bin holds at most ``capacity``, except one that holds a single item larger than that.
    """
    if capacity <= 0:
        raise ScheduleError(f"bin capacity must be positive, got {capacity}")
    bins: list[list[int]] = []
    room = np.zeros(max(len(sizes), 1), dtype=np.int64)  # room[k] of bin k; 0 past the last bin
    for position, size in enumerate(sizes):
        fits = room[: len(bins)] >= size
        first = int(fits.argmax()) if bins else 0
        if not bins or not fits[first]:
            first = len(bins)
            bins.append([])
            room[first] = capacity
        bins[first].append(position)
        room[first] -= size
    return bins


def expand_bins_by_splitting(bins: Sequence[Sequence[int]], sizes: Sequence[int], target: int) -> list[list[int]]:
    """Split the largest bin with several items in two halves of about equal size until there are ``target`` bins.

    Halves come from longest-processing-time order: items by falling size, each to the lighter half. Positions within a
    bin stay ascending. Raises ScheduleError when only bins of one item are left too early.
    """
    # ties in size go to the earlier bin
    heap = [(-sum(sizes[i] for i in members), order, list(members)) for order, members in enumerate(bins)]
    splittable = [entry for entry in heap if len(entry[2]) > 1]
    done = {order: members for _, order, members in heap if len(members) <= 1}
    heapq.heapify(splittable)
    count = len(bins)
    while count < target:
        if not splittable:
            raise ScheduleError(
                f"{sum(len(members) for members in bins)} samples cannot fill {target} micro-batches: every micro-batch"
                " needs at least one sample. Use fewer data-parallel ranks or more samples per step"
            )
        _, order, members = heapq.heappop(splittable)
        halves: list[list[int]] = [[], []]
        weights = [0, 0]
        for i in sorted(members, key=lambda i: (-sizes[i], i)):
            # with equal weights (items of size 0) the counts decide, so that no half stays empty
            lighter = 0 if (weights[0], len(halves[0])) <= (weights[1], len(halves[1])) else 1
            halves[lighter].append(i)
            weights[lighter] += sizes[i]
        for half_order, half, weight in zip((order, count), halves, weights, strict=True):
            if len(half) > 1:
                heapq.heappush(splittable, (-weight, half_order, sorted(half)))
            else:
                done[half_order] = half
        count += 1
    return [members for _, members in sorted({**done, **{o: m for _, o, m in splittable}}.items())]


_Tree = tuple[Any, ...]
"""Items of one subset: a leaf ``(item,)``, a pair ``(tree, tree)``, or ``()``."""


class _State:
    """A partial division into k subsets, heaviest first; subsets past the stored ones are empty.

    Merging puts the heaviest subset of one state with the lightest of the other, so loads even out.
    """

    __slots__ = ("sets", "spread", "sums")

    def __init__(self, sums: list[float], sets: list[_Tree], k: int) -> None:
        self.sums, self.sets = sums, sets
        self.spread = sums[0] - (sums[-1] if len(sums) == k else 0)

    def merge(self, other: _State, k: int) -> _State:
        size = min(k, len(self.sums) + len(other.sums))
        pairs = []
        for i in range(size):
            j = size - 1 - i  # aligned against size, not k: subsets beyond both are empty on either side
            mine = (self.sums[i], self.sets[i]) if i < len(self.sums) else (0, ())
            theirs = (other.sums[j], other.sets[j]) if j < len(other.sums) else (0, ())
            # sets are trees of pairs: concatenating lists at every merge would be quadratic
            joined = (mine[1], theirs[1]) if mine[1] and theirs[1] else (mine[1] or theirs[1])
            pairs.append((mine[0] + theirs[0], joined))
        pairs.sort(key=lambda pair: -pair[0])
        return _State([weight for weight, _ in pairs], [members for _, members in pairs], k)


def karmarkar_karp(seqlen_list: Sequence[float], k_partitions: int, equal_size: bool) -> list[list[int]]:
    """Divide items into ``k_partitions`` subsets of nearly equal sums by largest differencing; return their positions.

    Karmarkar and Karp, "The Differencing Method of Set Partitioning" (1982), extended to k subsets: repeatedly merge
    the two partial divisions with the largest spread, heaviest subset to lightest. With ``equal_size`` all subsets get
    the same number of items, which needs ``len(seqlen_list) % k_partitions == 0``. Subsets may be empty without it.
    """
    k, order = k_partitions, sorted(range(len(seqlen_list)), key=lambda i: (seqlen_list[i], i))
    if k < 1 or (equal_size and len(order) % k):
        raise ScheduleError(f"{len(order)} samples cannot be divided into {k} partitions of equal size")
    states: list[_State] = []
    if equal_size:
        for start in range(0, len(order), k):
            chunk = order[start : start + k][::-1]
            states.append(_State([seqlen_list[i] for i in chunk], [(i,) for i in chunk], k))
    else:
        states = [_State([seqlen_list[i]], [(i,)], k) for i in order]
    heap = [(-state.spread, number, state) for number, state in enumerate(states)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = first.merge(second, k)
        heapq.heappush(heap, (-merged.spread, number, merged))
        number += 1
    final = heap[0][2].sets if heap else []
    return [_leaves(tree) for tree in final] + [[] for _ in range(k - len(final))]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """``karmarkar_karp`` with sorted, non-empty partitions that cover every item exactly once.

    Raises ScheduleError with fewer items than partitions.
    """
    if len(seqlen_list) < k_partitions:
        raise ScheduleError(f"{len(seqlen_list)} samples are fewer than {k_partitions} partitions")
    partitions = [sorted(partition) for partition in karmarkar_karp(seqlen_list, k_partitions, equal_size)]
    if all(partitions):
        return partitions
    # only items of size 0 can leave a partition empty; any item of a crowded one will do
    for partition in partitions:
        if not partition:
            partition.append(max(partitions, key=len).pop())
    return partitions


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Return the inverse permutation: ``result[idx_map[i]] == i``."""
    reverse = [0] * len(idx_map)
    for i, position in enumerate(idx_map):
        reverse[position] = i
    return reverse


def _leaves(tree: _Tree) -> list[int]:
    """Items of a tree of pairs whose leaves are 1-tuples, without recursion (it can be as deep as the item count)."""
    found, stack = [], [tree]
    while stack:
        node = stack.pop()
        if len(node) == 1:
            found.append(node[0])
        else:
            stack.extend(node)
    return found
