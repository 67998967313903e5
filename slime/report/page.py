"""Read a run directory, finished, running or broken off, and build the page: data as JSON, drawn by a script that is
part of the page; nothing is loaded from anywhere."""

from __future__ import annotations

import html
import json
import math
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from slime.utils.atomic_file import write_atomically

MAX_POINTS = 2000
"""Longest curve drawn; a longer one is thinned, keeping its first and last point."""


@dataclass
class Series:
    """One metric over its steps (ascending); where a step was logged twice, after a resume say, the later one holds."""

    name: str
    step_key: str
    steps: list[int]
    values: list[float]
    times: list[float]


@dataclass
class Run:
    """The contents of a run directory; ``skipped_lines`` counts unreadable lines (a killed writer's last one)."""

    path: Path
    series: dict[str, Series] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)
    config: str = ""
    command: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    skipped_lines: int = 0


def read_run(path: str | Path) -> Run:
    """Read ``path``. Raises FileNotFoundError, with what to do, when it is no run directory."""
    path = Path(path).absolute()
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a directory; give the run directory (--run-dir, or a folder of runs/)")
    metrics = path / "metrics.jsonl"
    if not metrics.exists() and not (path / "config.yaml").exists():
        inside = sorted(p.parent.name for p in path.glob("*/metrics.jsonl"))
        hint = f"; it contains runs, give one of them: {', '.join(inside[-5:])}" if inside else ""
        raise FileNotFoundError(f"{path} holds neither metrics.jsonl nor config.yaml: it is not a run directory{hint}")
    run = Run(path)
    if metrics.exists():
        run.series = _read_series(metrics, run)
    run.samples = _read_samples(path / "samples", run)
    run.config = _read_text(path / "config.yaml")
    run.command = _read_text(path / "command.txt").strip()
    versions = _read_text(path / "versions.json")
    run.versions = json.loads(versions) if versions else {}
    return run


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _rows(path: Path, run: Run) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                run.skipped_lines += 1
                continue
            if isinstance(row, dict):
                yield row
            else:
                run.skipped_lines += 1


def _read_series(path: Path, run: Run) -> dict[str, Series]:
    points: dict[str, dict[int, tuple[float, float]]] = {}
    step_keys: dict[str, str] = {}
    for row in _rows(path, run):
        try:
            name, step, value, at = row["name"], int(row["step"]), float(row["value"]), float(row["time"])
        except (KeyError, TypeError, ValueError):
            run.skipped_lines += 1
            continue
        points.setdefault(name, {})[step] = (value, at)
        step_keys[name] = row.get("step_key", "step")
    series = {}
    for name, by_step in sorted(points.items()):
        steps = sorted(by_step)
        values, times = zip(*(by_step[s] for s in steps), strict=True)
        series[name] = Series(name, step_keys[name], steps, list(values), list(times))
    return series


def _read_samples(path: Path, run: Run) -> list[dict[str, Any]]:
    files = []
    for file in path.glob("*.jsonl"):
        match = re.fullmatch(r"(eval-)?(\d+)", file.stem)
        if match:
            files.append((int(match[2]), bool(match[1]), file))
    rows = []
    for rollout, evaluation, file in sorted(files):
        rows += [{"rollout": rollout, "eval": evaluation, **row} for row in _rows(file, run)]
    return rows


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


def embed(data: object) -> str:
    """Return ``data`` as JSON that may be inside a script element, with any text in it."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# Which metrics share a chart, and in which order a reader wants to see them


@dataclass(frozen=True)
class Chart:
    """A chart: the metrics that match one of ``patterns`` (regular expressions, whole names), in their order."""

    title: str
    note: str
    patterns: tuple[str, ...]
    stacked: bool = False


CHARTS = (
    Chart("Evaluation", "mean reward on the held-out data sets", (r"eval/[^/]+(?<!-truncated_ratio)(?<!pass@\d)",)),
    Chart("Reward", "mean raw reward of the rollout", (r"rollout/raw_reward",)),
    Chart("Response length", "tokens", (r"rollout/response_len/(mean|max)",)),
    Chart("Entropy", "nats per token", (r"train/entropy_loss", r"rollout/entropy")),
    Chart("KL", "to the reference (kl_loss) and to the policy that generated (ppo_kl)", (
        r"train/kl_loss", r"train/ppo_kl")),
    Chart(
        "Log-prob difference",
        "mean |trainer - engine|; numerical noise only, unless the policies differ",
        (r"train/train_rollout_logprob_abs_diff",),
    ),
    Chart("Loss", "", (r"train/(critic-)?(loss|pg_loss|value_loss)",)),
    Chart("Gradient norm", "before clipping", (r"train/(critic-)?grad_norm",)),
    Chart("Clipped tokens", "share of the tokens whose policy ratio was clipped", (
        r"train/pg_clipfrac", r"train/tis_clipfrac")),
    Chart("Unfinished responses", "share cut off at the length limit, or repeating themselves", (
        r"rollout/truncated_ratio", r"rollout/repetition_frac")),
    Chart("Pass rate", "", (r"passrate/.+", r"eval/.+pass@\d+")),
    Chart("Learning rate", "", (r"train/(critic-)?lr-.+",)),
    Chart("Generation speed", "tokens per second and slot of the engines", (r"perf/tokens_per_gpu_per_sec",)),
    Chart("Engines", "that get requests; since the start: lost, back again, added, removed; restarts of routers", (
        r"rollout/engines/(serving|lost|restarted|added|removed|router_restarts)",)),
    Chart("Engines of each model", "the same, where several are served, and rejected answers", (
        r"rollout/engines/[^/]+/(serving|lost|restarted|router_restarts|rejected_answers)",)),
    Chart("Rejected answers", "of engines, since the start of the run", (r"rollout/engines/rejected_answers",)),
    Chart("Training speed", "tokens per second", (r"perf/actor_train_tok_per_s",)),
    Chart("Time per stage", "seconds of each step of the loop, stacked", tuple(
        rf"perf/stage/{name}_time" for name in ("generate", "train", "sync_weights", "save", "eval", ".+")),
        stacked=True),
    Chart("Time inside training", "seconds per rollout on the main rank, stacked", tuple(
        rf"perf/{name}_time" for name in (
            "data_preprocess", "ref_log_probs", "teacher_log_probs", "log_probs", "actor_train", "ref_model_update",
            "sleep", "wake_up", "save_model", "update_weights")),
        stacked=True),
)  # fmt: skip


def arrange(names: Iterable[str]) -> tuple[list[tuple[Chart, list[str]]], list[str]]:
    """Return ``[(chart, its metrics)]`` for the charts that have any, and the names of all other metrics."""
    left = sorted(names)
    placed = []
    for chart in CHARTS:
        chosen = [name for pattern in chart.patterns for name in left if re.fullmatch(pattern, name)]
        chosen = list(dict.fromkeys(chosen))
        if chosen:
            placed.append((chart, chosen))
            left = [name for name in left if name not in chosen]
    return placed, left
