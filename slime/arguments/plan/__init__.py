"""What a run would do, worked out from its flags alone: loop, batches, placement, memory.

``plan(args)`` gives the numbers, ``plan.text.plan_text(args)`` the page that ``--dry-run`` prints. Ray, engines and
GPUs are not needed; the run itself plans its slots with ``plan.placement``.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.arguments.plan.batch import BatchPlan
    from slime.arguments.plan.loop import LoopPlan
    from slime.arguments.plan.processes import Placement


@dataclass(frozen=True)
class Plan:
    """A run before it starts.

    ``refused``: sentences that a real run would end with at once; ``refused_without_gpus``: what one on a machine
    without GPUs would, else None. ``unchecked``, ``warnings``: what the rules of the flags found under ``--dry-run`` (a
    real run is told when it is parsed), and engines that do not fit nodes.
    """

    loop: LoopPlan
    batch: BatchPlan
    placement: Placement
    refused: tuple[str, ...]
    refused_without_gpus: str | None
    unchecked: tuple[str, ...]
    warnings: tuple[str, ...]


def plan(args: Namespace, *, overlap: bool | None = None) -> Plan:
    """Return the plan of ``args``, from ``parse_args``.

    ``overlap``: whether ``train_async.py`` runs it; None looks at the name of the running program. Raises ValueError
    where slots, ranks or engines do not fit together.
    """
    from slime.arguments.plan.batch import batch_of
    from slime.arguments.plan.loop import loop_of
    from slime.arguments.plan.placement_text import torn_warnings
    from slime.arguments.plan.processes import placement_of
    from slime.arguments.plan.refusals import refused, refused_without_gpus

    if overlap is None:
        overlap = Path(sys.argv[0]).name == "train_async.py"
    placement = placement_of(args)
    return Plan(
        loop=loop_of(args, overlap=overlap),
        batch=batch_of(args),
        placement=placement,
        refused=tuple(refused(args, overlap=overlap)),
        refused_without_gpus=refused_without_gpus(args),
        unchecked=tuple(getattr(args, "unchecked", ())),
        warnings=(*getattr(args, "warnings", ()), *torn_warnings(placement)),
    )
