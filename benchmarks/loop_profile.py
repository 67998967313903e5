"""Profile of a ``train.py`` run: wall-clock and CPU seconds per step, by stage and by kind of process.

Wall-clock seconds are those that the run reports itself (``metrics.jsonl``). CPU seconds are sampled from /proc while
it runs, for all processes that have inherited a variable of the environment, and divided where stages ended.
"""

from __future__ import annotations

import json
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")
ORDER = (
    "generate", "offload_rollout", "onload_train", "train", "save", "offload_train", "sync_weights", "onload_rollout",
    "eval",
)  # fmt: skip
"""The stages of the synchronous loop, in their order; one that is not known comes last."""
KINDS = ("engines", "router", "manager", "trainers", "others")
TRAINER_PARTS = {
    "columns to tensors": "perf/data_preprocess_time",
    "log-probs": "perf/log_probs_time",
    "log-probs, reference": "perf/ref_log_probs_time",
    "forward, backward, update": "perf/actor_train_time",
}


@dataclass(frozen=True)
class Step:
    """One rollout and the training on it: when it ran (UNIX time), its stages, and all that it reported."""

    number: int
    began: float
    ended: float
    stages: dict[str, float]
    values: dict[str, float]

    def spans(self) -> dict[str, tuple[float, float]]:
        """Return when each stage ran: one after the other from the step's begin, which leaves the rest at its end."""
        found, at = {}, self.began
        for name in sorted(self.stages, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER)):
            found[name] = (at, at + self.stages[name])
            at += self.stages[name]
        return found


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a metrics file that may still be written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def read_steps(rows: Iterable[Mapping[str, Any]]) -> list[Step]:
    """Return the complete steps, in order. A step is complete when its stages are reported, which ends it."""
    values: dict[int, dict[str, float]] = {}
    ended: dict[int, float] = {}
    for row in rows:
        if row["step_key"] == "rollout/step":
            values.setdefault(row["step"], {})[row["name"]] = float(row["value"])
            if row["name"].startswith("perf/stage/"):
                ended[row["step"]] = row["time"]
    steps: list[Step] = []
    for number in sorted(ended):
        prefix, suffix = "perf/stage/", "_time"
        stages = {
            name.removeprefix(prefix).removesuffix(suffix): value
            for name, value in values[number].items()
            if name.startswith(prefix)
        }
        began = steps[-1].ended if steps else ended[number] - sum(stages.values())
        steps.append(Step(number, began, ended[number], stages, values[number]))
    return steps


def kind_of(command: str) -> str:
    """Return which part of a run a process belongs to, by its command line."""
    if "sglang::router" in command:
        return "router"
    if "sglang::" in command or "sglang.launch_server" in command:
        return "engines"
    if "RolloutManager" in command:
        return "manager"
    return "trainers" if "TrainRayActor" in command else "others"


class CpuSampler(threading.Thread):
    """Samples CPU seconds of the processes with ``tag`` (``NAME=value``) in their environment, and of the machine.

    Stages of a small step take 50 to 500 ms: known processes are read ``interval_s`` apart, and new ones, for which all
    of /proc is read, are looked for every ``look_s``.
    """

    def __init__(self, tag: str, interval_s: float = 0.04, look_s: float = 0.5) -> None:
        super().__init__(daemon=True)
        self._tag, self._interval_s, self._look_s = tag.encode(), interval_s, look_s
        self._strangers: dict[int, int] = {}
        self._looked = -look_s
        self.kinds: dict[int, str] = {}
        self._seconds: dict[int, float] = {}
        self._done = threading.Event()
        self.times: list[float] = []
        self.samples: list[dict[int, float]] = []
        self.busy: list[float] = []

    def run(self) -> None:
        while not self._done.is_set():
            self.sample()
            self._done.wait(self._interval_s)

    def stop(self) -> None:
        self._done.set()
        self.join()

    def sample(self) -> None:
        """Take one sample. What a process that has ended has used stays."""
        look = time.monotonic() - self._looked >= self._look_s
        if look:
            self._looked = time.monotonic()
        for pid in [int(name) for name in os.listdir("/proc") if name.isdigit()] if look else list(self.kinds):
            try:
                if self._has_tag(pid):
                    # Ray's workers get their title later.
                    if self.kinds.setdefault(pid, "others") == "others" and look:
                        self.kinds[pid] = kind_of(Path(f"/proc/{pid}/cmdline").read_text(errors="replace"))
                    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                    self._seconds[pid] = (int(fields[11]) + int(fields[12])) / TICKS
            except OSError:
                continue
        user, nice, system, _, _, irq, soft, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        self.times.append(time.time())
        self.samples.append(dict(self._seconds))
        self.busy.append((user + nice + system + irq + soft + steal) / TICKS)

    def _has_tag(self, pid: int) -> bool:
        """A process may get its environment only some time after it was seen first."""
        if pid in self.kinds:
            return True
        looks = self._strangers.get(pid, 0)
        if looks > 8:
            return False
        self._strangers[pid] = looks + 1
        return self._tag in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")

    def between(self, began: float, ended: float) -> dict[str, float]:
        """Return CPU seconds by kind of process, and of all ``strangers`` on the machine, between two times."""
        found = dict.fromkeys(KINDS, 0.0)
        for pid, kind in self.kinds.items():
            series = [sample.get(pid, 0.0) for sample in self.samples]
            found[kind] += value_at(self.times, series, ended) - value_at(self.times, series, began)
        busy = value_at(self.times, self.busy, ended) - value_at(self.times, self.busy, began)
        return {**found, "strangers": max(0.0, busy - sum(found.values()))}


def value_at(times: list[float], values: list[float], at: float) -> float:
    """Return the value between two samples that ``at`` has on the line between them."""
    right = bisect_left(times, at)
    if right == 0 or right == len(times):
        return values[min(right, len(times) - 1)]
    share = (at - times[right - 1]) / (times[right] - times[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


Row = tuple[str, float, dict[str, float] | None]
"""A stage, its wall-clock seconds per step, and its CPU seconds by kind where they are known."""


def stage_table(steps: list[Step], cpu_between: Callable[[float, float], dict[str, float]]) -> list[Row]:
    """Return the rows of the table: means over ``steps``."""
    count = len(steps)
    names = sorted({name for step in steps for name in step.stages}, key=lambda n: (*ORDER, n).index(n))
    rows: list[Row] = []
    for name in names:
        cpu: dict[str, float] = {}
        for step in steps:
            if span := step.spans().get(name):
                cpu = {kind: cpu.get(kind, 0.0) + value / count for kind, value in cpu_between(*span).items()}
        wall = sum(step.stages.get(name, 0.0) for step in steps) / count
        rows.append((name, wall, cpu))
        parts = _generation_parts(steps) if name == "generate" else _training_parts(steps) if name == "train" else {}
        if parts:
            rest = "train data, hand-over" if name == "generate" else "calls, reports, waiting for ranks"
            parts[rest] = wall - sum(parts.values())
            rows += [(f"  {part}", seconds, None) for part, seconds in parts.items()]
        if name == "generate" and (rewards := _mean(steps, "rollout/reward/latency/custom/mean")):
            rows.append(("  (one reward)", rewards, None))
    whole = (steps[-1].ended - steps[0].began) / count
    cpu = {kind: value / count for kind, value in cpu_between(steps[0].began, steps[-1].ended).items()}
    staged = [row for row in rows if row[2] is not None]
    left = {kind: value - sum((row[2] or {}).get(kind, 0.0) for row in staged) for kind, value in cpu.items()}
    return [*rows, ("between the stages", whole - sum(row[1] for row in staged), left), ("step", whole, cpu)]


def _mean(steps: list[Step], name: str) -> float:
    return sum(step.values.get(name, 0.0) for step in steps) / len(steps)


def _generation_parts(steps: list[Step]) -> dict[str, float]:
    seconds = _mean(steps, "perf/rollout_time")
    return {"requests and rewards": seconds} if seconds else {}


def _training_parts(steps: list[Step]) -> dict[str, float]:
    found = {part: _mean(steps, name) for part, name in TRAINER_PARTS.items()}
    return {part: seconds for part, seconds in found.items() if seconds}


def format_table(rows: list[Row], cores: int) -> str:
    """Return the table as text; ``idle`` is what is left of the cores."""
    kinds = [*KINDS, "strangers"]
    lines = [f"{'seconds per step':34}{'wall':>8}" + "".join(f"{kind:>10}" for kind in (*kinds, "idle"))]
    for name, wall, cpu in rows:
        line = f"{name:34}{wall:8.3f}"
        if cpu is not None:
            idle = max(0.0, cores * wall - sum(cpu.values()))
            line += "".join(f"{cpu.get(kind, 0.0):10.3f}" for kind in kinds) + f"{idle:10.3f}"
        lines.append(line)
    return "\n".join(lines)
