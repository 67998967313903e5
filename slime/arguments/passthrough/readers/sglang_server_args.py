"""Read the arguments of the installed SGLang server: ``python -P sglang_server_args.py OUT.json``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path


def main(out: str) -> None:
    """Write the records of ``ServerArgs.add_cli_args`` to ``out``."""
    path = Path(__file__).with_name("parser_records.py")
    spec = importlib.util.spec_from_file_location("parser_records", path)
    assert spec is not None, path
    assert spec.loader is not None, path
    parser_records = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(parser_records)

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    Path(out).write_text(json.dumps(parser_records.records(parser)))


if __name__ == "__main__":
    main(sys.argv[1])
