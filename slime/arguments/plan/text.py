"""The page that ``--dry-run`` prints: the whole configuration, then what the run would do."""

from __future__ import annotations

from argparse import Namespace

from slime.arguments.plan import Plan, plan
from slime.arguments.plan.batch import batch_rows
from slime.arguments.plan.placement_text import placement_lines, torn_warnings
from slime.arguments.plan.settings import derived_lines, given_lines
from slime.arguments.plan.words import bullets, count, labelled, paragraph


def plan_text(args: Namespace, *, overlap: bool | None = None) -> str:
    """Return the page. The configuration comes first, so that the end of a terminal shows what matters.

    ``overlap``: see ``plan``.
    """
    from slime.arguments.view import to_yaml

    head = "# Resolved configuration. --dump-config FILE writes it, --config FILE reads it."
    return f"{head}\n{to_yaml(args)}\n{summary_text(args, overlap=overlap)}"


def summary_text(args: Namespace, *, overlap: bool | None = None) -> str:
    """Return the page without the configuration: what was given and derived, and the plan."""
    from slime.arguments.plan.memory import memory_text

    planned = plan(args, overlap=overlap)
    sections = [
        ("Given", given_lines(args)),
        ("Derived", derived_lines(args)),
        ("Loop", labelled(planned.loop.rows)),
        ("Batches", labelled(batch_rows(planned.batch))),
        ("Placement", placement_lines(planned.placement, args)),
        ("Memory", memory_text(args).splitlines()),
        ("Warnings", bullets([*planned.warnings, *torn_warnings(planned.placement)])),
        ("Not checked", bullets(planned.unchecked)),
    ]
    lines: list[str] = []
    for title, body in sections:
        if body:
            lines += [title, *body, ""]
    return "\n".join([*lines, *_verdict(planned)])


def _verdict(planned: Plan) -> list[str]:
    """What a real run would do with this command line."""
    lines = []
    if planned.refused_without_gpus is not None:
        lines += paragraph(f"On a machine without GPUs it would be refused: {planned.refused_without_gpus}.")
    if planned.refused:
        why = bullets(planned.refused)
        return [*lines, f"A real run would be refused, for {count(len(planned.refused), 'reason')}:", *why]
    if planned.unchecked:
        things = count(len(planned.unchecked), "thing")
        return [*lines, f"A real run would start once {things} that this machine lacks are there (Not checked, above)."]
    return [*lines, "A real run would start."]
