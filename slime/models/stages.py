"""Spread of decoder layers over pipeline stages, as Megatron does it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.arguments.args import Args


def stage_letters(args: Args, layers: int, mtp: int, pp: int, vpp: int) -> list[str]:
    """Return virtual stage 0 of all ranks, virtual stage 1 of all ranks, ..., in the letters of a layout string."""
    if layout := args.pipeline_model_parallel_layout:
        return layout_stages(layout)
    return _even_stages(args, _layers_per_rank(args, layers, pp), vpp, mtp)


def first_layers(args: Args) -> list[int]:
    """Return the first decoder layer, counted from 0, of every (virtual) stage that has one."""
    pp, vpp = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    counts = [stage.count("t") for stage in stage_letters(args, args.num_layers, 0, pp, vpp)]
    starts = itertools.accumulate(counts, initial=0)
    return [start for start, count in zip(starts, counts, strict=False) if count]


def _layers_per_rank(args: Args, layers: int, pp: int) -> list[int]:
    """Return the layers of each pipeline rank, where embedding and loss may count as one."""
    first = args.decoder_first_pipeline_num_layers
    last = args.decoder_last_pipeline_num_layers
    if pp == 1 or (first is None and last is None):
        counted = layers + args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
        return [counted // pp] * pp
    middle = pp - (first is not None) - (last is not None)
    each = (layers - (first or 0) - (last or 0)) // middle if middle else 0
    counts = [each] * pp
    if first is not None:
        counts[0] = first
    if last is not None:
        counts[-1] = last
    return counts


def _even_stages(args: Args, counts: list[int], vpp: int, mtp: int) -> list[str]:
    """Return the chunks in the order of the layers, in the letters of a layout string."""
    stages = ["t" * (count // vpp) for _ in range(vpp) for count in counts]
    if args.account_for_embedding_in_pipeline_split:
        stages[0] = stages[0][1:]
    if args.account_for_loss_in_pipeline_split:
        stages[-1] = stages[-1][1:]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * mtp + "L"
    return stages


_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def layout_stages(layout: str | Iterable[Iterable[object]]) -> list[str]:
    """Return the stages of a layout as strings of letters; lists of names are taken too."""
    if not isinstance(layout, str):
        return ["".join(_LETTERS.get(str(name), str(name)) for name in stage) for stage in layout]
    text = layout.replace(",", "")
    for repeated in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(repeated, lambda match: match.group(1) * int(match.group(2)), text)
    return text.split("|")
