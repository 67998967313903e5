"""Routed experts that an engine rank holds, so that it is sent those alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_EXPERT = re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class ExpertPlaces:
    """Experts in the order of their numbers on ``ranks`` engine ranks, ``per_rank`` on each, and again on the next."""

    ranks: int
    per_rank: int

    @classmethod
    def of_engine(cls, info: Mapping[str, Any], num_experts: int | None) -> ExpertPlaces | None:
        """Return the places in the engine with the ``/server_info`` ``info``; None where every rank gets everything.

        That is without expert parallelism, where ranks share an expert, and where the engine moves experts around.
        """
        ep = int(info.get("ep_size") or 1)
        whole = int(info.get("tp_size") or 1) == ep * int(info.get("moe_dp_size") or 1)
        moved = info.get("enable_eplb") or info.get("ep_num_redundant_experts")
        in_order = info.get("init_expert_location", "trivial") == "trivial" and int(info.get("pp_size") or 1) == 1
        if ep == 1 or not whole or moved or not in_order or not num_experts or num_experts % ep:
            return None
        return cls(ep, num_experts // ep)

    def holds(self, rank: int, name: str) -> bool:
        """Return True if the engine's rank needs the tensor with this Hugging Face name."""
        found = _EXPERT.search(name)
        return found is None or int(found[1]) // self.per_rank == rank % self.ranks
