"""Make --save usable as --ref-load or --load of a run: a link to --hf-checkpoint, or a bf16 copy of one in FP8.

Trainers read Hugging Face checkpoints themselves, so nothing has to be converted, and the flags that describe the model
are not needed: train.py compares them with config.json. Under torchrun or Slurm the first process does it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path: without this, modules of this directory would hide packages (markdown)
    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    from slime.utils.external_utils.command_utils import make_loadable

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hf-checkpoint", type=Path, required=True)
    parser.add_argument("--save", type=Path, required=True)
    options, others = parser.parse_known_args(argv)
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) > 0:
        return
    if others:
        print(f"not needed, as nothing is converted: {' '.join(others)}", flush=True)
    try:
        make_loadable(options.hf_checkpoint, options.save)
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
