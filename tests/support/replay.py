"""Rollout dumps made up from a seed, and what two trainings on them must have in common to the bit."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

from slime.rollout.debug_data import load_rollout, save_rollout
from slime.utils.types import Sample
from tests.support.run_train import Finished, run_train

# What a clock or the state of the machine decides.
DIFFERS = ("perf/", "rollout/requests/", "rollout/reward/latency/", "eval/reward/latency/")


def write_dumps(folder: Path, rollouts: int, *, prompts: int = 4, per_prompt: int = 4, vocab_size: int = 256) -> str:
    """Write ``rollouts`` dumps of random samples with masked tokens; return the template of their paths.

    Each has ``prompts * per_prompt`` trajectories, of one, two and three samples in turn. ``index`` is unique.
    """
    rng = random.Random(0)
    for rollout_id in range(rollouts):
        samples = [
            _made_up(rng, vocab_size, group_index=trajectory // per_prompt, rollout_id=trajectory)
            for trajectory in range(prompts * per_prompt)
            for _ in range(1 + trajectory % 3)
        ]
        for i, sample in enumerate(samples):
            sample.index = 1000 * rollout_id + i
        save_rollout(folder / f"{rollout_id}.pt", rollout_id, samples)
    return str(folder / "{rollout_id}.pt")


def _made_up(rng: random.Random, vocab_size: int, **fields: Any) -> Sample:
    prompt, response = rng.randrange(3, 12), rng.randrange(2, 40)
    return Sample(
        prompt="made up",
        response="made up",
        tokens=[rng.randrange(vocab_size) for _ in range(prompt + response)],
        response_length=response,
        loss_mask=[int(rng.random() > 0.2) for _ in range(response - 1)] + [1],
        rollout_log_probs=[-rng.random() - 5.0 for _ in range(response)],
        reward=float(rng.randrange(2)),
        status=Sample.Status.COMPLETED,
        **fields,
    )


def trajectories(template: str, rollouts: int) -> list[list[int]]:
    """Return the indices of the samples of every trajectory, in the order of the dumps."""
    found: dict[tuple[int, Any], list[int]] = {}
    for rollout_id in range(rollouts):
        for sample in load_rollout(template.format(rollout_id=rollout_id)):
            found.setdefault((rollout_id, sample.rollout_id), []).append(sample.index)
    return list(found.values())


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
        export, trained = folder / name / "hf", folder / name / "trained.jsonl"
        hook = ["--rollout-data-postprocess-path", "tests.support.rollout_hooks.note_trained"]
        keep = ["--save", str(folder / name / "save"), "--save-interval", "1", "--save-hf", f"{export}-{{rollout_id}}"]
        env = {"SLIME_TEST_TRAINED": str(trained)}
        run = run_train([*flags, *keep, *hook], folder / name / "run", env=env)
        lines = sorted(trained.read_text().splitlines())
        found.append({**fingerprint(run, Path(f"{export}-{last_rollout}")), "trained": lines})
    return found


def differences(runs: list[dict[str, list[str]]]) -> dict[str, list[str]]:
    """Return the lines that only one of two fingerprints has, with ``-`` or ``+`` before them, by kind."""
    first, second = runs
    found = {}
    for kind in first:
        alone = [(line, mark) for mark, a, b in (("-", first, second), ("+", second, first))
                 for line in set(a[kind]) - set(b[kind])]  # fmt: skip
        if alone:
            found[kind] = [f"{mark} {line}" for line, mark in sorted(alone)]
    return found
