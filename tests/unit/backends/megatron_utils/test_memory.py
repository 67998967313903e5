"""Peaks of phases, nested ones too, from a gauge that the test turns; and the real gauge of this process."""

from __future__ import annotations

import mmap
from pathlib import Path

from slime.backends.megatron_utils.train.train_metrics import HostGauge, PhasePeaks
from slime.observability.timer import Timers


class Dial:
    """A gauge whose needle the test moves; it remembers the highest place since its reset."""

    def __init__(self) -> None:
        self.value = self.highest = 0

    def turn(self, *values: int) -> None:
        for value in values:
            self.value = value
            self.highest = max(self.highest, value)

    def reset(self) -> None:
        self.highest = self.value

    def peaks(self) -> dict[str, int]:
        return {"rss": self.highest}

    def now(self) -> dict[str, int]:
        return {"rss": self.value}


def watched() -> tuple[Dial, PhasePeaks, Timers]:
    dial, timers = Dial(), Timers()
    peaks = PhasePeaks([dial])
    timers.watch("memory", peaks)
    return dial, peaks, timers


def test_a_phase_has_its_own_peak_and_the_one_around_it_the_highest_of_all() -> None:
    dial, peaks, timers = watched()
    dial.turn(90, 10)  # before any phase
    with timers.measure("train"):
        dial.turn(20)
        with timers.measure("log_probs"):
            dial.turn(50, 15)
        dial.turn(30)
        with timers.measure("actor_train"):
            dial.turn(40, 35)
        dial.turn(5)
    assert peaks.drain() == {
        "rss": 5, "train_peak_rss": 50, "log_probs_peak_rss": 50, "actor_train_peak_rss": 40,
    }  # fmt: skip
    assert peaks.drain() == {"rss": 5}


def test_a_peak_between_two_inner_phases_belongs_to_the_outer_one() -> None:
    dial, peaks, timers = watched()
    with timers.measure("train"):
        with timers.measure("log_probs"):
            dial.turn(10)
        dial.turn(70, 10)
        with timers.measure("log_probs"):
            dial.turn(20, 10)
    found = peaks.drain()
    assert (found["train_peak_rss"], found["log_probs_peak_rss"]) == (70, 20)


def test_a_phase_that_raises_is_measured_and_a_later_watcher_takes_over() -> None:
    dial, peaks, timers = watched()
    try:
        with timers.measure("train"):
            dial.turn(8)
            raise ValueError
    except ValueError:
        pass
    assert peaks.drain()["train_peak_rss"] == 8
    later = PhasePeaks([dial])
    timers.watch("memory", later)
    with timers.measure("train"):
        dial.turn(9)
    assert peaks.drain() == {"rss": 9}
    assert later.drain()["train_peak_rss"] == 9


def test_the_memory_of_this_process() -> None:
    gauge = HostGauge()
    gauge.reset()
    before = gauge.now()["rss"]
    # A mapping of its own: memory from the allocator may be some that this process freed but still holds.
    with mmap.mmap(-1, 32 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"\1" * len(block))
        assert gauge.peaks()["rss"] >= before + (24 << 20)
        assert gauge.now()["rss"] >= before + (24 << 20)


def test_where_there_is_no_proc_nothing_is_reported(tmp_path: Path) -> None:
    gauge = HostGauge(tmp_path / "nowhere")
    gauge.reset()
    assert gauge.peaks() == gauge.now() == {}
