"""Run small versions of examples, each from nothing and then with its control, and add what they learned to the page.

python -m tools.run_examples retool tau_bench --seeds 0 1

Directories are ``runs/<example>-<seed>-<time>``. An example that fails does not keep the others from being run; the
exit status is 1 then.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from tools import gen_examples_doc

ROOT = gen_examples_doc.ROOT
NAMES = sorted({path.parent.name for path in (ROOT / "examples").glob("*/run.py")} - {"quickstart"})


def run(name: str, seed: int) -> bool:
    """Run one example and its control with one seed; return whether both results were added."""
    directory = ROOT / "runs" / f"{name}-{seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    command = [sys.executable, "-m", f"examples.{name}.run", "--seed", str(seed), "--dir", str(directory)]
    for control in ([], ["--shuffled-rewards"]):
        if subprocess.run([*command, *control], cwd=ROOT, check=False).returncode:
            return False
    gen_examples_doc.add(directory / kind / "result.json" for kind in ("grpo", "grpo_shuffled"))
    return True


def main() -> int:
    """Command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("examples", nargs="*", default=NAMES, help=f"of {', '.join(NAMES)}; default: all of them")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="default: 0")
    options = parser.parse_args()
    if unknown := [name for name in options.examples if name not in NAMES]:
        parser.error(f"{unknown[0]} is no example with a small version; those are {', '.join(NAMES)}")
    failed = [f"{name} (seed {seed})" for name in options.examples for seed in options.seeds if not run(name, seed)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
