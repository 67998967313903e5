"""Traces of torch's profiler, one file per rollout and target, for TensorBoard, Perfetto or chrome://tracing."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

PHASES = {"train_overall": "train", "train_actor": "actor_train", "train_log_probs": "log_probs"}
"""Target -> the timed phase it is."""


def profile_dir(args: Namespace) -> Path:
    """Return the directory of traces: ``--tensorboard-dir``, or ``profile`` below the run directory."""
    return Path(args.tensorboard_dir or Path(args.run_dir) / "profile")


class TorchProfile:
    """Watches the timers of a rank and profiles the phases that ``--profile-target`` names.

    ``rollout_id`` is the rollout that is trained on; those from ``--profile-step-start`` to before
    ``--profile-step-end`` are profiled. Other phases inside of a profiled one are ranges of its trace. One profile runs
    at a time: within ``train_overall`` the other targets are ranges, too.
    """

    def __init__(self, args: Namespace, *, rank: int, role: str) -> None:
        self._phases = {PHASES[target]: target for target in args.profile_target}
        self._window = range(args.profile_step_start, args.profile_step_end)
        self._directory, self._name = profile_dir(args), f"{role}_rank{rank}"
        self._profiler: Any = None
        self._open: list[Any] = []
        self.rollout_id: int | None = None

    def began(self, name: str) -> None:
        """A timed phase begins."""
        from torch.profiler import record_function

        if self._profiler is not None:
            part = record_function(name)
        elif name in self._phases and self.rollout_id in self._window:
            part = self._profiler = _profiler()
        else:
            return
        part.__enter__()
        self._open.append(part)

    def ended(self, name: str) -> None:
        """The timed phase that began last ends."""
        if self._profiler is None:
            return
        part = self._open.pop()
        part.__exit__(None, None, None)
        if part is self._profiler:
            self._profiler = None
            self._write(part, self._phases[name])

    def _write(self, profiler: Any, target: str) -> None:
        path = self._directory / f"{target}_rollout{self.rollout_id}_{self._name}.pt.trace.json.gz"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as e:  # no reason to end a training
            logger.error("the profile %s could not be written: %s", path, e)
        else:
            logger.info("profile of %s in rollout %s: %s", target, self.rollout_id, path)


def _profiler() -> Any:
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=True, with_flops=True)
