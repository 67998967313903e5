"""Read the arguments of an installed package in a helper process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from slime.arguments.errors import ArgumentError
from slime.arguments.passthrough.source import READERS, SGLANG, Source, checkout, identity, unused_core

STAND_INS = Path(__file__).parents[2] / "backends" / "sglang_utils" / "cpu_standins"
READ_TIMEOUT_S = 300


class UnreadableArguments(ArgumentError):
    """The helper process failed; ``reason`` is the last line of what it said."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def read_installed(source: Source) -> list[dict[str, Any]]:
    """Read the arguments of the installed package (seconds). Raises ``UnreadableArguments``."""
    with tempfile.TemporaryDirectory(prefix="slime-arguments-") as directory:
        out = Path(directory) / "records.json"
        command = [sys.executable, "-P", str(READERS / "frame.py"), source.reader, str(out)]
        try:
            done = subprocess.run(
                command, env=_environment(source), capture_output=True, text=True, timeout=READ_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            reason = f"reading the arguments of {source.package} took more than {READ_TIMEOUT_S} s"
            raise UnreadableArguments(f"{reason}: {' '.join(command)}", reason) from error
        if done.returncode != 0 or not out.is_file():
            raise _failure(source, done.returncode, done.stderr)
        return json.loads(out.read_text())


def has_cuda_device() -> bool:
    """Whether this machine has an NVIDIA driver, without asking torch."""
    return any(Path(p).exists() for p in ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"))


def _environment(source: Source) -> dict[str, str]:
    """The helper's environment: the copy that was found here is the one it imports.

    Without a GPU the stand-ins for SGLang's compiled kernels are on its ``PYTHONPATH``, and on no other process's.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    in_front = [str(STAND_INS)] if source is SGLANG and not has_cuda_device() else []
    found = checkout(source)
    if found is not None:
        in_front.append(str(found.parents[source.module.count(".")]))
    given, unused = env.get("PYTHONPATH", "").split(os.pathsep), unused_core()
    if unused is not None:
        given = [p for p in given if Path(p, "megatron", "core").absolute() != unused.absolute()]
    env["PYTHONPATH"] = os.pathsep.join(p for p in (*in_front, *given) if p)
    return env


def _failure(source: Source, code: int, stderr: str) -> UnreadableArguments:
    words = stderr.strip().splitlines() or ["(nothing)"]
    way_out = f"Install {source.package}=={source.pinned}, or repair" if source.pinned else "Repair"
    return UnreadableArguments(
        f"cannot read the arguments of the installed {source.package} {identity(source) or ''} (exit code {code}). "
        "Its last words:\n" + "\n".join(words[-8:]) + f"\n{way_out} the installation.",
        reason=words[-1].strip(),
    )
