"""Write a Hugging Face checkpoint with INT4 weights: tools.convert hf-to-int4 with the flags of slime <= 0.3.1.

python tools/convert_hf_to_int4_direct.py --model-dir /models/Moonlight --save-dir /models/Moonlight-INT4 --is-symmetric
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
    from tools.convert import add_int4_flags, hf_to_int4, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--save-dir", type=Path, required=True, help="appears when it is complete")
    parser.add_argument("--is-symmetric", action="store_true", help="no zero points; SGLang's experts need it")
    add_int4_flags(parser)
    options = parser.parse_args(argv)
    run(hf_to_int4, options.model_dir, options.save_dir, options)


if __name__ == "__main__":
    main()
