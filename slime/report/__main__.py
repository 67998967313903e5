"""Command line: ``python -m slime.report RUN_DIR`` (or ``slime-report RUN_DIR``)."""

from __future__ import annotations

import argparse
import sys
import webbrowser

from slime.report.page import write_report


def main(argv: list[str] | None = None) -> int:
    """Write the report and print where it is; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="slime-report",
        description="Write one self-contained HTML page about a run: curves, time per stage, samples, configuration.",
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", help="the run directory (--run-dir; by default below runs/)")
    parser.add_argument("-o", "--out", help="the file to write (default: RUN_DIR/report.html)")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    options = parser.parse_args(argv)
    try:
        out = write_report(options.run_dir, options.out)
    except FileNotFoundError as error:
        print(f"slime-report: {error}", file=sys.stderr)
        return 2
    print(out)
    if options.open:
        webbrowser.open(out.as_uri())
    return 0


if __name__ == "__main__":
    sys.exit(main())
