"""Write what the small versions of the examples learned into the documentation's index.

python -m tools.gen_examples_doc [runs/retool/grpo/result.json ...]

Result files are added to ``examples/results.jsonl``, in place of an older one of the same example, seed and kind; the
table in ``docs/en/README.md`` is written from there.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "en" / "README.md"
RESULTS = ROOT / "examples" / "results.jsonl"
HEAD = (
    "| example | data set | seed | rollouts | after SFT | after GRPO | target | with shuffled rewards | minutes |\n"
    "|---|---|---|---|---|---|---|---|---|"
)
_TABLE = re.compile(r"(<!-- results: begin -->\n).*?(<!-- results: end -->)", re.DOTALL)
Result = dict[str, Any]


def read() -> list[Result]:
    """Return the results that are kept."""
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def merged(kept: Iterable[Result], new: Iterable[Result]) -> list[Result]:
    """Return both in order of example, seed and kind, of equal ones the last, with the fields of the table."""
    fields = ("example", "seed", "shuffled", "rollouts", "before", "after", "targets", "seconds", "cores")
    found = {(one["example"], one["seed"], one["shuffled"]): one for one in (*kept, *new)}
    return [{field: found[key][field] for field in fields if field in found[key]} for key in sorted(found)]


def table(results: Iterable[Result]) -> str:
    """Return the table: a row for each data set of each seed, its control (of as many rollouts or not) at the end."""
    results = list(results)
    controls = {(one["example"], one["seed"]): one for one in results if one["shuffled"]}
    rows = [HEAD]
    for one in results:
        if one["shuffled"]:
            continue
        control = controls.get((one["example"], one["seed"]))
        for name, before in one["before"].items():
            last = f"{control['after'][name]:.1%} after {control['rollouts']}" if control else ""
            link = f"[{one['example']}](../../examples/{one['example']}/README.md)"
            target = one.get("targets", {}).get(name)
            seconds = one.get("seconds", {})
            cells = [
                link, f"`{name}`", str(one["seed"]), str(one["rollouts"]), f"{before:.1%}", f"{one['after'][name]:.1%}",
                f"{target:.0%}" if target else "", last,
                f"{sum(seconds.values()) / 60:.1f} on {one['cores']}" if "sft" in seconds else "",  # from nothing
            ]  # fmt: skip
            rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def render() -> str:
    """Return the page with the table of the results that are kept."""
    page = PAGE.read_text(encoding="utf-8")
    return _TABLE.sub(lambda found: found[1] + table(read()) + found[2], page)


def add(paths: Iterable[Path]) -> None:
    """Add result files to those that are kept, and write the page."""
    new = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    lines = (json.dumps(one) + "\n" for one in merged(read(), new))
    RESULTS.write_text("".join(lines), encoding="utf-8")
    PAGE.write_text(render(), encoding="utf-8")


def main() -> int:
    """Command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="*", help="result.json of runs to add")
    add(parser.parse_args().results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
