"""Put the table of built-in rewards into ``docs/en/get_started/usage.md``; ``--check`` only compares.

The rows below the comment ``<!-- reward types -->`` are those of ``slime.algorithms.reward_types``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from slime.algorithms.reward_types import REWARD_TYPES
from tools.generated_page import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "en" / "get_started" / "usage.md"
_TABLE = re.compile(r"(<!-- reward types -->\n)(?:\|.*\n)*")


def render() -> str:
    """Return the page with today's table."""
    lines = ["| `--rm-type` | reads |", "|---|---|"]
    lines += [f"| `{kind.name}` | {kind.reads} |" for kind in REWARD_TYPES.values()]
    table = "".join(f"{line}\n" for line in lines)
    return _TABLE.sub(lambda found: found[1] + table, PAGE.read_text(encoding="utf-8"))


def main() -> int:
    """Rewrite the page; with ``--check`` only report (exit status 1) that it is out of date."""
    return write_or_check(__doc__, PAGE, render(), mistake="does not list the built-in rewards", module=__spec__.name)


if __name__ == "__main__":
    sys.exit(main())
