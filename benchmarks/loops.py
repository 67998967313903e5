"""Speed of the loops by number of cores: ``train.py``, one rollout ahead and fully asynchronous, side by side.

The runs are those of ``against_trl`` without TRL: a tiny model, answers of one length, one optimizer step per rollout.
Each loop runs on 1, 2, ... ``--cores`` cores; the loops take turns, ``--repeats`` times. A table has completion tokens
per second, training included: the median and the range, and the ratio to the first loop in the same turn. A loop that
trains on older weights is faster per token, not always per accuracy.

    python -m benchmarks.loops --shapes 256x64 --repeats 3
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from benchmarks.against_trl import ROOT, WARM_UP, Machine, Shape, check_lengths, prepare, spread, throughput_flags
from benchmarks.loop_profile import read_rows, read_steps

FULLY_ASYNC = "--rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async --max-staleness 2"
LOOPS = {
    "train.py, 2 engines": ("train.py", "--rollout-num-gpus 2"),
    "train.py, 1 engine": ("train.py", "--rollout-num-gpus 1"),
    "train.py --colocate, 2 trainers and engines": ("train.py", "--actor-num-gpus-per-node 2 --colocate"),
    "train_async.py, 1 engine": ("train_async.py", "--rollout-num-gpus 1"),
    "train_async.py, 2 engines": ("train_async.py", "--rollout-num-gpus 2"),
    "fully asynchronous, 1 engine": ("train_async.py", f"--rollout-num-gpus 1 {FULLY_ASYNC}"),
    "fully asynchronous, 2 engines": ("train_async.py", f"--rollout-num-gpus 2 {FULLY_ASYNC}"),
}
"""Name -> program and the flags that are other than those of ``against_trl``: one trainer, two engines."""


def tokens_per_s(machine: Machine, script: str, flags: Sequence[str], shape: Shape, steps: int, folder: Path) -> float:
    """Run one loop; return completion tokens per second of its timed steps."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = ["--run-dir", str(folder), "--skip-first-look", *flags]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-u", script, *words]
    machine.watch(machine.launch(command, environment, folder / "train.log", f"LOOPS_RUN={uuid.uuid4().hex}"))
    timed = read_steps(read_rows(folder / "metrics.jsonl"))[WARM_UP:]
    check_lengths(shape, timed, steps)
    # From end to end: of a loop that overlaps its stages the begin of a step is not that of its rollout.
    return shape.answers * shape.length * (steps - 1) / (timed[-1].ended - timed[0].ended)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, default=[Shape(256, 64)], help="answers x tokens")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a run (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="turns of all loops (default: %(default)s)")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="most cores (default: all)")
    parser.add_argument("--loops", nargs="+", default=list(LOOPS), choices=list(LOOPS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "loops", help="directory of all runs")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a run may take (default: %(default)s)")
    options = parser.parse_args()
    os.chdir(ROOT)
    options.trl_environment = options.out  # of the machine that against_trl describes; nothing is made there
    cores = sorted(os.sched_getaffinity(0))[: options.cores]
    machine = Machine(options)
    paths = prepare(machine, machine.out / "inputs", task=False)
    print(f"completion tokens/s, median (range) of {options.repeats}; ratio to the first loop of the same turn")
    for shape in options.shapes:
        for count in range(1, len(cores) + 1):
            os.sched_setaffinity(0, cores[:count])  # what is started inherits it
            found: dict[str, list[float]] = {name: [] for name in options.loops}
            for repeat in range(options.repeats):
                for name in options.loops[:: 1 if repeat % 2 == 0 else -1]:
                    script, others = LOOPS[name]
                    flags = [*throughput_flags(paths, shape, WARM_UP + options.steps), *others.split()]
                    folder = machine.out / f"{shape.answers}x{shape.length}-{count}-{name.replace(' ', '_')}-{repeat}"
                    found[name].append(tokens_per_s(machine, script, flags, shape, options.steps, folder))
            print(f"\n{shape}, {count} of {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
            for name, values in found.items():
                ratios = [value / first for value, first in zip(values, found[options.loops[0]], strict=True)]
                print(f"  {name:46}{spread(values):>28}{spread(ratios):>24}", flush=True)


if __name__ == "__main__":
    main()
