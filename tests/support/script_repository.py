"""A copy of the launch scripts in a repository of its own, and stand-ins for the programs they could start."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.script_runs import ROOT

PROGRAMS = ("ray", "torchrun", "sglang", "sglang-router", "ssh", "nohup", "kill", "pkill", "killall")
WATCHER = """
import os, sys
HEAVY = {"ray", "torch", "megatron", "sglang", "sglang_router", "transformers"}
STARTS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.kill",
          "socket.connect", "socket.bind"}
notes = os.open("NOTES", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def watch(event, args):
    if event == "import" and args[0].partition(".")[0] in HEAVY:
        os.write(notes, f"import {args[0]}\\n".encode())
    elif event in STARTS:
        os.write(notes, f"{event} {args}\\n".encode())
    elif event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        os.write(notes, f"write {args[0]}\\n".encode())

sys.addaudithook(watch)
"""
"""A ``sitecustomize`` module that notes what a Python process imports of the heavy packages, starts and writes."""


@dataclass(frozen=True)
class Repository:
    """A copy of ``scripts`` whose surroundings are known: everything that is not ``scripts`` is a stand-in."""

    path: Path
    bin: Path
    calls: Path
    """Of every stand-in that was started: its name and words, one line per word, an empty line after each call."""

    @property
    def scripts(self) -> Path:
        return self.path / "scripts"

    @property
    def notes(self) -> Path:
        """Return the imports, starts and writes of watched Python processes, a line each."""
        return self.path.parent / "notes"

    def stand_in(self, program: Path, then: str = "exit 1") -> None:
        """Make ``program`` an executable that records how it was called and then does ``then``."""
        program.parent.mkdir(parents=True, exist_ok=True)
        record = f'printf "%s\\n" {program.name} "$@" "" >> "{self.calls}"'
        program.write_text(f"#!/bin/bash\n{record}\n{then}\n")
        program.chmod(0o755)

    def called(self) -> list[list[str]]:
        """Every call of a stand-in."""
        text = self.calls.read_text() if self.calls.exists() else ""
        return [call.split("\n") for call in text.removesuffix("\n\n").split("\n\n") if call]

    def environment(self, **more: str) -> dict[str, str]:
        """Only what a script needs, nothing that this test run was started with."""
        return {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.path.parent / "home"), **more}


def make_repository(folder: Path) -> Repository:
    """A copy of the scripts below ``folder``."""
    repository = Repository(folder / "repository", folder / "bin", folder / "calls")
    shutil.copytree(ROOT / "scripts", repository.scripts, ignore=shutil.ignore_patterns("__pycache__"))
    for program in PROGRAMS:
        repository.stand_in(repository.bin / program)
    return repository


def make_dry_repository(folder: Path) -> Repository:
    """A copy of the scripts that runs the real ``train.py``, every process of it being watched."""
    made = make_repository(folder)
    for name in ("train.py", "train_async.py"):
        (made.path / name).symlink_to(ROOT / name)
    for name in ("home", "tmp", "elsewhere", "modules"):
        (folder / name).mkdir()
    (folder / "modules" / "sitecustomize.py").write_text(WATCHER.replace("NOTES", str(made.notes)))
    python = made.bin / "python3"
    python.write_text(f'#!/bin/bash\nPYTHONPATH={folder / "modules"} exec "{sys.executable}" -B "$@"\n')
    python.chmod(0o755)
    return made


def files_below(folder: Path) -> set[str]:
    """Paths of everything below ``folder``."""
    return {os.path.relpath(Path(at) / name, folder) for at, dirs, files in os.walk(folder) for name in (*dirs, *files)}
