"""``make quickstart``: teach a tiny model to add, first by demonstrations (SFT), then by reward (GRPO).

Everything is slime's real loop on this machine, without a GPU: a Megatron trainer and two SGLang engines behind
sglang-router, started and wired up by Ray. Each stage is a command line that works by itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from examples.quickstart import recipe
from examples.quickstart.recipe import Paths
from examples.quickstart.stages import ROOT, StageError, run_stage

INTRODUCTION = """\
slime quickstart: a Qwen3 model of half a million parameters is made from nothing and taught to add two numbers.
First it imitates demonstrations that are more often wrong than right (SFT); then it generates answers itself and is
rewarded for the right ones (GRPO). The loop is slime's real one: a Megatron trainer and two SGLang engines behind a
router, on Ray. {expected}
Everything goes to {root}"""

EXPECTED_S = {"model and data": 20, "SFT": 180, "GRPO": 450}
"""Seconds of each stage on two slow CPU cores; GRPO's with the number of rollouts that is the default."""

DEADLINES = {"model": 120.0, "data": 60.0, "sft": 600.0, "grpo": 1200.0, "ppo": 2400.0}


def accuracy(run_dir: Path) -> list[tuple[int, float]]:
    """Return (rollout, held-out accuracy) of every evaluation of a run, in order; two of rollout 0 are possible."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], float(row["value"])) for row in rows if row["name"] == f"eval/{recipe.DATASET}"]


def last_push(run_dir: Path) -> int:
    """Return the bytes of weights that the last push to the engines sent."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return int([row["value"] for row in rows if row["name"] == "perf/update_weights_wire_bytes"][-1])


def describe_sft(row: dict[str, Any]) -> str | None:
    """Return the loss, now and then."""
    step = row["step"] + 1
    return f"step {step:3d}: loss {row['value']:.3f}" if row["name"] == "train/loss" and step % 50 == 0 else None


def describe_grpo(row: dict[str, Any]) -> str | None:
    """Return the reward, now and then, and the accuracy of every evaluation."""
    if row["name"] == "rollout/raw_reward" and row["step"] % 5 == 0:
        return f"rollout {row['step']:2d}: {row['value']:.0%} of the samples right"
    if row["name"] == f"eval/{recipe.DATASET}":
        return f"rollout {row['step']:2d}: held-out accuracy {row['value']:.1%}"
    return None


def expected_time(paths: Paths, rollouts: int, algorithm: recipe.Algorithm) -> str:
    """Say how long the stages take that are not done yet; of PPO that is not known."""
    if algorithm == "ppo":
        return "Each stage prints the time that it took."
    stages = dict(EXPECTED_S) if not paths.sft_model.exists() else {"GRPO": EXPECTED_S["GRPO"]}
    stages["GRPO"] *= 0.1 + 0.9 * rollouts / recipe.GRPO_ROLLOUTS  # a tenth is the start
    named = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in stages.items())
    minutes = math.ceil(sum(stages.values()) / 60)
    return f"On two slow CPU cores with nothing else to do this takes about {minutes} min ({named})."


def quickstart(
    paths: Paths,
    seed: int,
    rollouts: int,
    shuffled: bool,
    algorithm: recipe.Algorithm = "grpo",
    lora_rank: int = 0,
) -> dict[str, Any]:
    """Run the stages that have not been run yet in ``paths`` and return the result."""
    seconds: dict[str, float] = {}
    logs = paths.root / "logs"
    if not paths.sft_model.exists():
        print("\n== 1. The model, its tokenizer and the data")
        for name, command in (("model", recipe.make_model(paths, seed)), ("data", recipe.make_data(paths, seed))):
            log = logs / f"{name}.log"
            seconds[name] = run_stage(name, ["python", "-m", *command], log, deadline_s=DEADLINES[name])
        print("\n== 2. SFT: imitate the hasty teacher")
        for leftover in (paths.sft, paths.sft_save):  # of an SFT that did not come to its end
            shutil.rmtree(leftover, ignore_errors=True)
        seconds["sft"] = run_stage(
            "SFT", ["python", recipe.SFT_SCRIPT, *recipe.sft(paths, seed)], logs / "sft.log",
            deadline_s=DEADLINES["sft"], metrics=paths.sft / "metrics.jsonl", describe=describe_sft,
        )  # fmt: skip
    name = algorithm.upper()
    print(f"\n== 3. {name}: learn from {'shuffled rewards (a control)' if shuffled else 'being right or wrong'}")
    if algorithm == "ppo":
        flags = recipe.ppo(paths, seed, rollouts=rollouts)
    else:
        flags = recipe.grpo(paths, seed, rollouts=rollouts, shuffled=shuffled, lora_rank=lora_rank)
    run_dir = Path(flags[flags.index("--run-dir") + 1])
    seconds[algorithm] = run_stage(
        name, ["python", "train.py", *flags], logs / f"{run_dir.name}.log", deadline_s=DEADLINES[algorithm],
        metrics=run_dir / "metrics.jsonl", describe=describe_grpo,
    )  # fmt: skip
    evaluations = accuracy(run_dir)
    if len(evaluations) < 2:
        raise StageError(f"{run_dir / 'metrics.jsonl'} holds {len(evaluations)} evaluations, expected at least 2")
    from slime.report import write_report

    result = {
        "seed": seed, "shuffled": shuffled, "algorithm": name, "lora_rank": lora_rank,
        "push_bytes": last_push(run_dir),
        "before": evaluations[0][1], "after": evaluations[-1][1],
        "evaluations": evaluations, "seconds": {k: round(v, 1) for k, v in seconds.items()},
        "report": str(write_report(run_dir)),
    }  # fmt: skip
    (run_dir / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def conclude(paths: Paths, result: dict[str, Any]) -> None:
    """Print what has happened, where to look and what to try."""
    during = " ".join(f"{value:.1%}" for _, value in result["evaluations"])
    accuracies = f"{result['before']:.1%} after SFT -> {result['after']:.1%} after {result['algorithm']}"
    took = ", ".join(f"{name} {value:.0f} s" for name, value in result["seconds"].items())
    adapters = f" (adapters of rank {result['lora_rank']})" if result["lora_rank"] else ""
    print(f"""
== Done ({took})

Held-out accuracy, sampled at temperature 1: {accuracies}
(of every evaluation: {during}).
Each push of weights to the engines: {result["push_bytes"]:,} bytes{adapters}.

Curves, time per stage and samples, to open in a browser:
    {os.path.relpath(result["report"])}
""")
    if not result["shuffled"]:
        flags = f"--dir {os.path.relpath(paths.root)} --shuffled-rewards"
        print(f"""\
Try next: the same with rewards dealt out at random, which should teach nothing:
    make quickstart QUICKSTART_FLAGS="{flags}"
then change any flag of the command lines above; `python train.py --help` explains them.""")


def main() -> int:
    """Command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data and sampling (default: 0)")
    parser.add_argument(
        "--rollouts", type=int, default=recipe.GRPO_ROLLOUTS, help="rollouts of GRPO or PPO (default: %(default)s)"
    )
    parser.add_argument(
        "--algorithm", choices=("grpo", "ppo"), default="grpo", help="what the third stage learns with (default: grpo)"
    )
    parser.add_argument(
        "--lora-rank", type=int, default=0, help="train adapters of this rank, not the model (default: 0, the model)"
    )
    parser.add_argument("--shuffled-rewards", action="store_true", help="the control: rewards dealt out at random")
    parser.add_argument("--dir", type=Path, help="directory; where it holds an SFT model, only the third stage is run")
    options = parser.parse_args()
    if options.rollouts < 1:
        parser.error(f"--rollouts {options.rollouts}: expected at least 1")
    if options.shuffled_rewards and options.algorithm != "grpo":
        parser.error("--shuffled-rewards is a control of --algorithm grpo, whose rewards are those of groups")
    if options.lora_rank < 0 or (options.lora_rank and (options.shuffled_rewards or options.algorithm != "grpo")):
        parser.error(
            f"--lora-rank {options.lora_rank}: expected 0, or a rank with --algorithm grpo and its own rewards"
        )
    root = options.dir or Path("runs") / f"quickstart-{time.strftime('%Y%m%d-%H%M%S')}"
    paths = Paths(Path(os.path.relpath(root, ROOT)) if root.absolute().is_relative_to(ROOT) else root.absolute())
    os.chdir(ROOT)
    shuffled, algorithm = options.shuffled_rewards, options.algorithm
    expected = expected_time(paths, options.rollouts, algorithm)
    print(INTRODUCTION.format(expected=expected, root=os.path.relpath(paths.root)), flush=True)
    try:
        conclude(paths, quickstart(paths, options.seed, options.rollouts, shuffled, algorithm, options.lora_rank))
    except StageError as error:
        print(f"\nquickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nquickstart: interrupted; nothing is left running", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
