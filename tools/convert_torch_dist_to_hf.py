"""Write the Hugging Face checkpoint of a finished Megatron torch_dist checkpoint; needs no GPU.

    python tools/convert_torch_dist_to_hf.py --input-dir checkpoints/iter_0000009 --output-dir exported \\
        --origin-hf-dir /models/Qwen3-4B
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path: without this, modules of this directory would hide packages (markdown)
    sys.path[0] = str(Path(__file__).resolve().parents[1])


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the flags that the sequential and the parallel command share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input-dir", type=Path, required=True, help="an iteration, or a --save directory: its last")
    parser.add_argument("--output-dir", type=Path, required=True, help="appears when it is complete")
    parser.add_argument(
        "--origin-hf-dir", type=Path, help="Hugging Face checkpoint of the model: configuration, tokenizer"
    )
    parser.add_argument("--model-name", help="model family, such as qwen3_moe; default: that of --origin-hf-dir")
    parser.add_argument("-f", "--force", action="store_true", help="replace --output-dir if it exists")
    parser.add_argument("--chunk-size", type=int, default=5 * 2**30, help="bytes of a file at most (default 5 GiB)")
    parser.add_argument("--vocab-size", type=int, help="rows of the vocabulary to keep (default: those of the config)")
    parser.add_argument(
        *("-a", "--add-missing-from-origin-hf"),
        action="store_true",
        help="take tensors that the checkpoint lacks (vision tower, MTP layers) from --origin-hf-dir",
    )
    return parser


def convert(options: argparse.Namespace, readers: int, writers: int) -> None:
    """Convert as the flags say; exit with status 1 and one line when it cannot be done."""
    from slime.backends.megatron_utils.checkpoints.convert import Conversion
    from slime.backends.megatron_utils.checkpoints.convert import convert as run

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    conversion = Conversion(
        input_dir=options.input_dir,
        output_dir=options.output_dir,
        origin_hf_dir=options.origin_hf_dir,
        model_name=options.model_name,
        vocab_size=options.vocab_size,
        add_missing=options.add_missing_from_origin_hf,
        force=options.force,
        chunk_bytes=options.chunk_size,
        readers=readers,
        writers=writers,
    )
    try:
        print(f"wrote {run(conversion)}")
    except (ValueError, OSError) as error:
        sys.exit(str(error))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    convert(make_parser(__doc__).parse_args(argv), 1, 1)


if __name__ == "__main__":
    main()
