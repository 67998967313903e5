"""Write a Hugging Face checkpoint with FP8 weights again in bf16.

python tools/fp8_cast_bf16.py --input-fp8-hf-path /models/GLM-FP8 --output-bf16-hf-path /models/GLM
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
    from slime.weights.quantization.files import to_bf16

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-fp8-hf-path", type=Path, required=True)
    parser.add_argument("--output-bf16-hf-path", type=Path, required=True, help="appears when it is complete")
    options = parser.parse_args(argv)
    try:
        to_bf16(options.input_fp8_hf_path, options.output_bf16_hf_path)
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(f"wrote {options.output_bf16_hf_path}")


if __name__ == "__main__":
    main()
