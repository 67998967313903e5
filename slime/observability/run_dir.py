"""The run directory: what a run leaves behind, on every machine, with or without a tracker.

::

    <run_dir>/config.yaml      every argument as resolved            command.txt   the command line
             versions.json     Python, packages, machine, commit     metrics.jsonl one line per metric and step
             logs/             one file per component                samples/      a few samples per rollout
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
import time
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from slime.utils.atomic_file import FULL, space_left, write_atomically
from slime.utils.plain import plain
from slime.utils.run_state import record
from slime.utils.secrets import mask_words, remember

if TYPE_CHECKING:
    from slime.arguments.args import Args

logger = logging.getLogger(__name__)

PACKAGES = (
    "slime", "torch", "ray", "megatron-core", "sglang", "sglang-router", "smg", "transformers", "tokenizers",
    "safetensors", "numpy", "aiohttp", "pydantic", "flash-attn", "transformer-engine", "wandb", "tensorboard",
)  # fmt: skip


def prepare(args: Args) -> Path:
    """Create the run directory, write configuration and versions into it, set ``args.run_dir`` and return it.

    ``--run-dir`` names it; without one it is ``runs/<date>-<time>-<pid>``. An existing directory is continued: metrics
    are appended, the configuration of an earlier start is kept beside the new one (``config.<n>.yaml``).
    """
    path = Path(args.run_dir or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}").absolute()
    remember(args)
    record(args, run_dir=str(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for directory in (path, path / "logs", path / "samples"):
            make_private(directory)
        _write_descriptions(args, path)
    except OSError as e:
        if e.errno not in FULL:
            raise OSError(e.errno, f"--run-dir {args.run_dir} cannot be written: {e.strerror or e}") from e
        logger.warning("the run directory cannot be written, and the run continues: %s%s", e, space_left(path))
    return path


def _write_descriptions(args: Args, path: Path) -> None:
    for name, text in (
        ("config.yaml", yaml.safe_dump(plain("", args), sort_keys=True, allow_unicode=True)),
        ("versions.json", json.dumps(versions(), indent=2) + "\n"),
        ("command.txt", command_line() + "\n"),
    ):
        file = path / name
        if file.exists() and file.read_text() != text:
            n = 1
            while (old := file.with_name(f"{file.stem}.{n}{file.suffix}")).exists():
                n += 1
            file.rename(old)
        write_atomically(file, text, private=True)


def make_private(directory: Path) -> None:
    """Make a directory that only this user can enter. One that exists stays as it is: it may have other uses."""
    directory.mkdir(mode=0o700, exist_ok=True)


def log_path(args: Args, component: str) -> Path:
    """Return ``<run_dir>/logs/<component>.log``; the directory exists afterwards, unless the disk is full."""
    path = Path(args.run_dir) / "logs" / f"{component}.log"
    with contextlib.suppress(OSError):  # who opens it says so
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def versions() -> dict[str, Any]:
    """Return the versions of Python and of the packages a result depends on, the machine and the commit."""
    return {
        "python": platform.python_version(),
        "packages": package_versions(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "commit": _commit(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


@cache
def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that a result depends on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or a directory that git refuses: the versions page simply has no commit
    return result.stdout.strip()


def command_line(argv: list[str] | None = None) -> str:
    """Return the command line of this process in shell syntax, with the secrets in it masked."""
    return shlex.join(mask_words(sys.argv if argv is None else argv))
