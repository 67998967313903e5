"""Write the Hugging Face checkpoint of what a run would load, and with --check-same compare it with --hf-checkpoint.

python tools/convert_to_hf.py --load checkpoints --hf-checkpoint /models/Qwen3-4B --output-dir exported --check-same
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path: without this, modules of this directory would hide packages (markdown)
    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: Sequence[str] | None = None) -> None:
    """Command line. The flags that describe the model are not needed: config.json of --hf-checkpoint does."""
    from slime.backends.megatron_utils.checkpoints.convert import Conversion, convert, differences

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--load", type=Path, required=True, help="a --save directory, or one of its iterations")
    parser.add_argument("--hf-checkpoint", type=Path, required=True, help="the model that the run began with")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--check-same", action="store_true", help="exit with status 1 when a tensor differs")
    options, others = parser.parse_known_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if others:
        print(f"not needed, config.json describes the model: {' '.join(others)}", flush=True)
    try:
        conversion = Conversion(options.load, options.output_dir, options.hf_checkpoint, add_missing=True)
        made = convert(conversion)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(f"wrote {made}")
    if options.check_same:
        found = differences(made, options.hf_checkpoint)
        if found:
            sys.exit("\n".join([f"{len(found)} differences from {options.hf_checkpoint}:", *found]))
        print(f"all tensors equal those of {options.hf_checkpoint}")


if __name__ == "__main__":
    main()
