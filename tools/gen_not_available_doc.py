"""Write ``docs/en/reference/not_available.md``, flags by reason, from ``slime/arguments/not_yet.toml``.

``python -m tools.gen_not_available_doc``; ``--check`` only compares.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from slime.arguments.availability import is_available, reason_of, reasons, refused_values
from slime.arguments.command_line import flags_by_option
from slime.arguments.flag import Flag
from tools.generated_page import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "en" / "reference" / "not_available.md"
HEAD = """# Flags that are not available yet

{count} of {all} [flags](arguments.md) are known, but refused with another value than their default: a run that ignored
them would be another one than was meant. `--dry-run` lists them and checks the rest of the command line.
Each has a reason here, and what to use instead. (Flags that can have no effect here warn and say why.)
"""


def render() -> str:
    """Return the page."""
    every = {flag.dest: flag for flag in flags_by_option().values()}
    missing = [f for f in every.values() if not f.traits.inert and (refused_values(f) or not is_available(f))]
    parts = [HEAD.format(count=len(missing), all=len(every))]
    for reason in reasons():
        own = ", ".join(_shown(flag) for flag in missing if reason_of(flag) is reason)
        text = re.sub(r"(--[a-z\d-]+[a-z\d])", r"`\1`", f"{reason.why} Instead: {reason.instead}.")
        parts.append(f"## {reason.name}\n\n{text}\n\n{own}\n")
    return "\n".join(parts)


def _shown(flag: Flag) -> str:
    values = refused_values(flag)
    return f"`{flag.option}`" + (f" ({', '.join(f'`{value}`' for value in values)})" if values else "")


def main() -> int:
    """Rewrite the page; with ``--check`` only report (exit status 1) that it is out of date."""
    return write_or_check(__doc__, PAGE, render(), mistake="does not list the flags", module=__spec__.name)


if __name__ == "__main__":
    sys.exit(main())
