"""Dividing samples into bins: first-fit by size, balanced partitions by largest differencing, splitting of bins."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.batching.errors import ScheduleError


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
