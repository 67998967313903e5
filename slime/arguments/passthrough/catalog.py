"""Argument lists of installed packages, read once per version.

Importing SGLang takes 8 s and Megatron 4 s, so their arguments are read in a helper process and kept as JSON: the
lists of the pinned versions ship with slime, those of other versions are cached under ``$XDG_CACHE_HOME/slime``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.arguments.errors import ArgumentError

HERE = Path(__file__).parent
STAND_INS = HERE.parents[1] / "backends" / "sglang_utils" / "cpu_standins"
READ_TIMEOUT_S = 300


@dataclass(frozen=True)
class Source:
    """A package whose arguments are passed through: its distribution name, the pinned version and its reader."""

    package: str
    pinned: str
    reader: str


MEGATRON = Source("megatron-core", "0.16.1", "megatron_config.py")
SGLANG = Source("sglang", "0.5.20", "sglang_server_args.py")
ROUTER = Source("sglang-router", "0.3.2", "router_args.py")
SOURCES = (MEGATRON, SGLANG, ROUTER)


def installed_version(source: Source) -> str | None:
    """Version of the installed package, or None."""
    try:
        return importlib.metadata.version(source.package)
    except importlib.metadata.PackageNotFoundError:
        return None


def records(source: Source) -> list[dict[str, Any]]:
    """The records of the installed version; of the pinned one when the package is not installed here (a head node)."""
    version = installed_version(source) or source.pinned
    name = f"{source.package}-{version}.json"
    for path in (HERE / "shipped" / name, cache_directory() / name):
        if path.is_file():
            return json.loads(path.read_text())
    found = read_installed(source)
    write_atomically(cache_directory() / name, json.dumps(found))
    return found


def cache_directory() -> Path:
    """Where lists of versions other than the pinned ones are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "slime" / "arguments"


def write_atomically(path: Path, text: str) -> None:
    """Write beside ``path`` and rename; a cache that cannot be written costs time, so it is only said on stderr."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError as error:
        print(f"slime: cannot cache the argument list in {path}: {error}", file=sys.stderr)


def has_cuda_device() -> bool:
    """Whether this machine has an NVIDIA driver, without asking torch."""
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def read_installed(source: Source) -> list[dict[str, Any]]:
    """Read the arguments of the installed package in a helper process (seconds).

    Without a GPU the stand-ins for SGLang's compiled kernels are put on the helper's ``PYTHONPATH``, and on no other's.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    if source is SGLANG and not has_cuda_device():
        env["PYTHONPATH"] = os.pathsep.join(p for p in (str(STAND_INS), env.get("PYTHONPATH", "")) if p)
    with tempfile.TemporaryDirectory(prefix="slime-arguments-") as directory:
        out = Path(directory) / "records.json"
        command = [sys.executable, "-P", str(HERE / "readers" / source.reader), str(out)]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=READ_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ArgumentError(
                f"reading the arguments of {source.package} took more than {READ_TIMEOUT_S} s: {' '.join(command)}"
            ) from error
        if done.returncode != 0 or not out.is_file():
            tail = "\n".join(done.stderr.strip().splitlines()[-8:])
            raise ArgumentError(
                f"cannot read the arguments of the installed {source.package} {installed_version(source)} "
                f"(exit code {done.returncode}). Its last words:\n{tail}\n"
                f"Install {source.package}=={source.pinned}, or repair the installation."
            )
        return json.loads(out.read_text())
