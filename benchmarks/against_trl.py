"""Side by side with TRL's GRPOTrainer on the cores of one machine: completion tokens per second, and seconds to 80 %.

Both train the same checkpoint on the same prompts with the same reward, tokenizer, group size, answers of one length,
optimizer steps and learning rate, in fp32. slime is the ordinary ``train.py``, synchronous; TRL generates with
transformers, in one process with a thread per core. They take turns, the first in one repeat is the second in the next.
TRL gets an environment of its own, which is made once and reused.

    python -m benchmarks.against_trl                        # completion tokens/s, training included
    python -m benchmarks.against_trl --steps 3 --repeats 3  # the same, shorter
    python -m benchmarks.against_trl --task                 # seconds to 80 % on the quickstart's task
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.loop_profile import CpuSampler, Step, format_table, read_rows, read_steps, stage_table
from examples.quickstart import recipe
from slime.utils.process_guard import GuardedProcess, spawn

ROOT = Path(__file__).resolve().parents[1]
TRL = "trl==1.16.*"
GROUP, WARM_UP, LR = 8, 2, 1e-4
MODEL = {**recipe.MODEL, "num-hidden-layers": 4}
"""The quickstart's model, twice as deep: 1.0 M parameters."""
TARGET, EVALUATE_EVERY = 0.80, 5
"""The accuracy that --task waits for, and rollouts between two looks at it."""
OURS = "--actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 2 --rollout-num-gpus-per-engine 1"
"""The quickstart's layout: one trainer, two engines."""
GEMM = """
import sys, time, torch
threads, rows, hidden, ffn = map(int, sys.argv[1:])
torch.set_num_threads(threads)
for m, k, n in ((1024, 1024, 1024), (rows, hidden, ffn)):
    a, b, best = torch.randn(m, k), torch.randn(k, n), 1e9
    for _ in range(30):
        begin = time.perf_counter()
        for _ in range(max(1, int(2e8 / (m * k * n)))):
            a @ b
        best = min(best, (time.perf_counter() - begin) / max(1, int(2e8 / (m * k * n))))
    print(2 * m * k * n / best)
"""


@dataclass(frozen=True)
class Shape:
    """A batch of one optimizer step: how many answers of how many tokens."""

    answers: int
    length: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read ``256x64``. Raises ValueError for anything else, or answers that are no whole groups."""
        answers, length = map(int, text.split("x"))
        if answers <= 0 or length <= 0 or answers % GROUP:
            raise ValueError(f"{text}: expected ANSWERSxTOKENS, with answers in groups of {GROUP}")
        return cls(answers, length)

    def __str__(self) -> str:
        return f"{self.answers} answers x {self.length} tokens"


@dataclass
class Run:
    """One timed run: completion tokens/s, the wall-clock s of a step, and what strangers used of the cores."""

    tokens_per_s: float
    step_s: float
    strangers: float
    table: str


class Machine:
    """Paths, and the hardware that the runs use."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.out: Path = options.out.absolute()
        self.environment: Path = options.trl_environment.absolute()
        self.options = options
        available = sorted(os.sched_getaffinity(0))
        self.cores = min(options.cores, len(available))
        os.sched_setaffinity(0, available[: self.cores])  # children inherit it

    def trl_python(self) -> Path:
        """Return the interpreter of TRL's environment, which is made where there is none.

        torch comes first, of this environment's version and never a CUDA build; transformers has its version too.
        """
        from tools.setup import Pip, say

        python = self.environment / "bin" / "python"
        done = self.environment / "installed.txt"
        wanted = [TRL, f"transformers=={metadata.version('transformers')}"]
        if done.exists() and done.read_text().split() == wanted:
            return python
        torch = f"torch=={metadata.version('torch').split('+')[0]}"
        if not python.exists():
            say(f"creating {self.environment}")
            subprocess.run([sys.executable, "-m", "venv", str(self.environment)], check=True)
        pip = Pip(python)
        if pip.version("torch") is None:
            plan = pip.plan(torch)
            needs = (plan or {}).get("metadata", {}).get("requires_dist") or []
            if plan is None or any(need.startswith("nvidia-") and "extra ==" not in need for need in needs):
                raise SystemExit(
                    f"pip offers no CPU build of {torch}: see 'Start locally' on pytorch.org, platform CPU"
                )
            pip.install("installing torch for TRL", torch)
        constraint = self.environment / "torch.txt"
        constraint.write_text(f"torch=={pip.version('torch')}\n")
        pip.install(f"installing {' and '.join(wanted)}", "-c", constraint, *wanted)
        done.write_text("\n".join(wanted))
        return python

    def versions(self) -> str:
        """Return the versions of both sides."""
        code = "from importlib.metadata import version as v; print(*(v(n) for n in ('trl', 'transformers', 'torch')))"
        trl, transformers, torch = subprocess.check_output([self.trl_python(), "-c", code], text=True).split()
        ours = f"SGLang {metadata.version('sglang')}, torch {metadata.version('torch')}"
        return f"TRL {trl} (transformers {transformers}, torch {torch}); slime ({ours}); {self.cores} cores"

    def gemm_speeds(self, rows: int) -> tuple[float, float]:
        """Return the FLOP/s of fp32 matrix products on all cores: large ones, and the MLP's of ``rows`` tokens."""
        words = [self.cores, rows, MODEL["hidden-size"], MODEL["intermediate-size"]]
        env = {**os.environ, "OMP_NUM_THREADS": str(self.cores)}
        command = [sys.executable, "-c", GEMM, *map(str, words)]
        large, small = map(float, subprocess.check_output(command, env=env, text=True).split())
        return large, small

    def launch(self, command: list[str], env: dict[str, str], log: Path, tag: str) -> GuardedProcess:
        """Start one side in the checkout; ``tag`` is in the environment of whatever it starts."""
        log.unlink(missing_ok=True)
        name, value = tag.split("=")
        env = {**env, "PYTHONPATH": str(ROOT), name: value}
        return spawn(command, env, log, log.stem, cwd=str(ROOT))

    def watch(self, process: GuardedProcess, enough: Callable[[], bool] = lambda: False) -> None:
        """Wait for the end, or until it is ``enough``. Raises RuntimeError when it fails or takes too long."""
        deadline = time.monotonic() + self.options.timeout
        try:
            while (code := process.poll()) is None and not enough():
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{process.name} was not done in {self.options.timeout} s: {process.log_path}")
                time.sleep(2)
            if code:
                raise RuntimeError("\n".join([f"{process.name} ended with {code}", *process.last_lines(30)]))
        finally:
            process.stop(60)

    def start_trl(self, config: dict[str, Any], folder: Path, tag: str) -> tuple[GuardedProcess, Path]:
        """Start TRL; return it and the file of its rows."""
        folder.mkdir(parents=True)
        rows = folder / "rows.jsonl"
        config = {"out": str(rows), "output_dir": str(folder), "threads": self.cores, **config}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder), "TOKENIZERS_PARALLELISM": "false"}
        env = {**os.environ, **offline, "OMP_NUM_THREADS": str(self.cores)}
        command = [str(self.trl_python()), "-m", "benchmarks.trl_side", str(folder / "config.json")]
        return self.launch(command, env, folder / "trl.log", tag), rows

    def start_ours(self, flags: list[str], folder: Path, tag: str) -> tuple[GuardedProcess, Path]:
        """Start ``train.py``; return it and its metrics file. Threads are left to it, unless ``--our-threads``."""
        folder.mkdir(parents=True)
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        if self.options.our_threads:
            env["OMP_NUM_THREADS"] = str(self.options.our_threads)
        words = [*flags, "--run-dir", str(folder), *shlex.split(self.options.ours)]
        (folder / "flags.txt").write_text(shlex.join(words) + "\n")
        command = [sys.executable, "-u", "train.py", *words]
        return self.launch(command, env, folder / "train.log", tag), folder / "metrics.jsonl"


# Completion tokens per second


def throughput_flags(paths: recipe.Paths, shape: Shape, steps: int) -> list[str]:
    """Return the arguments of ``train.py``: one optimizer step per rollout, answers of one length."""
    return [
        "--hf-checkpoint", str(paths.model),
        "--prompt-data", str(paths.data / "train.jsonl"), "--input-key", "messages", "--label-key", "label",
        "--apply-chat-template", "--custom-rm-path", "benchmarks.trl_side.digit_reward",
        "--num-rollout", str(steps), "--rollout-batch-size", str(shape.answers // GROUP),
        "--n-samples-per-prompt", str(GROUP), "--num-steps-per-rollout", "1",
        "--rollout-max-response-len", str(shape.length), "--rollout-temperature", "1",
        "--sglang-preferred-sampling-params", '{"ignore_eos": true}',
        "--advantage-estimator", "grpo", "--eps-clip", "0.2", "--eps-clip-high", "0.28", "--entropy-coef", "0",
        "--use-dynamic-batch-size", "--max-tokens-per-gpu", "4096",
        "--lr", str(LR), "--lr-decay-style", "constant", "--weight-decay", "0", "--adam-beta1", "0.9",
        "--adam-beta2", "0.98", "--clip-grad", "1.0",
        *shlex.split(OURS),
    ]  # fmt: skip


def run_ours(machine: Machine, paths: recipe.Paths, shape: Shape, steps: int, folder: Path) -> Run:
    """Time ``train.py``."""
    tag = f"AGAINST_TRL_RUN={uuid.uuid4().hex}"
    sampler = CpuSampler(tag)
    sampler.start()
    process, metrics = machine.start_ours(throughput_flags(paths, shape, WARM_UP + steps), folder, tag)
    try:
        machine.watch(process)
    finally:
        sampler.stop()
    timed = read_steps(read_rows(metrics))[WARM_UP:]
    check_lengths(shape, timed, steps)
    seconds = timed[-1].ended - timed[0].began
    strangers = sampler.between(timed[0].began, timed[-1].ended)["strangers"] / seconds
    table = format_table(stage_table(timed, sampler.between), machine.cores)
    return Run(shape.answers * shape.length * steps / seconds, seconds / steps, strangers, table)


def check_lengths(shape: Shape, timed: list[Step], steps: int) -> None:
    """Raise RuntimeError unless all steps are there and every answer had the length that is counted."""
    bounds = {step.values[f"rollout/response_len/{end}"] for step in timed for end in ("min", "max")}
    if len(timed) != steps or bounds != {float(shape.length)}:
        raise RuntimeError(f"expected {steps} steps of {shape}, got {len(timed)} with lengths of {sorted(bounds)}")


def run_trl(machine: Machine, paths: recipe.Paths, shape: Shape, steps: int, folder: Path) -> Run:
    """Time TRL."""
    tag = f"AGAINST_TRL_RUN={uuid.uuid4().hex}"
    sampler = CpuSampler(tag)
    sampler.start()
    config = {
        "model": str(paths.model), "prompts": str(paths.data / "train.jsonl"), "task": False, "seed": 1234,
        "answers": shape.answers, "length": shape.length, "group": GROUP, "steps": WARM_UP + steps,
        "steps_per_generation": 1, "lr": LR, "lr_scheduler": "constant", "warmup_steps": 0, "kl": 0.0,
    }  # fmt: skip
    process, rows = machine.start_trl(config, folder, tag)
    try:
        machine.watch(process)
    finally:
        sampler.stop()
    found = [row for row in read_rows(rows) if row["event"] == "step"]
    before, timed = found[WARM_UP - 1], found[WARM_UP:]
    if len(timed) != steps or any({row["shortest"], row["longest"]} != {shape.length} for row in timed):
        raise RuntimeError(f"expected {steps} steps of {shape}: {rows}")
    seconds = timed[-1]["time"] - before["time"]
    strangers = sampler.between(before["time"], timed[-1]["time"])["strangers"] / seconds
    return Run(sum(row["tokens"] for row in timed) / seconds, seconds / steps, strangers, trl_table(before, timed))


def trl_table(before: dict[str, Any], timed: list[dict[str, Any]]) -> str:
    """Return TRL's stages as text."""
    count = len(timed)
    wall, cpu = ((timed[-1][name] - before[name]) / count for name in ("time", "cpu"))
    generation, rewards = (sum(row[name] for row in timed) / count for name in ("generation", "rewards"))
    rows = {"generation": generation, "rewards": rewards, "training, rest": wall - generation - rewards, "step": wall}
    text = "\n".join(f"{name:34}{seconds:8.3f}" for name, seconds in rows.items())
    return f"{'seconds per step (TRL)':34}{'wall':>8}{'CPU':>10}\n{text}{cpu:10.3f}"


def arithmetic(machine: Machine, flags: list[str], shape: Shape, step_s: float, tokens: float) -> str:
    """Return what the matrix products of a step take at the speed of this machine, sequences of ``tokens`` tokens."""
    from slime.arguments.parse import parse_args
    from slime.models.flops import forward_flops

    flops = 4 * forward_flops(parse_args(flags), [tokens] * shape.answers)  # generation 1, forward and backward 3
    found = []
    for name, speed in zip(("large", f"of {shape.answers} rows"), machine.gemm_speeds(shape.answers), strict=True):
        seconds = flops / speed
        found.append(f"{seconds:.2f} s at {speed / 1e9:.0f} GFLOP/s ({name}), {seconds / step_s:.0%} of the step")
    return f"arithmetic: {flops / 1e9:.1f} GFLOP per step (a quarter of it generation), {'; '.join(found)}"


# Seconds to an accuracy


def crossing(points: list[tuple[float, float]], target: float) -> float | None:
    """Return when a curve of (seconds, accuracy) first reaches ``target``, on the line between two points."""
    for (t0, a0), (t1, a1) in itertools.pairwise(points):
        if a0 < target <= a1:
            return t0 + (t1 - t0) * (target - a0) / (a1 - a0)
    return points[0][0] if points and points[0][1] >= target else None


def our_curve(rows: list[dict[str, Any]], dataset: str) -> list[tuple[float, float]]:
    """Return (seconds of training, accuracy) at every evaluation whose time is known; evaluations take no time in it.

    The clock starts where the evaluation before the first rollout ends.
    """
    at = [(row["step"], row["time"], float(row["value"])) for row in rows if row["name"] == f"eval/{dataset}"]
    took = {row["step"]: float(row["value"]) for row in rows if row["name"] == "perf/stage/eval_time"}
    if not at:
        return []
    points, before = [(0.0, at[0][2])], 0.0
    for step, moment, accuracy in at[1:]:
        if step not in took:
            break
        before += took[step]
        points.append((moment - at[0][1] - before, accuracy))
    return points


def task_flags(paths: recipe.Paths, seed: int) -> list[str]:
    """Return the arguments of the quickstart's GRPO, with evaluations in shorter turns, and no run directory."""
    flags = recipe.grpo(paths, seed, rollouts=recipe.GRPO_ROLLOUTS, shuffled=False)
    flags[flags.index("--eval-interval") + 1] = str(EVALUATE_EVERY)
    at = flags.index("--run-dir")
    return flags[:at] + flags[at + 2 :]


def trl_task(paths: recipe.Paths, seed: int) -> dict[str, Any]:
    """Return what ``trl_side`` reads for the same task: the numbers of ``task_flags``."""
    flags = task_flags(paths, seed)

    def value(flag: str) -> float:
        return float(flags[flags.index(flag) + 1])

    steps, group = int(value("--num-steps-per-rollout")), int(value("--n-samples-per-prompt"))
    return {
        "model": str(paths.sft_model), "prompts": str(paths.data / "train.jsonl"), "task": True,
        "seed": int(value("--seed")), "held_out": str(paths.data / "held_out.jsonl"), "target": TARGET,
        "samples_per_held_out": int(value("--n-samples-per-eval-prompt")), "evaluate_every": EVALUATE_EVERY * steps,
        "answers": int(value("--rollout-batch-size")) * group, "group": group,
        "length": int(value("--rollout-max-response-len")), "steps": int(value("--num-rollout")) * steps,
        "steps_per_generation": steps, "lr": value("--lr"), "lr_scheduler": "linear",
        "warmup_steps": int(value("--lr-warmup-iters")), "kl": value("--kl-loss-coef"),
    }  # fmt: skip


def task_ours(machine: Machine, paths: recipe.Paths, seed: int, folder: Path) -> list[tuple[float, float]]:
    """Run the quickstart's GRPO until the target is reached; return its curve, and print how long the start took."""
    begin = time.time()
    process, metrics = machine.start_ours(task_flags(paths, seed), folder, f"AGAINST_TRL_RUN={uuid.uuid4().hex}")

    def curve() -> list[tuple[float, float]]:
        return our_curve(read_rows(metrics), recipe.DATASET)

    machine.watch(process, lambda: crossing(curve(), TARGET) is not None)
    ready = next(row["time"] for row in read_rows(metrics) if row["name"] == f"eval/{recipe.DATASET}") - begin
    print(f"  slime: {ready:.0f} s until the first rollout, the evaluation before it included", flush=True)
    return curve()


def task_trl(machine: Machine, paths: recipe.Paths, seed: int, folder: Path) -> list[tuple[float, float]]:
    """The same with TRL."""
    begin = time.time()
    process, path = machine.start_trl(trl_task(paths, seed), folder, f"AGAINST_TRL_RUN={uuid.uuid4().hex}")
    machine.watch(process)
    rows = read_rows(path)
    ready = next(row["time"] for row in rows if row["event"] == "begin") - begin
    print(f"  TRL:   {ready:.0f} s until the first rollout, the evaluation before it included", flush=True)
    return [(row["seconds"], row["accuracy"]) for row in rows if row["event"] == "evaluation"]


# Both


def spread(values: list[float]) -> str:
    """Return the median and the range."""
    digits = 0 if min(values) >= 100 else 2
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def in_turns(repeat: int, sides: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run every side, the last first in every other repeat; return what they returned."""
    names = list(sides)[:: -1 if repeat % 2 else 1]
    return {name: sides[name]() for name in names}


def compare_throughput(machine: Machine, paths: recipe.Paths, shape: Shape) -> dict[str, Any]:
    """Time one shape; print and return the figures."""
    steps, load = machine.options.steps, os.getloadavg()[0]
    print(f"\n{shape} per step, {steps} steps after {WARM_UP} of warming up; load average {load:.2f}", flush=True)
    found: list[dict[str, Run]] = []
    for repeat in range(machine.options.repeats):
        folder = machine.out / f"{shape.answers}x{shape.length}-{repeat}"
        shutil.rmtree(folder, ignore_errors=True)
        pair = in_turns(repeat, {
            "slime": lambda: run_ours(machine, paths, shape, steps, folder / "slime"),  # noqa: B023
            "TRL": lambda: run_trl(machine, paths, shape, steps, folder / "trl"),  # noqa: B023
        })  # fmt: skip
        found.append(pair)
        said = ", ".join(
            f"{n} {run.tokens_per_s:,.0f} (strangers {run.strangers:.2f} cores)" for n, run in pair.items()
        )
        print(f"  repeat {repeat + 1}: {said}; {pair['slime'].tokens_per_s / pair['TRL'].tokens_per_s:.2f}", flush=True)
    speeds = {name: [pair[name].tokens_per_s for pair in found] for name in ("slime", "TRL")}
    ratios = [a / b for a, b in zip(speeds["slime"], speeds["TRL"], strict=True)]
    said = ", ".join(f"{name} {spread(values)}" for name, values in speeds.items())
    print(f"  completion tokens/s: {said}; slime / TRL {spread(ratios)}, {len(ratios)} pairs")
    middle = sorted((pair["slime"] for pair in found), key=lambda run: run.step_s)[len(found) // 2]
    rows = read_rows(machine.out / f"{shape.answers}x{shape.length}-0" / "slime" / "metrics.jsonl")
    tokens = statistics.fmean(row["value"] for row in rows if row["name"] == "rollout/total_lengths")
    bound = arithmetic(machine, throughput_flags(paths, shape, steps), shape, middle.step_s, tokens)
    print(f"{middle.table}\n{found[0]['TRL'].table}\n{bound}", flush=True)
    return {"shape": str(shape), "steps": steps, "tokens_per_s": speeds, "ratios": ratios, "load": load}


def compare_task(machine: Machine, paths: recipe.Paths) -> dict[str, Any]:
    """Measure seconds to the target on the quickstart's task, both from the same checkpoint after SFT."""
    load = os.getloadavg()[0]
    print(f"\nseconds of training to {TARGET:.0%} on held-out prompts; load average {load:.2f}", flush=True)
    found: list[dict[str, float | None]] = []
    for repeat in range(machine.options.repeats):
        folder = machine.out / f"task-{repeat}"
        shutil.rmtree(folder, ignore_errors=True)
        curves = in_turns(repeat, {
            "slime": lambda: task_ours(machine, paths, repeat, folder / "slime"),  # noqa: B023
            "TRL": lambda: task_trl(machine, paths, repeat, folder / "trl"),  # noqa: B023
        })  # fmt: skip
        for name, curve in curves.items():
            print(f"  {name}: " + " ".join(f"{seconds:.0f}s:{value:.1%}" for seconds, value in curve))
        found.append({name: crossing(curve, TARGET) for name, curve in curves.items()})
        print(f"  seed {repeat}: " + ", ".join(f"{n} {s:.0f} s" if s else f"{n} never" for n, s in found[-1].items()))
    for name in ("slime", "TRL"):
        times = [seconds for pair in found if (seconds := pair[name]) is not None]
        print(f"{name}: {spread(times) if times else 'never'}, {len(times)} of {len(found)} seeds reached it")
    return {"target": TARGET, "seconds": found, "load": load}


def prepare(machine: Machine, root: Path, *, task: bool) -> recipe.Paths:
    """Make the model and the prompts in ``root``; for the task, train the quickstart's SFT there, unless it is done."""
    from examples.quickstart.stages import run_stage

    paths = recipe.Paths(root)
    made = paths.sft_model if task else paths.data / "train.jsonl"
    if made.exists():
        return paths
    model = recipe.make_model(paths, 0)
    if not task:
        model += ["--num-hidden-layers", str(MODEL["num-hidden-layers"])]
    commands = {"model": ["-m", *model], "data": ["-m", *recipe.make_data(paths, 0)]}
    if task:
        commands["sft"] = ["train.py", *recipe.sft(paths, 0)]
    for name, command in commands.items():
        run_stage(name, ["python", *command], root / "logs" / f"{name}.log", deadline_s=machine.options.timeout)
    return paths


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="store_true", help="seconds to 80 %% on the quickstart's task instead")
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, default=list(map(Shape.parse, SHAPES)),
                        help=f"answers x tokens of a step (default: {' '.join(SHAPES)})")  # fmt: skip
    parser.add_argument("--steps", type=int, default=10, help="timed optimizer steps of a run (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="pairs of runs; seeds with --task (default: %(default)s)"
    )
    parser.add_argument("--cores", type=int, default=2, help="cores of both sides (default: %(default)s)")
    parser.add_argument("--ours", default="", metavar="FLAGS", help="further flags of train.py; the later of two wins")
    parser.add_argument("--our-threads", type=int, help="OMP_NUM_THREADS of train.py (default: left to it)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "against_trl", help="directory of all runs")
    parser.add_argument("--trl-environment", type=Path, default=ROOT / "build" / "trl-environment",
                        help="TRL's virtual environment, made where there is none (default: %(default)s)")  # fmt: skip
    parser.add_argument("--quickstart", type=Path, help="directory of a quickstart whose SFT model --task starts from")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a run may take (default: %(default)s)")
    options = parser.parse_args()
    os.chdir(ROOT)
    machine = Machine(options)
    print(machine.versions(), flush=True)
    if options.task:
        results = [compare_task(machine, prepare(machine, options.quickstart or machine.out / "quickstart", task=True))]
    else:
        paths = prepare(machine, machine.out / "inputs", task=False)
        results = [compare_throughput(machine, paths, shape) for shape in options.shapes]
    file = machine.out / f"results-{time.strftime('%Y%m%d-%H%M%S')}.json"
    file.write_text(json.dumps({"machine": machine.versions(), "ours": options.ours, "results": results}, indent=1))
    print(f"\nload average {os.getloadavg()[0]:.2f}; {file}")


SHAPES = ("32x64", "256x64", "64x256")

if __name__ == "__main__":
    main()
