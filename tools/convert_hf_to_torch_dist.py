"""Make --save usable as --ref-load or --load of a run: a link to --hf-checkpoint, or a bf16 copy of one in FP8.

Trainers read Hugging Face checkpoints themselves, so nothing has to be converted, and the flags that describe the model
are not needed: train.py compares them with config.json. Under torchrun or Slurm the first process does it.

With --torch-dist a Megatron checkpoint is written all the same, for programs that read nothing else. It takes no GPU,
and the memory of a few weights; python -m tools.convert hf-to-torch-dist does the same.
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--hf-checkpoint", type=Path, required=True)
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--torch-dist", action="store_true", help="write a Megatron checkpoint instead of a link")
    parser.add_argument("-f", "--force", action="store_true", help="with --torch-dist: replace --save if it exists")
    options, others = parser.parse_known_args(argv)
    if options.force and not options.torch_dist:
        parser.error("-f replaces what --torch-dist writes: give that, too, or remove --save yourself")
    if int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))) > 0:
        return
    if others:
        print(f"not needed, as config.json describes the model: {' '.join(others)}", flush=True)
    try:
        if options.torch_dist:
            from slime.backends.megatron_utils.checkpoints.to_torch_dist import to_torch_dist

            to_torch_dist(options.hf_checkpoint, options.save, force=options.force)
        else:
            from slime.launch.command_utils import make_loadable

            make_loadable(options.hf_checkpoint, options.save)
    except (ValueError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
