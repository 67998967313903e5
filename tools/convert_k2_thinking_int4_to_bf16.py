"""Write a checkpoint with INT4 weights, as Kimi-K2-Thinking has them, in bf16: tools.convert to-bf16.

python tools/convert_k2_thinking_int4_to_bf16.py --model-dir /models/Kimi-K2-Thinking
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
    from tools.convert import run, to_bf16

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-dir", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, help="appears when it is complete (default: MODEL_DIR_bf16)")
    parser.add_argument("--overwrite", action="store_true", help="replace --output-dir if it exists")
    options = parser.parse_args(argv)
    target = options.output_dir or options.model_dir.with_name(f"{options.model_dir.name}_bf16")
    run(to_bf16, options.model_dir, target, options, options.overwrite)


if __name__ == "__main__":
    main()
