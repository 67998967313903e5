"""Write a Hugging Face checkpoint with FP8 weights: python -m tools.convert hf-to-fp8 with the flags of slime <= 0.3.1.

python tools/convert_hf_to_fp8.py --model-dir /models/Qwen3-4B --save-dir /models/Qwen3-4B-FP8 --block-size 128 128
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path: without this, modules of this directory would hide packages (markdown)
    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    from tools.convert import add_fp8_flags, hf_to_fp8, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--save-dir", type=Path, required=True, help="appears when it is complete")
    add_fp8_flags(parser)
    options = parser.parse_args(argv)
    run(hf_to_fp8, options.model_dir, options.save_dir, options)


if __name__ == "__main__":
    main()
