"""Opening every safetensors file of the checkpoints that a run reads: the header says whether the file is whole."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from safetensors import SafetensorError, safe_open

from slime.first_look import Findings

FLAGS = ("hf_checkpoint", "ref_load", "opd_teacher_load", "load")  # --load may have taken its value from the others


def look_at_weights(args: Namespace, found: Findings) -> None:
    """Report the safetensors files of ``FLAGS`` that cannot be read; directories of other formats have none."""
    flag_of: dict[str, str] = {}
    for name in FLAGS:
        if directory := getattr(args, name):
            flag_of.setdefault(directory, f"--{name.replace('_', '-')}")
    for directory, flag in flag_of.items():
        found.begins(f"the files of {flag} {directory}")
        for path in sorted(Path(directory).glob("*.safetensors")):
            try:
                with safe_open(path, framework="numpy"):
                    pass
            except (SafetensorError, OSError) as e:
                found.errors.append(
                    f"{flag}: {path} is not a whole safetensors file: {e}. Download or export the checkpoint again"
                )
