"""Read a run directory (see :mod:`slime.observability.run_dir`), finished, running or broken off."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


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
    """What a run directory holds; ``skipped_lines`` counts unreadable lines (a killed writer's last one)."""

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
            name, step, value, time = row["name"], int(row["step"]), float(row["value"]), float(row["time"])
        except (KeyError, TypeError, ValueError):
            run.skipped_lines += 1
            continue
        points.setdefault(name, {})[step] = (value, time)
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
