"""Put the quickstart's command lines into ``docs/en/get_started/quick_start.md``; ``--check`` only compares.

Each code fence below a comment ``<!-- recipe: NAME -->`` is replaced by the command of that name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from examples.quickstart import recipe
from examples.quickstart.stages import show_command
from tools.generated_page import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "en" / "get_started" / "quick_start.md"
ROOT = Path("runs/quickstart")
_BLOCK = re.compile(r"(<!-- recipe: (\w+) -->\n```bash\n)(?:(?!```).*\n)*(```)")


def commands() -> dict[str, str]:
    """Return name -> shell text of every command of the quickstart, with seed 0."""
    paths = recipe.Paths(ROOT)
    grpo = {
        name: ["train.py", *recipe.grpo(paths, 0, rollouts=recipe.GRPO_ROLLOUTS, shuffled=shuffled)]
        for name, shuffled in (("grpo", False), ("shuffled", True))
    }
    modules = {"model": recipe.make_model(paths, 0), "data": recipe.make_data(paths, 0)}
    lines = {"sft": [recipe.SFT_SCRIPT, *recipe.sft(paths, 0)], **grpo}
    lines |= {name: ["-m", *words] for name, words in modules.items()}
    return {name: show_command(["python", *words]) for name, words in lines.items()}


def render() -> str:
    """Return the page with today's command lines. Raises KeyError for a comment that names no command."""
    known = commands()
    return _BLOCK.sub(lambda block: f"{block[1]}{known[block[2]]}\n{block[3]}", PAGE.read_text(encoding="utf-8"))


def main() -> int:
    """Rewrite the page; with ``--check`` only report (exit status 1) that it is out of date."""
    return write_or_check(
        __doc__, PAGE, render(), mistake="does not show the quickstart's command lines", module=__spec__.name
    )


if __name__ == "__main__":
    sys.exit(main())
