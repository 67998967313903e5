"""As convert_torch_dist_to_hf.py, with several files in work at a time; memory is that many times --chunk-size."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path: without this, modules of this directory would hide packages (markdown)
    sys.path[0] = str(Path(__file__).resolve().parents[1])


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    from tools.convert_torch_dist_to_hf import convert, make_parser

    parser = make_parser(__doc__)
    parser.add_argument("--load-max-workers", type=int, default=2, help="files put together at a time")
    parser.add_argument("--save-max-workers", type=int, default=16, help="files written at a time")
    options = parser.parse_args(argv)
    convert(options, max(1, options.load_max_workers), max(1, options.save_max_workers))


if __name__ == "__main__":
    main()
