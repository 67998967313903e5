"""Launch scripts as users of slime <= 0.3.1 have them: the command line that each would start, found without starting.

Bash scripts run with stand-ins for every program they name, and nothing else on their ``PATH``: they end processes by
name and start Ray.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.imports import ROOT

FOLDER = Path(__file__).parents[1] / "data" / "launch_scripts"
HARMLESS = ("dirname", "grep", "wc", "seq", "cat", "bash")
STOOD_IN_FOR = ("pkill", "sleep", "nvidia-smi", "pip", "python3")
RAY = """#!/bin/bash
[ "$1 $2" = "job submit" ] || exit 0
while [ "$1" != -- ]; do shift; done
printf '%s\\0' "${@:2}" > "$RECORD"
"""


def names(suffix: str) -> list[str]:
    """The scripts with this suffix."""
    return sorted(path.name for path in FOLDER.glob(f"*{suffix}"))


def words_of_bash(name: str, folder: Path) -> list[str]:
    """The flags that the script hands to ``ray job submit``; ``folder`` is empty and becomes its repository."""
    programs = folder / "bin"
    programs.mkdir()
    for program in HARMLESS:
        (programs / program).symlink_to(str(shutil.which(program)))
    for program in STOOD_IN_FOR:
        (programs / program).write_text("#!/bin/bash\nexit 1\n")
    (programs / "ray").write_text(RAY)
    for program in programs.iterdir():
        if not program.is_symlink():
            program.chmod(0o755)
    shutil.copytree(FOLDER, folder / "scripts")
    (folder / "scripts" / "models").symlink_to(ROOT / "scripts" / "models")
    record = folder / "record"
    env = {"PATH": str(programs), "HOME": str(folder), "RECORD": str(record), "WANDB_KEY": "key"}
    subprocess.run(
        [str(programs / "bash"), str(folder / "scripts" / name)], env=env, cwd=folder, check=True, capture_output=True,
        timeout=60,
    )  # fmt: skip
    return record.read_text().split("\0")[2:-1]


def words_of_python(name: str, folder: Path) -> list[str]:
    """Flags of the command line that the launcher would start, in a dry run that prints it."""
    env = {
        "PATH": "/usr/bin:/bin", "HOME": str(folder), "PYTHONPATH": str(ROOT), "TMPDIR": str(folder),
        "SLIME_DRY_RUN": "1", "SLIME_SCRIPT_ENABLE_RAY_SUBMIT": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(FOLDER / name)],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "MODEL_ARGS" in line]
    preparation, _, program = line.removeprefix("EXEC: ").partition(" && ")
    shown = subprocess.run(
        ["/bin/bash", "-c", f"{preparation} && printf '%s\\0' {program}"],
        env={"PATH": os.environ["PATH"]}, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return shown.stdout.split("\0")[2:-1]
