"""The routed experts of a session's turns, every token's once: those that it was first read with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from slime.utils.misc import decode_int32_meta_array

if TYPE_CHECKING:
    from slime.arguments.args import Args


@dataclass(frozen=True, eq=False)
class TurnExperts:
    """The experts of every token that a turn read: ``rows`` [tokens, layers, topk] are those from token ``start`` on,
    ``before`` has the others."""

    rows: np.ndarray
    start: int = 0
    before: TurnExperts | None = None

    @property
    def length(self) -> int:
        return self.start + len(self.rows)

    def after(self, start: int, before: TurnExperts) -> TurnExperts:
        """Return these with the first ``start`` of ``before`` in the place of their own, which are given up."""
        return TurnExperts(self.rows[start:].copy(), start, before)

    def first(self, count: int) -> np.ndarray:
        """Return those of the first ``count`` tokens: [count, layers, topk]."""
        parts: list[np.ndarray] = []
        one: TurnExperts | None = self
        while one is not None:
            if count > one.start:
                parts.append(one.rows[: count - one.start])
                count = one.start
            one = one.before
        return np.concatenate(parts[::-1])


def rows_of_reply(args: Args, meta_info: Mapping[str, Any], read: int) -> np.ndarray:
    """Return the experts in an engine's reply, whose request and answer have ``read`` tokens before the last one.

    ids: [read, num_layers, topk], in the smallest type that holds them. Raises RuntimeError for a reply without them.
    """
    from slime.batching.routed_experts import compact_experts  # it needs torch

    raw, shape = meta_info.get("routed_experts"), (read, args.num_layers, args.moe_router_topk)
    found = decode_int32_meta_array([] if raw is None else raw)
    if found.size != np.prod(shape):
        raise RuntimeError(
            f"the engine's reply has {found.size} routed experts, and --use-rollout-routing-replay needs {read} tokens "
            f"x {shape[1]} layers x top-{shape[2]}: is it of this run, and does it serve the model that is trained?"
        )
    rows: np.ndarray = compact_experts(found.reshape(shape), args.num_experts)
    return rows
