"""Write ``docs/en/reference/arguments.md`` from the declarations: ``python -m tools.gen_arguments_doc [--check]``."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

from slime.arguments.availability import is_available, refused_values
from slime.arguments.command_line import all_flags
from slime.arguments.flag import Flag
from slime.arguments.groups import ALL_GROUPS
from slime.arguments.help import default_text, form
from slime.arguments.older_flags import CRITIC, NOTHING, OVERRIDES, REFUSED, OlderFlag, older_flags
from slime.arguments.passthrough.catalog import MEGATRON, ROUTER, SGLANG
from slime.arguments.passthrough.megatron import SCRIPT
from tools.markdown import slug

PAGE = Path(__file__).parents[1] / "docs" / "en" / "reference" / "arguments.md"
OPENING = f"""<!-- Written by tools/gen_arguments_doc.py from the declarations in slime/arguments. -->
# Command-line arguments

Every flag of `train.py` and `train_async.py`. The same text comes from `--help` (slime's own flags), `--help WORD`
(groups and flags of that name, from every source), `--help --FLAG` (everything about one flag) and `--help all`. An
unknown flag is refused with the nearest known one; `--ignore-unknown-flags` turns that into a warning. Values can also
stand in a YAML file: `--config FILE`.

The namespace attribute is the flag without dashes in front and with `_` for `-`, unless the table names another one.
Flags come from four sources: slime (below), megatron-core {MEGATRON.pinned}, SGLang {SGLANG.pinned} with the prefix
`--sglang-`, and sglang-router {ROUTER.pinned} (`--router-*`). With other installed versions their flags are read from
the installed packages. A checkout of Megatron-LM on the `PYTHONPATH` decides about no flag unless
`SLIME_MEGATRON_CORE=checkout` or megatron-core is not installed: then the parser of its training scripts decides about
Megatron's flags, and what slime does not act on is refused.
"""
PASSED = {
    "megatron": "Flags of megatron-core's configuration classes, spelled as Megatron-LM spells them.",
    "sglang": "Flags of the SGLang server. What slime sets for every engine itself is left out.",
    "router": "Flags of the router. Its address is `--sglang-router-ip` and `--sglang-router-port`.",
}

SCRIPT_WORDS = "Flags that only Megatron-LM's own training scripts read; launch scripts may keep them."


OLDER = "flags of older releases"
OLDER_WORDS = """\
Launch scripts of slime <= 0.3.0, and those for the flags of SGLang 0.4.9 to 0.5.19, may keep these. A warning says what
each is now: on the command line, in `--config`, `--custom-config-path` and role files, and (without the prefix
`--sglang-`) in the `overrides` of `--sglang-config`. Where the current flag is given too, it wins in a file, and on the
command line the later one does. A refused flag ends the run; a dry run lists it and continues."""


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _row(flag: Flag) -> str:
    attribute = "" if flag.dest == flag.option[2:].replace("-", "_") else f" → `{flag.dest}`"
    notes = [flag.help]
    if flag.traits.inert:
        notes.append(f"**Without effect** (a warning says so): {flag.traits.inert}.")
    elif not is_available(flag):
        notes.append("**Not available yet.**")
    elif refused_values(flag):
        notes.append(f"**Not available yet**: {', '.join(map(str, refused_values(flag)))}.")
    default = default_text(flag).removeprefix("default: ")
    if flag.action == "false":
        default = f"{flag.dest} is true"
    return f"| `{_escape(form(flag))}`{attribute} | {_escape(default)} | {_escape(' '.join(n for n in notes if n))} |"


def _table(flags: Iterable[Flag]) -> str:
    return "\n".join(["| Flag | Default | Meaning |", "|---|---|---|", *map(_row, flags)])


def _older_row(row: OlderFlag) -> str:
    name = row.option + (f" {row.value}" if row.value else "")
    if row.now == NOTHING:
        meaning = "without effect"
    elif row.now == REFUSED:
        meaning = "**refused**"
    elif row.now.startswith(CRITIC):
        meaning = f"`{row.target}` of the critic: `{OVERRIDES}`, or `--megatron-config-path`"
    else:
        meaning = f"`{row.now}`"
    return f"| `{name}` | {_escape(meaning + (f': {row.about}' if row.about else ''))} |"


def _older_table() -> str:
    rows = [row for rows in older_flags().values() for row in rows]
    return "\n".join(["| Flag | Now |", "|---|---|", *map(_older_row, rows)])


def _heading(title: str) -> str:
    return f"{title[0].upper()}{title[1:]}"


def _contents(titles: Iterable[str]) -> str:
    """Links to the groups, whose titles are the anchors."""
    links = ", ".join(f"[{title}](#{slug(_heading(title))})" for title in titles)
    return "\n".join(textwrap.wrap(f"Groups: {links}.", 120, break_long_words=False, break_on_hyphens=False)) + "\n"


def render() -> str:
    """The whole page."""
    flags = all_flags()
    parts = [OPENING, _contents(dict.fromkeys([*(flag.group for flag in flags), OLDER]))]
    for group in ALL_GROUPS:
        members = [flag for flag in flags if flag.group == group.title]
        parts.append(f"## {_heading(group.title)}\n\n{_table(members)}\n")
    for source in PASSED:
        passed = [flag for flag in flags if flag.source == source]
        for title in dict.fromkeys(flag.group for flag in passed):
            words = SCRIPT_WORDS if title == SCRIPT else PASSED[source]
            members = sorted((flag for flag in passed if flag.group == title), key=lambda flag: flag.option)
            parts.append(f"## {_heading(title)}\n\n{words}\n\n{_table(members)}\n")
    parts.append(f"## {_heading(OLDER)}\n\n{OLDER_WORDS}\n\n{_older_table()}\n")
    return "\n".join(parts)


def main() -> int:
    """Write the page; with ``--check`` only say (exit status 1) whether it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="do not write; fail when the page is out of date")
    page = render()
    if not parser.parse_args().check:
        PAGE.parent.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(page)
        return 0
    if PAGE.is_file() and PAGE.read_text() == page:
        return 0
    print(f"{PAGE} does not match the declarations; run `python -m tools.gen_arguments_doc`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
