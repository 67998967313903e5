"""The page that ``--dry-run`` prints: what the run would do; with ``--dry-run=full`` the whole configuration first."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import groupby

from slime.arguments.args import Args
from slime.arguments.command_line import all_flags
from slime.arguments.files.run_config import OWN_FLAGS, to_yaml
from slime.arguments.flag import Flag
from slime.arguments.rules import model_defaults
from slime.preflight.plan import Plan, plan
from slime.preflight.plan.format import WIDTH, bullets, count, labeled, wrapped
from slime.preflight.plan.loop import batch_rows
from slime.preflight.plan.memory import memory
from slime.preflight.plan.memory_text import fit_sentence, memory_text
from slime.preflight.plan.placement_text import placement_lines
from slime.utils.plain import plain

PARALLEL_SIZES = ("world_size", "data_parallel_size")
SAME_IN_EVERY_RUN = frozenset({"Megatron: training scripts"})
"""Groups whose derived values are the same in every run."""
ONLY_IN_FULL = ("Given", "Derived")
NO_BREAK = "\u00a0"
LONG = 48


def plan_text(args: Args, *, overlap: bool | None = None) -> str:
    """Return the page; in full the configuration comes first, so that the end of a terminal shows what matters.

    ``overlap``: see ``plan``.
    """
    if args.dry_run != "full":
        return summary_text(args, overlap=overlap)
    head = "# Resolved configuration (--dump-config FILE writes one that --config FILE reads)"
    return "\n".join([head, to_yaml(args), "-" * WIDTH, "", summary_text(args, overlap=overlap)])


def summary_text(args: Args, *, overlap: bool | None = None) -> str:
    """Return the page without the configuration: the plan, in full also what was given and derived."""
    planned = plan(args, overlap=overlap)
    lines: list[str] = []
    for title, body in sections(args, planned):
        if args.dry_run == "full" or title not in ONLY_IN_FULL:
            lines += [title, *body, ""]
    return "\n".join([*lines, *verdict(args, planned)])


def sections(args: Args, planned: Plan) -> list[tuple[str, list[str]]]:
    """Return the titles and lines of the summary; what there is nothing to say about is left out."""
    found = [
        ("Given", given_lines(args)),
        ("Model", labeled(model_defaults.summary(args))),
        ("Derived", derived_lines(args)),
        ("Loop", labeled(planned.loop.rows)),
        ("Batches", [] if args.serve_only else labeled(batch_rows(planned.batch))),
        ("Placement", placement_lines(planned.placement, args)),
        ("Memory", memory_text(args).splitlines()),
        ("Warnings", bullets(planned.warnings)),
        ("Not checked", bullets(planned.unchecked)),
    ]
    return [(title, body) for title, body in found if body]


def verdict(args: Args, planned: Plan) -> list[str]:
    """Return what a real run would do with this command line, and on which GPUs it fits by the estimate."""
    lines: list[str] = []
    if planned.refused_without_gpus is not None:
        lines += wrapped(f"On a machine without GPUs a run would be refused: {planned.refused_without_gpus}")
    if planned.refused:
        return [*lines, "A real run would be refused:", *bullets(_merged(planned.refused))]
    fits, memory_sentence = True, ""
    with contextlib.suppress(ValueError):  # without an estimate, which the section says
        fits, memory_sentence = fit_sentence(args, memory(args))
    if not fits:
        return [*lines, *wrapped(memory_sentence)]
    seen = f" with {count(len(planned.warnings), 'warning')}" if planned.warnings else ""
    absent = ", if everything is there that could not be checked here" if planned.unchecked else ""
    return [*lines, *wrapped(f"A real run would start{seen}{absent}. {memory_sentence}".rstrip())]


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


def given_lines(args: Args) -> list[str]:
    """The flags that were given, by group, with the values that were given."""
    values = {**vars(args), **args.replaced_values}
    groups: dict[str, list[str]] = {}
    for flag in all_flags():
        if flag.dest in args.explicit_flags - OWN_FLAGS and flag.dest in values:
            groups.setdefault(flag.group, []).append(_as_typed(flag, values[flag.dest]))
    return _wrapped(list(groups.items()))


def derived_lines(args: Args) -> list[str]:
    """The flags whose value is neither the default nor what was given, and the trainer's sizes.

    Model flags taken from the checkpoint's config have their own section.
    """
    groups: dict[str, list[str]] = {}
    from_config = model_defaults.taken(args)
    known = {flag.dest: flag for flag in all_flags()}
    for flag in known.values():
        value = getattr(args, flag.dest, flag.default)
        stays = flag.dest in args.explicit_flags and flag.dest not in args.replaced_values
        if not stays and flag.dest not in from_config and value != flag.default and flag.group not in SAME_IN_EVERY_RUN:
            groups.setdefault(flag.group, []).append(_as_typed(flag, value))
    sizes = [] if args.debug_rollout_only else [f"{name}={getattr(args, name)}" for name in PARALLEL_SIZES]
    return _wrapped([*groups.items(), ("parallel sizes", sizes)])


def _wrapped(groups: list[tuple[str, list[str]]]) -> list[str]:
    rows = [(group, "  ".join(words).replace("  ", " ")) for group, words in groups if words]
    return [line.replace(NO_BREAK, " ").rstrip() for line in labeled(rows)]


def _as_typed(flag: Flag, value: object) -> str:
    """The flag as it would be typed; a short value and its flag stay on one line."""
    if flag.action in ("true", "false"):
        switched = value is (flag.action == "true")
        return flag.option if switched else f"{flag.dest}={value}"
    if flag.action == "tristate" and isinstance(value, bool):
        return flag.options[0] if value else flag.options[-1]
    text = _shown(flag.dest, value)
    return f"{flag.option}{NO_BREAK if len(text) < LONG else ' '}{text}"


def _shown(name: str, value: object) -> str:
    value = plain(name, value)
    if isinstance(value, list | tuple) and len(value) > 8:
        return "+".join(f"[{item}]*{len(list(same))}" for item, same in groupby(value))
    if isinstance(value, list | tuple):
        return NO_BREAK.join(map(str, value)) or "[]"
    return str(value).replace(" ", NO_BREAK)
