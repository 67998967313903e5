"""The command line of the scripts that make the data of small versions."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Protocol


class MakeData(Protocol):
    """Writes ``sft.jsonl`` with ``demonstrations`` chats, and the data sets, to ``out``."""

    def __call__(self, out: Path, *, seed: int, demonstrations: int) -> None: ...


def data_command(description: str | None, make_data: MakeData) -> None:
    """Read ``--out``, ``--seed`` and ``--demonstrations``, and make the data."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the demonstrations and of the order of problems")
    parser.add_argument("--demonstrations", type=int, default=76_800, help="chats for SFT (default: %(default)s)")
    options = parser.parse_args()
    make_data(options.out, seed=options.seed, demonstrations=options.demonstrations)
