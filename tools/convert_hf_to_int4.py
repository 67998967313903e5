"""GPTQ is not available: say so, and which command writes INT4 weights rounded to nearest."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: end with status 1 and one sentence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--input-dir", default="MODEL")
    parser.add_argument("--output-dir", default="OUTPUT")
    parser.add_argument("--quant-group-size", type=int, default=32)
    options, _ = parser.parse_known_args(argv)
    sys.exit(
        "INT4 weights by GPTQ (llmcompressor, calibrated with --data-dir) are not available yet in this version; "
        f"rounded to nearest: tools/convert_hf_to_int4_direct.py --model-dir {options.input_dir} "
        f"--save-dir {options.output_dir} --group-size {options.quant_group_size} --is-symmetric"
    )


if __name__ == "__main__":
    main()
