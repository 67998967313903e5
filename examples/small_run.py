"""The small version of an example: a tiny model from nothing, SFT, GRPO, held-out metrics before and after.

The stages and the model are the quickstart's; an example brings its data and what is different of GRPO's flags.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.quickstart import recipe
from examples.quickstart.recipe import Paths
from examples.quickstart.run import describe_sft
from examples.quickstart.stages import ROOT, StageError, run_stage

DEADLINES = {"model": 120.0, "data": 120.0, "sft": 900.0, "grpo": 2400.0}
_OF_QUICKSTART = ("--prompt-data", "--label-key", "--custom-rm-path", "--eval-prompt-data", "--input-key")


@dataclass(frozen=True)
class SmallExample:
    """``flags`` (``{data}`` in them is the directory) are added to GRPO's, in which ``replaced`` have other values.

    ``python -m <package>.make_data --out DIR --seed N`` writes ``sft.jsonl`` and a file ``<name>.jsonl`` for each of
    the ``data_sets``, which are evaluated. They get better; those of ``watched``, which an ``--eval-config`` adds, are
    not trained on.
    """

    package: str
    what: str
    data_sets: tuple[str, ...]
    flags: tuple[str, ...]
    replaced: dict[str, str]
    rollouts: int
    watched: tuple[str, ...] = ()
    targets: Mapping[str, float] = field(default_factory=dict)
    """The least share of right answers to each data set at the end."""
    model: tuple[str, ...] = ()
    """Words for ``tools.tiny_model`` besides the quickstart's sizes, or in their place."""
    sft_flags: tuple[str, ...] = ()
    """Are added to those of SFT."""
    sft_rollouts: int = recipe.SFT_ROLLOUTS
    """Of 1280 demonstrations each."""
    warmup_steps: int = recipe.WARMUP_STEPS
    """Of GRPO, in which the learning rate rises."""
    generate: str = "slime.rollout.environments.generate"
    """``--custom-generate-function-path``, "" for the built-in one."""
    control: str = "examples.quickstart.reward.shuffled_rewards"
    """``--custom-reward-post-process-path`` of the control."""
    service: Callable[[Paths], AbstractContextManager[list[str]]] = lambda paths: nullcontext([])
    """A context that runs beside GRPO, and yields more flags of it."""

    def grpo(self, paths: Paths, seed: int, *, rollouts: int, shuffled: bool) -> list[str]:
        """Return the arguments of ``train.py`` for GRPO, without those of the service."""
        words = recipe.grpo(paths, seed, rollouts=rollouts, shuffled=shuffled, warmup_steps=self.warmup_steps)
        for flag in _OF_QUICKSTART:
            words = without(words, flag)
        for flag in ("--apply-chat-template", "--rollout-shuffle"):
            words.remove(flag)
        own = {"--custom-reward-post-process-path": self.control} if shuffled else {}
        for flag, value in (*self.replaced.items(), *own.items()):
            words[words.index(flag) + 1] = value
        evaluated = [word for name in self.data_sets for word in (name, str(paths.data / f"{name}.jsonl"))]
        words += ["--input-key", "messages"]
        if not any(flag.startswith("--eval-config=") for flag in self.flags):
            words += ["--eval-prompt-data", *evaluated]
        words += ["--custom-generate-function-path", self.generate] if self.generate else []
        return words + [flag.format(data=paths.data) for flag in self.flags]

    def evaluations(self, run_dir: Path) -> dict[str, list[tuple[int, float]]]:
        """Return (rollout, mean reward) of every evaluation, by data set."""
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return {
            name: [(row["step"], float(row["value"])) for row in rows if row["name"] == f"eval/{name}"]
            for name in (*self.data_sets, *self.watched)
        }

    def run(self, paths: Paths, seed: int, rollouts: int, shuffled: bool) -> dict[str, Any]:
        """Run the stages that have not been run yet in ``paths``; return the result, also in ``result.json``."""
        seconds: dict[str, float] = {}
        logs = paths.root / "logs"
        if not paths.sft_model.exists():
            data = [f"{self.package}.make_data", "--out", str(paths.data), "--seed", str(seed)]
            data += ["--demonstrations", str(paths.sft_rollouts * recipe.SFT_BATCH)]
            model = [*recipe.make_model(paths, seed), *self.model]
            for name, command in (("model", model), ("data", data)):
                log = logs / f"{name}.log"
                seconds[name] = run_stage(name, ["python", "-m", *command], log, deadline_s=DEADLINES[name])
            seconds["sft"] = run_stage(
                "SFT", ["python", recipe.SFT_SCRIPT, *recipe.sft(paths, seed), *self.sft_flags], logs / "sft.log",
                deadline_s=DEADLINES["sft"], metrics=paths.sft / "metrics.jsonl", describe=describe_sft,
            )  # fmt: skip
        flags = self.grpo(paths, seed, rollouts=rollouts, shuffled=shuffled)
        run_dir = Path(flags[flags.index("--run-dir") + 1])
        with self.service(paths) as more:
            seconds["grpo"] = run_stage(
                "GRPO", ["python", "train.py", *flags, *more], logs / f"{run_dir.name}.log",
                deadline_s=DEADLINES["grpo"], metrics=run_dir / "metrics.jsonl", describe=self.describe,
            )  # fmt: skip
        found = self.evaluations(run_dir)
        if missing := [name for name, ones in found.items() if len(ones) < 2]:
            raise StageError(f"{run_dir / 'metrics.jsonl'} has fewer than two evaluations of {', '.join(missing)}")
        result = {
            "example": self.package.rpartition(".")[2], "seed": seed, "shuffled": shuffled, "rollouts": rollouts,
            "before": {name: ones[0][1] for name, ones in found.items()},
            "after": {name: ones[-1][1] for name, ones in found.items()},
            "targets": dict(self.targets), "evaluations": found,
            "seconds": {name: round(value, 1) for name, value in seconds.items()},
            "cores": len(os.sched_getaffinity(0)),
        }  # fmt: skip
        (run_dir / "result.json").write_text(json.dumps(result, indent=2) + "\n")
        return result

    def describe(self, row: dict[str, Any]) -> str | None:
        """Return a line of each evaluation, and of the reward now and then."""
        if row["name"] in [f"eval/{name}" for name in (*self.data_sets, *self.watched)]:
            return f"rollout {row['step']:3d}: {row['name']} {row['value']:.1%}"
        if row["name"] == "rollout/raw_reward" and row["step"] % 10 == 0:
            return f"rollout {row['step']:3d}: reward {row['value']:.3f}"
        return None

    def main(self) -> int:
        """Command line; return the exit status."""
        parser = argparse.ArgumentParser(description=self.what)
        parser.add_argument("--seed", type=int, default=0, help="seed of model, data and sampling (default: 0)")
        parser.add_argument("--rollouts", type=int, default=self.rollouts, help="of GRPO (default: %(default)s)")
        parser.add_argument("--shuffled-rewards", action="store_true", help="the control: rewards dealt out at random")
        parser.add_argument("--dir", type=Path, help="directory; where it holds an SFT model, only GRPO is run")
        options = parser.parse_args()
        name = self.package.rpartition(".")[2]
        root = options.dir or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        os.chdir(ROOT)
        print(f"{self.what}\nEverything goes to {root}", flush=True)
        try:
            result = self.run(
                Paths(root.absolute(), self.sft_rollouts), options.seed, options.rollouts, options.shuffled_rewards
            )
        except StageError as error:
            print(f"\n{name}: {error}", file=sys.stderr)
            return 1
        for data_set, before in result["before"].items():
            print(f"{data_set}: {before:.1%} after SFT -> {result['after'][data_set]:.1%}")
        return 0


def without(words: list[str], flag: str) -> list[str]:
    """Return ``words`` without ``flag`` and its values."""
    start = words.index(flag)
    end = next((i for i in range(start + 1, len(words)) if words[i].startswith("--")), len(words))
    return words[:start] + words[end:]
