"""The plan of a run, computed from its flags alone: loop, batches, placement, memory.

``plan(args)`` gives the numbers, ``render.plan_text(args)`` the page that ``--dry-run`` prints. Ray, engines and GPUs
are not needed; a run places its slots and engines with the same functions, ``slime.arguments.placement``.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from pathlib import Path

from slime.arguments.args import Args
from slime.arguments.device import finalize_for_device
from slime.arguments.errors import ArgumentError
from slime.arguments.rules.loop import refuse_impossible_loop
from slime.preflight.plan.loop import BatchPlan, LoopPlan, batch_of, loop_of
from slime.preflight.plan.placement import Placement, placement_of
from slime.preflight.plan.placement_text import split_warnings


@dataclass(frozen=True)
class Plan:
    """A run before it starts.

    ``refused``: why a real run would end at once; ``refused_without_gpus``: why one on a machine without GPUs would,
    else None. ``unchecked``, ``warnings``: what the rules of the flags found under ``--dry-run`` (a real run reports it
    while parsing), and engines that do not fit nodes.
    """

    loop: LoopPlan
    batch: BatchPlan
    placement: Placement
    refused: tuple[str, ...]
    refused_without_gpus: str | None
    unchecked: tuple[str, ...]
    warnings: tuple[str, ...]


def plan(args: Args, *, overlap: bool | None = None) -> Plan:
    """Return the plan of ``args``, from ``parse_args``.

    ``overlap``: whether ``train_async.py`` runs it; None looks at the name of the running program. Raises ValueError
    where slots, ranks or engines do not fit together.
    """
    if overlap is None:
        overlap = Path(sys.argv[0]).name == "train_async.py"
    placement = placement_of(args)
    # Only a dry run keeps findings on the namespace; ``parse_args`` of a real run has reported and removed them.
    found = {name: tuple(getattr(args, name, ())) for name in ("not_available", "unchecked", "warnings")}
    return Plan(
        loop=loop_of(args, overlap=overlap),
        batch=batch_of(args),
        placement=placement,
        refused=(*found["not_available"], *_refused_loop(args, overlap)),
        refused_without_gpus=_refused_without_gpus(args),
        unchecked=found["unchecked"],
        warnings=(*found["warnings"], *split_warnings(placement)),
    )


def _refused_loop(args: Args, overlap: bool) -> tuple[str, ...]:
    try:
        refuse_impossible_loop(args, overlap=overlap)
    except ArgumentError as error:
        return (str(error),)
    return ()


def _refused_without_gpus(args: Args) -> str | None:
    try:
        finalize_for_device(copy.deepcopy(args), "cpu")
    except ArgumentError as error:
        return str(error)
    return None
