"""Profiles and memory records of a trainer rank, over a window of rollouts."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime.observability.timer import get_timers
from slime.utils.atomic_file import space_left

if TYPE_CHECKING:
    import torch.profiler

    from slime.arguments.args import Args

logger = logging.getLogger(__name__)

PHASES = {"train_overall": "train", "train_actor": "actor_train", "train_log_probs": "log_probs"}
"""Target -> the timed phase it is."""
MAX_EVENTS = 1_000_000
"""Allocations that a memory record of torch holds at most."""


class Profiling:
    """The recordings of this rank for ``--use-pytorch-profiler`` and ``--record-memory-history``; none without them."""

    def __init__(self, args: Args, *, rank: int, role: str) -> None:
        self._profile: TorchProfile | None = None
        self._recorder: Recorder | None = None
        self._steps_left = args.memory_snapshot_num_steps
        if args.use_pytorch_profiler and rank in args.profile_ranks:
            self._profile = TorchProfile(args, rank=rank, role=role)
            get_timers().watch("profile", self._profile)
        if args.record_memory_history:
            self._recorder = recorder_of(args, rank)
            self._recorder.start()

    def begin(self, rollout_id: int) -> None:
        """Training on ``rollout_id`` begins."""
        if self._profile is not None:
            self._profile.rollout_id = rollout_id

    def trained(self) -> None:
        """Training on a rollout is over."""
        if self._recorder is not None and self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self.end()

    def end(self) -> None:
        """Write what is still being recorded."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()


# Traces of torch's profiler, one file per rollout and target, for TensorBoard, Perfetto or chrome://tracing


def profile_dir(args: Args) -> Path:
    """Return the directory of traces: ``--tensorboard-dir``, or ``profile`` below the run directory."""
    return Path(args.tensorboard_dir or Path(args.run_dir) / "profile")


class TorchProfile:
    """Watches the timers of a rank and profiles the phases that ``--profile-target`` names.

    ``rollout_id`` is the rollout that is trained on; those from ``--profile-step-start`` to before
    ``--profile-step-end`` are profiled. Other phases inside of a profiled one are ranges of its trace. One profile runs
    at a time: within ``train_overall`` the other targets are ranges, too.
    """

    def __init__(self, args: Args, *, rank: int, role: str) -> None:
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

    def _write(self, profiler: torch.profiler.profile, target: str) -> None:
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


# Every allocation of a trainer process, with the stack that made it: torch's of the GPU, memray's of the host


class Recorder(Protocol):
    """Records from ``start`` to ``stop``, which writes a file."""

    def start(self) -> None: ...
    def stop(self) -> None: ...


def recorder_of(args: Args, rank: int) -> Recorder:
    """Return the recorder that ``--memory-recorder`` names.

    Its file is ``<--memory-snapshot-dir>/memory_snapshot_time<seconds>_rank<rank>_<--memory-snapshot-path>``.
    """
    name = f"memory_snapshot_time{time.time():.0f}_rank{rank}_{args.memory_snapshot_path}"
    path = Path(args.memory_snapshot_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return MemrayRecorder(path) if args.memory_recorder == "memray" else TorchRecorder(path)


class TorchRecorder:
    """For https://pytorch.org/memory_viz. Written when the GPU's memory runs out, too."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self) -> None:
        import torch

        torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
        torch._C._cuda_attach_out_of_memory_observer(lambda *_: self._dump())  # type: ignore[attr-defined]

    def stop(self) -> None:
        import torch

        self._dump()
        torch.cuda.memory._record_memory_history(enabled=None)

    def _dump(self) -> None:
        import torch

        try:
            torch.cuda.memory._dump_snapshot(str(self._path))
        except OSError as e:  # no reason to end a training
            logger.error("the memory snapshot %s could not be written: %s%s", self._path, e, space_left(self._path))
        else:
            logger.info("memory snapshot: %s", self._path)


class MemrayRecorder:
    """For ``memray flamegraph FILE``. memray is no dependency of slime: ``pip install memray``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tracker: Any = None

    def start(self) -> None:
        try:
            import memray
        except ImportError as e:
            raise ImportError(
                "--memory-recorder memray needs the package memray on every training host: pip install memray"
            ) from e
        self._tracker = memray.Tracker(str(self._path), native_traces=True)
        self._tracker.__enter__()

    def stop(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            try:
                tracker.__exit__(None, None, None)
            except OSError as e:  # no reason to end a training
                logger.error("the memory record %s could not be written: %s%s", self._path, e, space_left(self._path))
            else:
                logger.info("memory record: %s", self._path)
