"""Rollout dumps made up from a seed, and what two trainings on them must have in common to the bit."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

from slime.rollout.debug_data import save_rollout
from slime.utils.types import Sample
from tests.support.run_train import Finished, run_train

# What a clock or the state of the machine decides.
DIFFERS = ("perf/",)


def write_dumps(folder: Path, rollouts: int, *, prompts: int = 4, per_prompt: int = 4, vocab_size: int = 256) -> str:
    """Write ``rollouts`` dumps of random samples with masked tokens; return the template of their paths."""
    rng = random.Random(0)
    for rollout_id in range(rollouts):
        samples = []
        for i in range(prompts * per_prompt):
            prompt, response = rng.randrange(3, 12), rng.randrange(2, 40)
            sample = Sample(
                group_index=i // per_prompt,
                index=i,
                prompt="made up",
                response="made up",
                tokens=[rng.randrange(vocab_size) for _ in range(prompt + response)],
                response_length=response,
                loss_mask=[int(rng.random() > 0.2) for _ in range(response - 1)] + [1],
                rollout_log_probs=[-rng.random() - 5.0 for _ in range(response)],
                reward=float(rng.randrange(2)),
                status=Sample.Status.COMPLETED,
            )
            samples.append(sample)
        save_rollout(folder / f"{rollout_id}.pt", rollout_id, samples)
    return str(folder / "{rollout_id}.pt")


def fingerprint(run: Finished, export: Path) -> dict[str, list[str]]:
    """Return every metric as it was written, sorted, and the hash of every exported file."""
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    metrics = [f"{r['name']} {r['step']} {r['value']!r}" for r in lines if not r["name"].startswith(DIFFERS)]
    files = sorted(path for path in export.rglob("*") if path.is_file())
    return {
        "metrics": sorted(metrics),
        "files": [f"{path.relative_to(export)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in files],
    }


def train_twice(flags: list[str], folder: Path, last_rollout: int) -> list[dict[str, list[str]]]:
    """Run ``train.py`` with ``flags`` twice; return both fingerprints."""
    found = []
    for name in ("first", "second"):
        export = folder / name / "hf"
        run = run_train(
            [*flags, "--save-hf", f"{export}-{{rollout_id}}", *_saving(folder / name)], folder / name / "run"
        )
        found.append(fingerprint(run, Path(f"{export}-{last_rollout}")))
    return found


def _saving(folder: Path) -> list[str]:
    return ["--save", str(folder / "save"), "--save-interval", "1"]
