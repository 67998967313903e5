"""Read the arguments of the installed router: ``python -P router_args.py OUT.json``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path


def main(out: str) -> None:
    """Write the records of ``RouterArgs.add_cli_args`` (prefixed, without host and port) to ``out``."""
    path = Path(__file__).with_name("parser_records.py")
    spec = importlib.util.spec_from_file_location("parser_records", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    parser_records = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parser_records)

    from sglang_router.launch_router import RouterArgs

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    Path(out).write_text(json.dumps(parser_records.records(parser)))


if __name__ == "__main__":
    main(sys.argv[1])
