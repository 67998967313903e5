"""Opening every safetensors file of the checkpoints that a run reads: the header says whether the file is whole."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from slime.first_look import Findings
from slime.utils.hf_checkpoint import HfCheckpoint

FLAGS = ("hf_checkpoint", "ref_load", "opd_teacher_load", "load")  # --load may have taken its value from the others


def look_at_weights(args: Namespace, found: Findings) -> None:
    """Report safetensors files of ``FLAGS`` that are missing or cannot be read; other formats have none."""
    flag_of: dict[str, str] = {}
    for name in FLAGS:
        if directory := getattr(args, name):
            flag_of.setdefault(directory, f"--{name.replace('_', '-')}")
    for directory, flag in flag_of.items():
        if not any(Path(directory).glob("*.safetensors*")):
            continue
        found.begins(f"the files of {flag} {directory}")
        try:
            with HfCheckpoint(directory, framework="numpy") as checkpoint:
                checkpoint.open_all()
        except (ValueError, OSError) as e:
            found.errors.append(f"{flag}: {e}")
