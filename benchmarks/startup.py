"""Time that a user waits for an answer about flags, as ratios to the start of Python itself.

The cases take turns, so that a busy moment of the machine falls on all of them.

    python benchmarks/startup.py --runs 15
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BASE = "python -c pass"
MODEL = ROOT / "scripts" / "models" / "qwen3-4B.sh"


def cases(directory: str) -> dict[str, list[str]]:
    """Return name of the case -> its command line."""
    python, train = sys.executable, str(ROOT / "train.py")
    words = "--hf-checkpoint /nowhere/Qwen3-4B --prompt-data prompts.jsonl --num-rollout 100 --rollout-batch-size 32 "
    words += "--n-samples-per-prompt 8 --global-batch-size 256 --colocate --tensor-model-parallel-size 2"
    dry_run = [python, train, *words.split(), *_model_words(), "--dry-run"]
    return {
        BASE: [python, "-c", "pass"],
        "import pydantic": [python, "-c", "import pydantic; pydantic.BaseModel"],
        "import slime.arguments": [python, "-c", "import slime.arguments"],
        "  and parse_args": [python, "-c", "from slime.arguments import parse_args"],
        "train.py --help": [python, train, "--help"],
        "train.py --help rollout": [python, train, "--help", "rollout"],
        "train.py, a typo": [python, train, "--rollout-bach-size", "32"],
        "train.py --dry-run": dry_run,
        "  and --dump-config": [*dry_run, "--dump-config", f"{directory}/config.yaml"],
    }


def _model_words() -> list[str]:
    """The flags in the script of a model, read by a shell."""
    command = ["bash", "-c", f'source "{MODEL}"; printf "%s\\n" "${{MODEL_ARGS[@]}}"']
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def seconds(command: list[str], expected: int) -> float:
    """Wall-clock time of one process. Raises RuntimeError when it does not end as expected."""
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    taken = time.perf_counter() - begin
    if done.returncode != expected:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="runs of every case")
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as directory:
        commands = cases(directory)
        taken: dict[str, list[float]] = {name: [] for name in commands}
        for run in range(runs + 1):
            for name, command in commands.items():
                one = seconds(command, 2 if "typo" in name else 0)
                if run:  # the first round fills the file cache
                    taken[name].append(one)
    base = statistics.median(taken[BASE])
    print(f"{'':26}{'median s':>9}{'min':>8}{'max':>8}{'x Python':>10}")
    for name, times in taken.items():
        median = statistics.median(times)
        print(f"{name:26}{median:9.3f}{min(times):8.3f}{max(times):8.3f}{median / base:10.1f}")
    print(f"{runs} runs each, load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {sys.version.split()[0]}")


if __name__ == "__main__":
    main()
