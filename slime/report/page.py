"""Build the page: data as JSON, drawn by a script that is part of the page; nothing is loaded from anywhere."""

from __future__ import annotations

import html
import json
import math
import time
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from slime.report.charts import arrange
from slime.report.load import Run, Series, read_run
from slime.utils.atomic_file import write_atomically

MAX_POINTS = 2000
"""Longest curve drawn; a longer one is thinned, keeping its first and last point."""


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of ``run_dir`` to ``out`` (default ``<run_dir>/report.html``) and return the file."""
    run = read_run(run_dir)
    out = Path(out) if out else run.path / "report.html"
    write_atomically(out, render(run).encode(errors="backslashreplace"))  # half of a surrogate pair has no UTF-8
    return out


def render(run: Run) -> str:
    """Return the page as text."""
    asset = resources.files("slime.report") / "assets"
    read = {name: (asset / name).read_text(encoding="utf-8") for name in ("report.html", "report.css", "report.js")}
    return Template(read["report.html"]).substitute(
        title=html.escape(run.path.name),
        path=html.escape(str(run.path)),
        command=html.escape(run.command or "not recorded"),
        config=html.escape(run.config or "not recorded"),
        versions=versions_table(run.versions),
        footnote=html.escape(footnote(run)),
        css=read["report.css"],
        js=read["report.js"],
        data=embed(page_data(run)),
    )


def page_data(run: Run) -> dict[str, Any]:
    """Return what the script draws: charts, further metrics, samples, headline numbers."""
    charts, others = arrange(run.series)
    return {
        "tiles": tiles(run),
        "charts": [
            {"title": c.title, "note": c.note, "stacked": c.stacked, "axis": axis, "series": [curve(s) for s in group]}
            for c, names in charts
            for axis, group in by_axis([run.series[n] for n in names]).items()
        ],
        "others": [curve(run.series[name]) for name in others],
        "samples": run.samples,
    }


def by_axis(series: list[Series]) -> dict[str, list[Series]]:
    """Group ``series`` by what their steps count: optimizer steps and rollouts do not share a chart."""
    groups: dict[str, list[Series]] = {}
    for one in series:
        groups.setdefault(one.step_key, []).append(one)
    return groups


def curve(series: Series) -> dict[str, Any]:
    """Return a series as the page holds it; what is not finite becomes a gap."""
    keep = range(len(series.steps))
    if len(series.steps) > MAX_POINTS:
        stride = (len(series.steps) - 1) / (MAX_POINTS - 1)
        keep = sorted({round(i * stride) for i in range(MAX_POINTS)})  # type: ignore[assignment]
    values = [v if math.isfinite(v) else None for v in series.values]
    return {
        "name": series.name,
        "axis": series.step_key,
        "x": [series.steps[i] for i in keep],
        "y": [float(f"{v:.6g}") if (v := values[i]) is not None else None for i in keep],
    }


def tiles(run: Run) -> list[dict[str, str]]:
    """Return the headline numbers: evaluation and reward from first to last, rollouts, duration."""
    found = []
    charts = {chart.title: names for chart, names in arrange(run.series)[0]}
    for title in ("Evaluation", "Reward"):
        for name in charts.get(title, []):
            values = [v for v in run.series[name].values if math.isfinite(v)]
            if values:
                change = f"{values[0]:.3g} → {values[-1]:.3g}" if len(values) > 1 else f"{values[0]:.3g}"
                found.append({"label": name, "value": change})
    rollouts = {s for series in run.series.values() if series.step_key == "rollout/step" for s in series.steps}
    if rollouts:
        found.append({"label": "rollouts", "value": str(len(rollouts))})
    times = [t for series in run.series.values() for t in series.times]
    if times:
        found.append({"label": "first to last metric", "value": duration(max(times) - min(times))})
    return found


def duration(seconds: float) -> str:
    """Return ``1 h 02 min``, ``3 min 20 s`` or ``12 s``."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 60} min {whole % 60:02d} s" if whole >= 60 else f"{whole} s"


def versions_table(versions: dict[str, Any]) -> str:
    """Return the rows of the table of versions."""
    rows = {k: v for k, v in versions.items() if k != "packages"} | dict(versions.get("packages") or {})
    shown = ((html.escape(str(k)), html.escape(str(v))) for k, v in rows.items() if v is not None)
    return "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in shown)


def footnote(run: Run) -> str:
    """Return when and from what the page was made."""
    note = f"Made {time.strftime('%Y-%m-%d %H:%M:%S')} from {len(run.series)} metrics and {len(run.samples)} samples."
    if run.skipped_lines:
        note += f" {run.skipped_lines} lines could not be read and were left out."
    return note


def embed(data: Any) -> str:
    """Return ``data`` as JSON that may stand inside a script element, whatever text it holds."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
