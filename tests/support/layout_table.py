"""The table of docs/en/advanced/layouts.md: how far every layout is from one process.

``python -m tests.support.layout_table`` measures (15 to 25 minutes on two cores) and writes it again.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from tests.support.layouts import (
    FLOAT64,
    FP32,
    LAYOUTS,
    LOSS_FLOOR,
    REFERENCES,
    Difference,
    Result,
    difference,
    measure,
)

PAGE = Path(__file__).parents[2] / "docs" / "en" / "advanced" / "layouts.md"
BEGIN, END = "<!-- table: python -m tests.support.layout_table -->", "<!-- end of the table -->"
# Eight layers, so that there are four pipeline stages of two chunks each.
NUM_LAYERS = 8
COMPARED = [name for name in LAYOUTS if name not in REFERENCES.values()]
Results = dict[tuple[str, str], Result]


def measure_all(folder: Path, precision: str, algorithms: Iterable[str] = ("grpo",)) -> Results:
    """Return the results of ``algorithms`` under every layout."""
    cases = list(itertools.product(algorithms, COMPARED))
    return measure(folder, precision, cases, num_layers=NUM_LAYERS, timeout=3600)


def summary(results: Results, precision: str) -> dict[str, Difference]:
    """Return the largest difference of every layout over the algorithms."""
    found: dict[str, list[dict[str, float]]] = {}
    for (algorithm, layout), result in results.items():
        reference = results[algorithm, LAYOUTS[layout].reference]
        seen = difference(result, reference, loss_floor=LOSS_FLOOR[precision])
        found.setdefault(layout, []).append(asdict(seen))
    return {
        layout: Difference(**{name: max(entry[name] for entry in entries) for name in entries[0]})
        for layout, entries in found.items()
    }


def table(exact: dict[str, Difference], single: dict[str, Difference]) -> str:
    """Return the Markdown table of the layouts measured in float64, with their fp32 numbers where there are some."""
    lines = [
        "| layout | ranks | loss | gradient norm | metrics | weights | loss, fp32 | gradient norm, fp32 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in (name for name in COMPARED if name in exact):
        numbers: list[float | None] = [*asdict(exact[name]).values()]
        numbers += [single[name].loss, single[name].grad_norm] if name in single else [None, None]
        cells = ["" if n is None else "0" if n == 0 else f"{n:.0e}" for n in numbers]
        lines.append(f"| {name} | {LAYOUTS[name].ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write(table: str) -> None:
    """Put the table into the page."""
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")


def main() -> None:
    """Measure and write the table."""
    with tempfile.TemporaryDirectory() as folder:
        exact, single = (summary(measure_all(Path(folder) / p, p), p) for p in (FLOAT64, FP32))
    write(table(exact, single))


if __name__ == "__main__":
    main()
