"""The reward of a group (``--group-rm --custom-rm-path``), and the evaluation beside it."""

from __future__ import annotations

import copy
from argparse import Namespace
from dataclasses import replace
from itertools import combinations
from typing import Any

from slime.rollout.cancelling import gather_or_cancel
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.misc import load_function
from slime.utils.types import Sample


def pairs_of(count: int, opponents: int) -> list[tuple[int, int]]:
    """Return who plays whom: everybody against the next ``opponents`` of a circle, in which all meet as often.

    With ``opponents`` of at least half of the others that is everybody against everybody.
    """
    if 2 * opponents >= count - 1:
        return list(combinations(range(count), 2))
    return [(i, (i + step) % count) for i in range(count) for step in range(1, opponents + 1)]


async def tournament(args: Namespace, samples: list[Sample], **kwargs: Any) -> list[float]:
    """Return the share of its comparisons that each sample of the group won; a tie is half a win.

    ``--custom-config-path`` names the judge, ``tournament_judge: package.module.function`` (``await fn(args, first,
    second)`` is 1 when the first is better, 0 when the second is), and ``tournament_opponents`` (default: all). A
    sample that did not end by itself loses against one that did, without being judged.
    """
    judge = load_function(args.tournament_judge)
    played = pairs_of(len(samples), getattr(args, "tournament_opponents", len(samples)))

    async def result(i: int, j: int) -> float:
        ended = [sample.status == Sample.Status.COMPLETED for sample in (samples[i], samples[j])]
        if not all(ended):
            return 0.5 if ended[0] == ended[1] else float(ended[0])
        return float(await judge(args, samples[i], samples[j]))

    wins, games = [0.0] * len(samples), [0] * len(samples)
    for (i, j), won in zip(played, await gather_or_cancel([result(*pair) for pair in played]), strict=True):
        wins[i] += won
        wins[j] += 1 - won
        games[i] += 1
        games[j] += 1
    return [won / max(1, count) for won, count in zip(wins, games, strict=True)]


def evaluate(args: Namespace, rollout_id: int, data_source: Any, evaluation: bool = True) -> Any:
    """Evaluate single answers (``--eval-function-path``): there is nothing to compare them with.

    They are scored by the reward that their data set names in ``--eval-config``, else ``tournament_eval_rm``, else
    ``--rm-type``.
    """
    alone = copy.copy(args)
    alone.group_rm = False
    alone.custom_rm_path = getattr(args, "tournament_eval_rm", None)
    alone.eval_datasets = [
        replace(one, custom_rm_path=alone.custom_rm_path) if one.custom_rm_path == args.custom_rm_path else one
        for one in args.eval_datasets
    ]
    return generate_rollout(alone, rollout_id, data_source, evaluation=True)
