"""The page that ``--dry-run`` prints: the whole configuration, then what the run would do."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from slime.arguments.plan import Plan, plan
from slime.arguments.plan.batch import batch_rows
from slime.arguments.plan.placement_text import placement_lines
from slime.arguments.plan.settings import derived_lines, given_lines
from slime.arguments.plan.words import WIDTH, bullets, count, labelled, wrapped
from slime.arguments.rules import model_defaults


def plan_text(args: Namespace, *, overlap: bool | None = None) -> str:
    """Return the page. The configuration comes first, so that the end of a terminal shows what matters.

    ``overlap``: see ``plan``.
    """
    from slime.arguments.view import to_yaml

    head = "# Resolved configuration (--dump-config FILE writes one that --config FILE reads)"
    return "\n".join([head, to_yaml(args), "-" * WIDTH, "", summary_text(args, overlap=overlap)])


def summary_text(args: Namespace, *, overlap: bool | None = None) -> str:
    """Return the page without the configuration: what was given and derived, and the plan."""
    planned = plan(args, overlap=overlap)
    lines: list[str] = []
    for title, body in sections(args, planned):
        lines += [title, *body, ""]
    return "\n".join([*lines, *verdict(planned)])


def sections(args: Namespace, planned: Plan) -> list[tuple[str, list[str]]]:
    """Return the titles and lines of the summary; what there is nothing to say about is left out."""
    from slime.arguments.plan.memory import memory_text

    found = [
        ("Given", given_lines(args)),
        ("Model", labelled(model_defaults.summary(args))),
        ("Derived", derived_lines(args)),
        ("Loop", labelled(planned.loop.rows)),
        ("Batches", labelled(batch_rows(planned.batch))),
        ("Placement", placement_lines(planned.placement, args)),
        ("Memory", memory_text(args).splitlines()),
        ("Warnings", bullets(planned.warnings)),
        ("Not checked", bullets(planned.unchecked)),
    ]
    return [(title, body) for title, body in found if body]


def verdict(planned: Plan) -> list[str]:
    """Return what a real run would do with this command line."""
    lines = []
    if planned.refused_without_gpus is not None:
        lines += wrapped(f"On a machine without GPUs a run would be refused: {planned.refused_without_gpus}")
    if planned.refused:
        return [*lines, "A real run would be refused:", *bullets(_merged(planned.refused))]
    seen = f" with {count(len(planned.warnings), 'warning')}" if planned.warnings else ""
    if planned.unchecked:
        return [*lines, f"A real run would start{seen}, if everything is there that could not be checked here."]
    return [*lines, f"A real run would start{seen}."]


def _merged(sentences: Sequence[str]) -> list[str]:
    """Sentences about flags that differ in nothing but the flag become one."""
    flags: dict[str, list[str]] = {}
    for sentence in sentences:
        flag, _, rest = sentence.partition(" ")
        flags.setdefault(rest, []).append(flag)
    return [
        f"{named[0]} {rest}" if len(named) == 1 else f"{rest.removeprefix('is ')}: {', '.join(named)}"
        for rest, named in flags.items()
    ]
