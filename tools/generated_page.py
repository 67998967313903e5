"""The command line of a generator that writes a part of one page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def write_or_check(description: str | None, path: Path, page: str, *, mistake: str, module: str) -> int:
    """Write ``page`` to ``path``; with ``--check`` only report (exit status 1) that the page there differs.

    ``mistake``: what is wrong with a page that differs, for the message. ``module``: the generator's.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="do not write; fail when the page is out of date")
    if not parser.parse_args().check:
        path.write_text(page, encoding="utf-8")
        return 0
    if path.read_text(encoding="utf-8") == page:
        return 0
    print(f"{path} {mistake}; run `python -m {module}`", file=sys.stderr)
    return 1
