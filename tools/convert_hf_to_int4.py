"""Write a checkpoint in INT4 by GPTQ (needs llmcompressor): tools.convert hf-to-int4 with the flags of slime <= 0.3.1.

python tools/convert_hf_to_int4.py --input-dir /models/Moonlight --output-dir /models/Moonlight-INT4 --data-dir wikitext
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path: without this, modules of this directory would hide packages (markdown)
    sys.path[0] = str(Path(__file__).resolve().parents[1])

DATA = "train-00000-of-00001.parquet"


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    from slime.weights.quantization.files import ONLY_EXPERTS
    from tools.convert import add_calibration_flags, hf_to_int4, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True, help="appears when it is complete")
    parser.add_argument("--data-dir", type=Path, required=True, help=f"with {DATA}, which has texts in a column text")
    parser.add_argument("--quant-type", choices=["W4A16", "W8A16"], default="W4A16")
    parser.add_argument("--quant-group-size", type=int, default=32, help="numbers of a row with one scale (default 32)")
    add_calibration_flags(parser)
    options = parser.parse_args(argv)
    if options.quant_type != "W4A16":
        sys.exit("--quant-type W8A16 is not available: engines could not be sent weights in that format; give W4A16")
    more = {"group_size": options.quant_group_size, "is_symmetric": True, "calibration_data": options.data_dir / DATA}
    given = argparse.Namespace(**vars(options), **more, ignore_rules=list(ONLY_EXPERTS), max_workers=1)
    run(hf_to_int4, options.input_dir, options.output_dir, given)


if __name__ == "__main__":
    main()
