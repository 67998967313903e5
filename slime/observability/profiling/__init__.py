"""Profiles and memory records of a trainer rank, over a window of rollouts."""

from __future__ import annotations

from argparse import Namespace

from slime.observability.profiling.memory_recorder import Recorder, recorder_of
from slime.observability.profiling.torch_profile import TorchProfile
from slime.observability.timer import get_timers


class Profiling:
    """What ``--use-pytorch-profiler`` and ``--record-memory-history`` ask of this rank; nothing without them."""

    def __init__(self, args: Namespace, *, rank: int, role: str) -> None:
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
